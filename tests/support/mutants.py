"""The mutants of this library. The files in `tests/mutants` hold those of a suite of tests each; one
build has them all. tools/mutants says what a mutant is."""

from __future__ import annotations

from pathlib import Path

from tools.mutants import mutants

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "shared_ffi/csrc"
SUITES = {
    name: mutants.load(ROOT / f"tests/mutants/{name}.toml")
    for name in ("cpu", "cuda", "one_order", "varlen_cpu", "varlen_cuda")
}
ALL = [mutant for suite in SUITES.values() for mutant in suite]
"""A mutant's number is its place here."""


def instruction_sets() -> list[str]:
    """The sets that the CPU kernels with mutants are built for: one with instructions of its own, if
    the processor has it, and the one of every processor."""
    from shared_ffi import _native  # noqa: PLC0415  (pytest's option --native replaces it)

    names = _native.cpu_instruction_sets()
    return [name for name in names if name in ("avx512_bf16", "baseline")]


def read_sources() -> dict[Path, str]:
    """The files that a build needs."""
    paths = [ROOT / "CMakeLists.txt"]
    for part in ("shared_ffi/csrc", "cmake"):
        paths += [path for path in (ROOT / part).rglob("*.*") if path.suffix != ".pyc"]
    return {path: path.read_text() for path in paths}


def write_sources(folder: Path) -> None:
    """Writes the sources with all mutants to a folder laid out as this repository. A mutant whose
    quote is out of date is left out."""
    planted = mutants.plant(read_sources(), ALL, CSRC, leaves_out=True)
    mutants.write({path.relative_to(ROOT): text for path, text in planted.items()}, folder)
