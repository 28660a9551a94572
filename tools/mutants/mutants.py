"""Mutants: wrong code that the tests of a kernel must catch.

The files in `tests/mutants` hold the mutants of a suite each. One build has them all, and a variable in
it says which is in effect.
`quote` is source code with marks around the statements or the expression that the mutant replaces.
`wrong` is the replacement. The quote must be found exactly once in shared_ffi/csrc, or in `folder`
of it. White space and the file do not matter, so code can be moved.
`caught_by` names a test that is tried before the others, for a mutant that few tests catch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "shared_ffi/csrc"
_SUFFIXES = (".cc", ".h", ".cu", ".cuh")

# The code before and behind the code that a mutant replaces. The builds with mutants include a
# header that defines mutant_in_effect, the number of the mutant in effect.
HEADER = """#pragma once
__attribute__((visibility("default"))) inline int mutant_in_effect = -1;
#ifdef __CUDA_ARCH__  // a kernel reads it from a register that the emulated GPU sets
__device__ __forceinline__ int MutantInEffect() {
  int mutant;
  asm("mov.u32 %0, %%envreg0;" : "=r"(mutant));
  return mutant;
}
#define mutant_in_effect MutantInEffect()
#endif
"""
_STATEMENTS = "if (mutant_in_effect == {}) {{ {} }} else {{ ", " }"
_EXPRESSION = "(mutant_in_effect == {} ? ({}) : (", "))"


@dataclass(frozen=True)
class Mutant:
    name: str
    quote: str
    wrong: str
    folder: str = ""
    caught_by: str | None = None

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the quote. The group `right` is the code between the marks."""
        before, right, after = (
            r"\s*".join(map(re.escape, re.sub(r"\s", "", part)))
            for part in re.split("[«»]", self.quote)
        )
        return re.compile(rf"{before}\s*(?P<right>{right})\s*{after}")


def load(suite: str) -> list[Mutant]:
    """Reads the mutants of a suite."""
    table = tomllib.loads((ROOT / f"tests/mutants/{suite}.toml").read_text())
    return [Mutant(name, **entry) for name, entry in table.items()]


SUITES = {name: load(name) for name in ("cpu", "cuda", "one_order", "varlen_cpu", "varlen_cuda")}
ALL = [mutant for mutants in SUITES.values() for mutant in mutants]
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
    quote is out of date is left out. Files that are right already keep their time, so that a build
    compiles only what changed."""
    planted = plant(read_sources(), ALL, leaves_out=True)
    sources = {folder / path.relative_to(ROOT): text for path, text in planted.items()}
    sources[folder / "mutant.h"] = HEADER
    for path, text in sources.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for path in folder.rglob("*"):
        if path.is_file() and path not in sources:
            path.unlink()


def find(mutant: Mutant, sources: Mapping[Path, str]) -> tuple[Path, re.Match[str]]:
    """The file of a mutant's quote, and the quote in it."""
    found = _matches(mutant, sources)
    files = ", ".join(path.name for path, _ in found) or "no file"
    assert len(found) == 1, (
        f"the quote of the mutant {mutant.name!r} must be in the sources of "
        f"{mutant.folder or CSRC.name}/ once; it is there {len(found)} times ({files}): {mutant.quote}"
    )
    return found[0]


def _matches(mutant: Mutant, sources: Mapping[Path, str]) -> list[tuple[Path, re.Match[str]]]:
    folder = CSRC / mutant.folder
    return [
        (path, match)
        for path, text in sources.items()
        if path.is_relative_to(folder) and path.suffix in _SUFFIXES
        for match in mutant.pattern.finditer(text)
    ]


def plant(
    sources: Mapping[Path, str], mutants: Sequence[Mutant], *, leaves_out: bool = False
) -> dict[Path, str]:
    """Plants mutants in sources, by path. Each mutant stands beside the code that it replaces. With
    `leaves_out`, mutants whose quotes are not there are left out."""
    insertions: dict[Path, list[tuple[int, int, int, str]]] = {}
    for number, mutant in enumerate(mutants):
        if leaves_out and len(_matches(mutant, sources)) != 1:
            continue
        path, right = find(mutant, sources)
        begin, end = right.span("right")
        is_statement = right["right"].endswith(";")
        opening, closing = _STATEMENTS if is_statement else _EXPRESSION
        # Where mutants touch, ends come before beginnings, and the longest code begins first.
        insertions.setdefault(path, []).extend(
            [
                (begin, 1, begin - end, opening.format(number, mutant.wrong)),
                (end, 0, end - begin, closing),
            ]
        )
    planted = dict(sources)
    for path, places in insertions.items():
        text = sources[path]
        for place, *_, insertion in sorted(places, reverse=True):
            text = text[:place] + insertion + text[place:]
        planted[path] = text
    return planted
