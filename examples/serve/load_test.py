"""Sends many requests to a server at once and compares each answer with that given alone. Asks
which attention the server uses, and a question whose answer is known."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from harness.prompts import PROMPTS
from xla_paged_attention.exits import end_when_interrupted, needs
from xla_paged_attention.server import attention
from xla_paged_attention.server.serve import NAME

with needs("examples.serve.load_test", "'xla-paged-attention[serve]'"):
    from openai import APIConnectionError, AsyncOpenAI
    from rich.console import Console
    from rich.table import Table

QUESTION, KNOWN = "What is the capital of France?", "Paris"
"""Any model knows the answer. With a wrong attention it gives another."""

_WHY_UNEQUAL = (
    "The attention has the same bits in any batch; in bfloat16, the rest of the model may not. "
    "Start the server with --dtype float32 to compare."
)


class Answer(NamedTuple):
    """What a server streamed."""

    text: str
    num_chunks: int
    first: float  # seconds to the first chunk
    total: float  # seconds


class Report(NamedTuple):
    """Answers given one after the other, and all at once."""

    known: Answer  # to QUESTION
    alone: list[Answer]
    together: list[Answer | None]
    seconds: float  # of all at once

    @property
    def num_lost(self) -> int:
        """Requests without an answer."""
        return self.together.count(None)

    @property
    def num_equal(self) -> int:
        """Answers that are those given alone."""
        pairs = zip(self.alone, self.together, strict=True)
        return sum(b is not None and a.text == b.text for a, b in pairs)

    @property
    def is_good(self) -> bool:
        """Whether no answer is lost or known to be wrong."""
        return self.num_lost == 0 and self.is_right

    @property
    def is_right(self) -> bool:
        """Whether the known answer is given."""
        return KNOWN in self.known.text


async def measure(url: str, prompts: list[str], max_tokens: int) -> Report:
    """Asks alone, then all at once.

    Args:
        url: of the server, such as ``http://127.0.0.1:8000/v1``.
        prompts: messages of a user.
        max_tokens: of an answer.
    """
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
        known = await _ask(client, QUESTION, max(max_tokens, 16))
        alone = [await _ask(client, prompt, max_tokens) for prompt in prompts]
        start = time.perf_counter()
        answers = (_ask(client, prompt, max_tokens) for prompt in prompts)
        together = await asyncio.gather(*answers, return_exceptions=True)
        seconds = time.perf_counter() - start
    answered = [x if isinstance(x, Answer) else None for x in together]
    return Report(known, alone, answered, seconds)


async def _ask(client: AsyncOpenAI, prompt: str, max_tokens: int) -> Answer:
    start = time.perf_counter()
    first, pieces = 0.0, list[str]()
    stream = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - start
            pieces.append(chunk.choices[0].delta.content)
    return Answer("".join(pieces), len(pieces), first, time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> int:
    """The command. Its exit status is 1 if an answer is lost or known to be wrong, or if the
    server's attention is another one."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.serve.load_test",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="of the server")
    add("--requests", type=int, default=64, help="at once")
    add("--max-tokens", type=int, default=64, help="of an answer")
    add("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(options.requests)]
    server = urlsplit(options.url)
    try:
        names = attention.ask(f"{server.scheme}://{server.netloc}")
        report = asyncio.run(measure(options.url, prompts, options.max_tokens))
    except HTTPError as error:
        sys.exit(f"{error.url}: {error}; start the server with 'xla-paged-attention serve'")
    except (URLError, APIConnectionError):
        sys.exit(f"no server answers at {options.url}: start it with 'xla-paged-attention serve'")
    firsts = sorted(x.first for x in report.together if x is not None)
    tokens = sum(x.num_chunks for x in report.together if x is not None)
    figures = {
        "attention": ", ".join(names),
        QUESTION: report.known.text,
        "requests": len(prompts),
        "lost": report.num_lost,
        "equal to alone": f"{report.num_equal} of {len(prompts)}",
        "seconds": round(report.seconds, 2),
        "chunks per second": round(tokens / report.seconds, 1),
        "median seconds to the first": round(firsts[len(firsts) // 2], 2) if firsts else None,
    }
    if options.json:
        print(json.dumps(figures))
    else:
        table = Table("figure", "value", title=f"{len(prompts)} requests at once")
        for name, value in figures.items():
            table.add_row(name, str(value))
        Console().print(table)
        if report.num_equal < len(prompts):
            print(_WHY_UNEQUAL)
    if not attention.is_ours(names):
        print(f"the attention must be that of {attention.OURS.strip()}", file=sys.stderr)
        return 1
    return 0 if report.is_good else 1


if __name__ == "__main__":
    end_when_interrupted()
    sys.exit(main())
