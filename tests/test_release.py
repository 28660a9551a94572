"""One version everywhere, and the tools in the same versions wherever they are named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from shared_ffi.selftest.backends import BACKENDS
from tests.support import release

ROOT = release.ROOT
PROJECT = release.PROJECT


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.M) == [PROJECT["project"]["version"]]


def test_wheels_are_tried_through_every_backend() -> None:
    backends = {backend.name for backend in BACKENDS if backend.platform == "cpu"}
    test = PROJECT["tool"]["cibuildwheel"]["test-command"]
    assert {*test.partition("--backend ")[2].split()} == backends


def test_wheels_for_arm_differ_in_torch_xla_alone() -> None:
    """It has no wheel for Arm. The CUDA compiler has."""
    (arm,) = PROJECT["tool"]["cibuildwheel"]["overrides"]
    assert arm["select"] == "*-manylinux_aarch64"
    assert {*arm} == {"select", "test-extras", "test-command"}
    assert not [x for x in PROJECT["build-system"]["requires"] if "platform_machine" in x]
    known = {backend.name for backend in BACKENDS if backend.platform == "cpu"}
    tried = {*arm["test-command"].partition("--backend ")[2].split()}
    assert tried == {"jax-cpu", "torch-cpu"} and tried < known
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    machines = workflow["jobs"]["wheels"]["strategy"]["matrix"]["machine"]
    assert machines == ["x86_64", "aarch64"]


def test_one_version_of_ruff() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    named = {x for x in PROJECT["dependency-groups"]["docs"] if x.startswith("ruff")}
    assert {*re.findall(r"ruff==[\d.]+", hooks)} == named


def test_the_pages_name_the_pythons_of_the_package() -> None:
    first, *_, last = release.PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={first}"
    for page in ("README.md", "docs/getting-started.md"):
        named = re.findall(r"Python (3\.\d+) to (3\.\d+)", (ROOT / page).read_text())
        assert named == [(first, last)], page


def test_the_release_takes_the_packages_of_the_wheel() -> None:
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert re.findall(r"--toplevel (\S+)", workflow) == [",".join(release.PACKAGES)]
    copied = re.findall(r"^COPY (\w+) \w+$", (ROOT / "Dockerfile").read_text(), re.M)
    assert {*release.PACKAGES} <= {*copied}


@pytest.mark.nightly  # builds for two minutes, and installs JAX
def test_a_fresh_environment_from_the_wheel_alone_samples_and_trains(tmp_path: Path) -> None:
    version = "{}.{}".format(*sys.version_info)
    python = release.interpreters()[version]
    sdist, wheels = release.build(tmp_path / "release", {version: python}, gpus="")
    folders = {name.partition("/")[0] for name in release.names(wheels[version])}
    (information,) = folders - {*release.PACKAGES}
    assert information.endswith(".dist-info")
    assert not [x for x in release.names(sdist) if x.partition("/")[0] in ("tests", "benchmarks")]
    tried = release.try_wheel(wheels[version], python, tmp_path / "release")
    assert tried.printed == "programs: 2 importance ratio: 1.00000\n"
