"""One version everywhere, and the tools in the same versions wherever they are named."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from shared_ffi.selftest.backends import BACKENDS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.M) == [PROJECT["project"]["version"]]


def test_wheels_are_tried_through_every_backend() -> None:
    backends = {backend.name for backend in BACKENDS if backend.platform == "cpu"}
    test = PROJECT["tool"]["cibuildwheel"]["test-command"]
    assert {*test.partition("--backend ")[2].split()} == backends


def test_wheels_for_arm_have_the_kernels_that_are_tested_there() -> None:
    """torch_xla has no wheel for Arm, and test_aarch64.py compiles no CUDA."""
    (arm,) = PROJECT["tool"]["cibuildwheel"]["overrides"]
    assert arm["select"] == "*-manylinux_aarch64"
    assert arm["config-settings"] == {"cmake.define.XLA_GPU_CUDA": "OFF"}
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
