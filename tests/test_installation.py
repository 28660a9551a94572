"""The commands of the documentation that install something can be carried out: uv, which answers
in a second, finds versions that go together."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

uv = pytest.importorskip("uv", reason="uv is optional: pip install --group test")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"(?:^    |&& |`)pip install ((?:[^#`&\n]|&(?!&))+)", re.M)
LINES = sorted(
    {
        arguments.strip()
        for page in PAGES
        for arguments in COMMAND.findall(page.read_text())
        if "…" not in arguments and "NAME=VALUE" not in arguments
    }
)
INDEX = re.compile(r"--(?:extra-)?index-url (\S+)")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS, GROUPS = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
Resolve = Callable[[str], str | None]
INDEXES = sorted({url for line in LINES for url in INDEX.findall(line)})


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def resolve(tmp_path_factory: pytest.TempPathFactory) -> Resolve:
    """The error of a command, None if there is none. Needs a package index, which CI has."""
    # What is installed by an earlier command may come from an index that this machine does not
    # reach; pip is then told where such packages lie.
    options = [f"--extra-index-url={url}" for url in INDEXES if answers(url)]
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
        capture_output=True,
        text=True,
    )
    links = [*os.environ.get("PIP_FIND_LINKS", "").split(), *found.stdout.split()]
    options += [f"--find-links={link}" for link in dict.fromkeys(links)]
    folder = tmp_path_factory.mktemp("uv")

    def errors(line: str) -> str | None:
        extras, groups, requirements, no_deps = parse(line)
        (folder / "requirements.in").write_text("\n".join(requirements))
        sources = [*(["pyproject.toml"] if extras else []), str(folder / "requirements.in")]
        outcome = subprocess.run(
            [uv.find_uv_bin(), "pip", "compile", "--quiet", "--index-strategy=unsafe-best-match"]
            + [f"--python={sys.executable}", *options, *no_deps, *sources]
            + [f"--extra={extra}" for extra in extras if extra]
            + [f"--group={group}" for group in groups],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return outcome.stderr if outcome.returncode else None

    if "CI" not in os.environ and errors("pip"):
        pytest.skip("no package index")
    return errors


def parse(line: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """The extras of this package, "" for itself, its groups, the other packages, and --no-deps if it
    is there."""
    words = shlex.split(INDEX.sub("", line))
    groups = [words.pop(words.index("--group") + 1) for _ in range(words.count("--group"))]
    words = [word for word in words if word != "--group"]
    ours = re.compile(r"(?:\.|xla-paged-attention)(?:\[(.*)\])?")
    extras, requirements = [], []
    for word in words:
        if word.startswith("--config-settings="):
            continue
        if word.startswith("-"):
            assert word in ("--editable", "--no-deps", "--upgrade"), word
        elif match := ours.fullmatch(word):
            extras += (match[1] or "").split(",")
        else:
            requirements.append(word)
    return extras, groups, requirements, ["--no-deps"] if "--no-deps" in words else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_that_names_a_group_asks_for_a_pip_that_knows_groups(page: Path) -> None:
    """The pip of Python 3.11 does not."""
    lines = [line.strip() for line in COMMAND.findall(page.read_text())]
    if groups := [i for i, line in enumerate(lines) if "--group" in line]:
        assert "--upgrade pip" in lines[: groups[0]]


def test_the_commands_are_found() -> None:
    assert "'.[serve]' --config-settings=cmake.define.XLA_GPU_CUDA=OFF" in LINES
    assert "'.[torch-xla]' 'jax-cuda12-pjrt==0.8.0'" in LINES
    assert len(LINES) >= 15
    named = {extra for line in LINES for extra in parse(line)[0]}
    assert {"jax", "torch", "torch-xla", "transformers", "torchax", "vllm", "serve"} <= named


@pytest.mark.parametrize("line", LINES)
def test_pip_can_install(line: str, resolve: Resolve) -> None:
    assert resolve(line) is None


@pytest.mark.parametrize("extra", EXTRAS)
def test_pip_can_install_an_extra(extra: str, resolve: Resolve) -> None:
    assert resolve(f".[{extra}]") is None


@pytest.mark.parametrize("group", GROUPS)
def test_pip_can_install_a_group(group: str, resolve: Resolve) -> None:
    assert resolve(f"--group {group}") is None


# A project of these commands that tells what its backend was asked for, and is not built.
PROBE = {
    "pyproject.toml": """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "probe"
version = "0"
""",
    "backend.py": """
import pathlib, sys

def build_wheel(folder, settings=None, metadata=None):
    pathlib.Path("settings").write_text(str(settings))
    sys.exit(1)

build_editable = build_wheel
""",
}


@pytest.mark.parametrize("line", [x for x in LINES if "cmake.define" in x])
def test_the_oldest_pip_passes_options_on(line: str, resolve: Resolve, tmp_path: Path) -> None:
    """Python 3.11.0 ships pip 22.3; the short form of the option came with 23.1."""
    pip = [uv.find_uv_bin(), "pip", "install", "--quiet", "--target", tmp_path / "pip", "pip==22.3"]
    subprocess.run(pip, check=True)
    for name, text in PROBE.items():
        (tmp_path / name).write_text(text)
    outcome = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-index", *shlex.split(line)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "pip")},
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "settings").exists(), outcome.stderr
    options = dict(re.findall(r"(cmake\.define\.\w+)=(\w+)", line))
    assert (tmp_path / "settings").read_text() == str(options)


def test_a_command_that_cannot_be_carried_out_is_found(resolve: Resolve) -> None:
    error = resolve("'.[serve,transformers]'")
    assert error is not None and "transformers" in error


def test_jax_begins_without_a_message() -> None:
    """With a plugin for CUDA that does not load here, it would print a traceback."""
    pytest.importorskip("jax")
    hidden = {"PYTHONPATH", "JAX_PLATFORMS", "XLA_FLAGS"}
    command = [sys.executable, "-c", "import jax; print(jax.numpy.ones(2).sum())"]
    outcome = subprocess.run(
        command,
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True,
        text=True,
    )
    assert (outcome.stdout, outcome.stderr) == ("2.0\n", "")
