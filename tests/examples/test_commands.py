"""The commands of the examples begin at once, end at once, and say what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.generate import __main__ as generate
from examples.replay import __main__ as replay
from harness import steps
from harness.workload import read_trace

FRAMEWORKS = ("jax", "torch", "transformers", "matplotlib", "rich")
LIBRARIES = [
    *(("generate", name) for name in ("rich", "transformers")),
    *(("replay", name) for name in ("numpy", "rich", "matplotlib")),
]


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


@pytest.mark.parametrize("name", ["generate", "replay"])
def test_the_help_needs_no_library(name: str) -> None:
    script = f"import sys; sys.modules |= dict.fromkeys({FRAMEWORKS}); "
    script += f"from examples.{name}.__main__ import main; main(['--help'])"
    outcome = python(script)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.startswith(f"usage: python -m examples.{name} ")


def test_the_names_of_the_options_are_those_of_the_backends() -> None:
    pytest.importorskip("transformers")
    from examples.generate.run import NAMES  # noqa: PLC0415  (needs transformers)

    assert tuple(NAMES) == generate.BACKENDS
    assert tuple(steps.RUNNERS) == replay.BACKENDS


@pytest.mark.parametrize(("name", "library"), LIBRARIES)
def test_a_missing_library_is_named(name: str, library: str) -> None:
    script = f"import sys; sys.modules['{library}'] = None; "
    script += f"from examples.{name}.__main__ import main; main([])"
    outcome = python(script)
    (line,) = outcome.stderr.splitlines()
    assert outcome.returncode == 1
    assert line.startswith(f"examples.{name}: ") and library in line
    assert "pip install --editable '.[torch-xla]' --group demo" in line


# The second is busy in C, as a compiler is, and does not let Python's handlers run.
@pytest.mark.parametrize(
    "work", ["time.sleep(600)", "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_command_at_once(
    work: str, number: signal.Signals, tmp_path: Path
) -> None:
    end = f"lambda: open({str(tmp_path / 'ended')!r}, 'w')"
    script = "import hashlib, time; from xla_paged_attention.exits import end_when_interrupted; "
    script += f"end_when_interrupted({end}); print('begins', flush=True); {work}"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begins\n"
        process.send_signal(number)
        assert process.wait(timeout=300) == 128 + number  # before the work is done
        assert process.stderr.read() == ""
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "a trace must be a CSV file; got {path}, which is no file"),
        ("TIMESTAMP,Tokens\n", "{path} has no ContextTokens, GeneratedTokens"),
    ],
    ids=["no-file", "other-columns"],
)
def test_invalid_trace(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="a trace must"):
        next(read_trace(path))
    assert replay.main(["--trace", os.fspath(path), "--backend", "torch"]) == 2
    assert message.format(path=path) in capsys.readouterr().out
