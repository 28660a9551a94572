"""One version everywhere, and the extras and tools that a release needs."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from release import check_version, wheels
from shared_ffi import _backends

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_version_everywhere() -> None:
    assert check_version.faults(None) == []


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(check_version, "ROOT", tmp_path)
    return tmp_path


def test_a_citation_of_another_version(sources: Path) -> None:
    citation = sources / "CITATION.cff"
    citation.write_text(re.sub("^version: .*$", "version: 9.9.9", citation.read_text(), flags=re.M))
    (fault,) = check_version.faults(None)
    assert re.fullmatch(r"CITATION\.cff must name version [\d.]+; got 9\.9\.9", fault)


def test_a_tag(sources: Path) -> None:
    version = PROJECT["project"]["version"]
    section = f"CHANGELOG.md must have a section [{version}]"
    assert check_version.faults("v9.9.9") == [f"the tag must be v{version}; got v9.9.9", section]
    with (sources / "CHANGELOG.md").open("a") as changelog:
        changelog.write(f"\n## [{version}] - 2030-01-01\n")
    assert check_version.faults(f"v{version}") == []


def test_wheels_are_tried_through_every_backend() -> None:
    backends = {backend.name for backend in _backends.BACKENDS if backend.platform == "cpu"}
    test = PROJECT["tool"]["cibuildwheel"]["test-command"]
    assert {*test.partition("--backend ")[2].split()} == backends
    assert {*wheels.BACKENDS} == backends


@pytest.mark.parametrize("python", ["false", "no-such-python"])
def test_an_interpreter_that_does_not_run_is_found_before_the_build(
    python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["wheels.py", "--out", str(tmp_path), "--python", sys.executable, python]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        wheels.main()
    assert f"--python must name interpreters that run here; got {python}" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_formatter_of_signatures_is_the_pinned_one() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (pinned,) = [x for x in extras["lint"] if x.startswith("ruff")]
    assert pinned in extras["docs"]
