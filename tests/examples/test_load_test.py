"""The load test of a server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from examples.serve import load_test
from harness.prompts import PROMPTS
from tests.support.server import ENVIRONMENT, Server, ready
from xla_paged_attention.server import attention


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from ready(tmp_path_factory.mktemp("server"))


def test_server_loses_no_request(server: Server) -> None:
    """PyTorch's matrix products depend on the size of the batch in their last bits, so that an
    answer may differ from that given alone. test_a_real_model_alone_and_in_a_batch does without."""
    assert len({*PROMPTS}) == 64
    prompts = PROMPTS[:24]
    report = asyncio.run(load_test.measure(f"{server.url}/v1", prompts, max_tokens=16))
    assert report.known.text == "The capital of France is Paris."
    assert report.is_good
    assert report.num_lost == 0
    assert all(answer and answer.num_chunks > 1 for answer in report.together), "not streamed"
    assert report.num_equal >= 22, "more than rounding"


def test_the_load_test_names_the_attention(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--url", f"{server.url}/v1", "--requests", "2", "--max-tokens", "4", "--json"]
    assert load_test.main(options) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["attention"] == attention.ask(server.url)[0]
    assert "Paris" in figures[load_test.QUESTION]
    assert figures["equal to alone"].endswith(" of 2")
    monkeypatch.setattr(load_test, "KNOWN", "London")
    assert load_test.main(options) == 1
    monkeypatch.setattr(load_test, "KNOWN", "Paris")
    monkeypatch.setattr(attention, "OURS", "another ")
    assert load_test.main(options) == 1


def test_without_a_server() -> None:
    command = [sys.executable, "-m", "examples.serve.load_test", "--url", "http://127.0.0.1:9/v1"]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("no server answers at http://127.0.0.1:9/v1: start it with")
