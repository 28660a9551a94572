"""Shows the results of ``make gpu-check`` in Markdown: the answers, the steps and the contests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

LAB = Path(__file__).with_name("lab.json")
OUTCOMES = {True: "ok", False: "FAILED", None: "left out"}


def lab() -> dict[str, Any]:
    """lab.json: parts, variants, steps and questions."""
    found: dict[str, Any] = json.loads(LAB.read_text())
    return found


def figures(results: Mapping[str, Any]) -> dict[str, float]:
    """All numbers that the steps have found, by step and name. A contest's are microseconds; under
    "same bits", 1 says that a variant's results have the bits of the module in use."""

    def walk(name: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, Mapping) and "rows" in value:
            for row in value["rows"]:
                title = f"{name}/{row['kind']} {row['workload']}"
                yield from ((f"{title}/{key}", x * 1e6) for key, x in row["seconds"].items())
                for key, is_same in row.get("same_bits", {}).items():
                    yield f"{name}/same bits/{row['kind']} {row['workload']}/{key}", float(is_same)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk(f"{name}/{key}" if name else key, inner)
        elif isinstance(value, (int, float)):
            yield name, float(value)

    return dict(walk("", results))


def answers(
    questions: Sequence[Mapping[str, Any]], results: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Each question with its figure and decision; both are None while the figure is missing.

    A figure is the least of those that match a pattern, divided by the least that matches `over`,
    or less that which matches `minus`.
    """
    found = figures(results)

    def least(pattern: str) -> float | None:
        return min((x for name, x in found.items() if fnmatchcase(name, pattern)), default=None)

    answered = []
    for question in questions:
        figure, decision = least(question["figure"]), None
        for key in question.keys() & {"over", "minus"}:
            other = least(question[key])
            if figure is None or other is None:
                figure = None
            else:
                figure = figure / other if key == "over" else figure - other
        if figure is not None:
            holds = figure <= question.get("at_most", figure)
            holds &= figure >= question.get("at_least", figure)
            decision = question["then"] if holds else question["else"]
        answered.append(
            {
                "question": question["question"],
                "prediction": question.get("prediction"),
                "figure": figure,
                "decision": decision,
            }
        )
    return answered


def _answers(results: Mapping[str, Any]) -> Iterator[list[str]]:
    for answer in results["answers"]:
        prediction, figure = answer["prediction"], answer["figure"]
        expected = "" if prediction is None else "{:g} to {:g}".format(*prediction)
        if prediction and figure is not None and not prediction[0] <= figure <= prediction[1]:
            expected += ": WRONG"
        shown = "" if figure is None else f"{figure:.4g}"
        yield [answer["question"], expected, shown, answer["decision"] or ""]


def _contest(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> str:
    """Microseconds of each contestant; for the fastest, its rate, the share of the limit, and the
    clock and power meanwhile."""
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    cells = []
    for row in rows:
        seconds: Mapping[str, float] = row["seconds"]
        is_decode = row["kind"] == "decode"
        amount, unit = (row["kv_bytes"], "GB/s") if is_decode else (row["flops"], "TFLOP/s")
        scale = 1e9 if is_decode else 1e12
        limit = limits.get("read_bytes_per_s" if is_decode else "matmul_flops_per_s")
        line = [row["kind"], row["workload"]]
        for name in names:
            if name not in seconds:
                line.append("-")
                continue
            rate = amount / seconds[name]
            words = [f"{seconds[name] * 1e6:.1f} us", f"{rate / scale:.0f} {unit}"]
            if limit:
                words.append(f"{rate / limit:.0%}")
            if gauges := row.get("gauges", {}).get(name):
                words.append(f"{gauges['mhz']:.0f} MHz, {gauges['watts']:.0f} W")
                words.append(f"{rate / scale / gauges['mhz'] * 1e3:.0f} {unit} per GHz")
            line.append(", ".join(words))
        cells.append(line)
    return table(["kind", "workload", *names], cells)


def _notes(contest: Mapping[str, Any]) -> list[str]:
    there = ", ".join(f"{name} {version}" for name, version in contest["peers"].items() if version)
    reasons: dict[str, set[str]] = {}
    for row in contest["rows"]:
        for name, reason in row["absent"].items():
            reasons.setdefault(name, set()).add(reason)
    lines = [f"other libraries: {there}"] if there else []
    lines += [f"{name}: {'; '.join(sorted(why))}" for name, why in sorted(reasons.items())]
    if left := contest.get("not_measured"):
        lines.append(f"not measured, for lack of time: {', '.join(left)}")
    return lines


def markdown(results: Mapping[str, Any]) -> str:
    """The whole report."""
    machine = results["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    parts = [
        f"{machine['name']}, driver {machine['driver_version']}, clocks up to "
        f"{machine['clocks.max.sm']} and {machine['clocks.max.memory']}, at most "
        f"{machine['power.limit']}; Python {machine['python']}, {versions}.",
        table(["question", "prediction", "figure", "decision"], _answers(results)),
        table(
            ["step", "outcome", "seconds", "last words"],
            (
                [name, OUTCOMES[step["ok"]], str(step["seconds"]), step["last_words"][:100]]
                for name, step in results["steps"].items()
            ),
        ),
    ]
    limits = results["results"].get("limits") or {}
    if limits:
        parts.append(limits_sentence(limits))
    for name, found in results["results"].items():
        if found and "rows" in found:
            notes = "\n".join(f"* {line}" for line in _notes(found))
            parts += [f"## {name}", _contest(found["rows"], limits), notes]
    for name, step in results["steps"].items():
        if "log" in step:
            parts.append(f"The end of the log of {name}:\n\n```\n{step['log'].rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def limits_sentence(limits: Mapping[str, float]) -> str:
    """What the GPU can do at most."""
    return (
        f"The GPU read {limits['read_bytes_per_s'] / 1e12:.2f} TB/s and multiplied "
        f"{limits['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s."
    )


def table(columns: Sequence[str], rows: Iterator[list[str]] | list[list[str]]) -> str:
    """A table in Markdown."""
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def summary(results: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> str:
    """What is proven and answered, and which of the steps are left, with the seconds that they
    take."""
    outcomes = results["steps"]
    proven = [name for name, step in outcomes.items() if step["ok"]]
    left = [step for step in steps if outcomes.get(step["name"], {"ok": False})["ok"] is False]
    answered = [x for x in results["answers"] if x["figure"] is not None]
    lines = [f"proven or measured: {', '.join(proven) or 'nothing'}"]
    lines += [f"* {x['question']}: {x['figure']:.4g}: {x['decision']}" for x in answered]
    lines.append(f"questions without an answer: {len(results['answers']) - len(answered)}")
    names = ", ".join(step["name"] for step in left) or "nothing"
    lines.append(f"left, about {sum(step['seconds'] for step in left)} s: {names}")
    return "\n".join(lines)
