"""The command xla-paged-attention: what it says before it starts anything."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from xla_paged_attention.__main__ import COMMANDS, main

FRAMEWORKS = ("jax", "torch", "transformers", "vllm", "rich")


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    script = f"import sys; sys.modules |= dict.fromkeys({FRAMEWORKS})\n"
    script += "from xla_paged_attention.__main__ import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=cwd, capture_output=True, text=True
    )


def test_the_version() -> None:
    outcome = command("--version")
    version = metadata.version("xla-paged-attention")
    assert (outcome.returncode, outcome.stdout) == (0, f"xla-paged-attention {version}\n")


@pytest.mark.parametrize("name", [(), *((name,) for name in COMMANDS)], ids=str)
def test_the_help_needs_no_framework(name: tuple[str, ...]) -> None:
    outcome = command(*name, "--help")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.startswith(f"usage: {' '.join(('xla-paged-attention', *name))} ")


def test_the_console_script_is_this_command() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="xla-paged-attention")
    assert script.load() is main


def test_check_finds_the_installed_package_from_any_folder(tmp_path: Path) -> None:
    """The processes that it starts do not search the working folder, as a clone would hide it."""
    (tmp_path / "numpy.py").write_text("raise ImportError('of the working folder')")
    script = Path(sys.executable).with_name("xla-paged-attention")
    outcome = subprocess.run(
        [script, "check", "--json", "--backend", "torch-cpu"],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (backend,) = json.loads(outcome.stdout)["backends"]
    assert (backend["title"], backend["status"]) == ("PyTorch eager, CPU", "works")


def test_a_port_that_is_taken_is_named_before_vllm_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        outcome = command("serve", "--port", port)
    message = f"the port must be free; got {port} (Address already in use). Name another one"
    assert outcome.returncode == 1
    assert outcome.stderr == f"xla-paged-attention serve: {message} with --port\n"


def test_a_model_that_is_no_folder_is_named_before_vllm_starts(tmp_path: Path) -> None:
    for arguments in (["other/model"], ["--model", "other/model"]):
        outcome = command("serve", *arguments, cwd=tmp_path)
        message = "MODEL must be a folder with config.json and safetensors; got other/model"
        assert outcome.returncode == 1
        assert outcome.stderr == f"xla-paged-attention serve: {message}\n"
