"""Mutants: wrong code that the tests of a program in C++ or CUDA must catch.

One build has them all, and a variable in it says which is in effect.
`quote` is source code with marks around the statements or the expression that the mutant replaces.
`wrong` is the replacement. The quote must be found exactly once in the sources, or in `folder`
of them. White space and the file do not matter, so code can be moved.
`caught_by` names a test that is tried before the others, for a mutant that few tests catch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def load(path: Path) -> list[Mutant]:
    """Reads the mutants of a file: a table of TOML each."""
    table = tomllib.loads(path.read_text())
    return [Mutant(name, **entry) for name, entry in table.items()]


def write(sources: Mapping[Path, str], folder: Path) -> None:
    """Writes planted sources, by their paths in a folder, and mutant.h. Files that are right
    keep their time, so that a build compiles only what changed."""
    texts = {folder / path: text for path, text in sources.items()} | {folder / "mutant.h": HEADER}
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for path in folder.rglob("*"):
        if path.is_file() and path not in texts:
            path.unlink()


def find(mutant: Mutant, sources: Mapping[Path, str], folder: Path) -> tuple[Path, re.Match[str]]:
    """The file of a mutant's quote, and the quote in it. `folder`: of the sources."""
    found = _matches(mutant, sources, folder)
    files = ", ".join(path.name for path, _ in found) or "no file"
    assert len(found) == 1, (
        f"the quote of the mutant {mutant.name!r} must be in the sources of "
        f"{mutant.folder or folder.name}/ once; it is there {len(found)} times "
        f"({files}): {mutant.quote}"
    )
    return found[0]


def _matches(
    mutant: Mutant, sources: Mapping[Path, str], folder: Path
) -> list[tuple[Path, re.Match[str]]]:
    return [
        (path, match)
        for path, text in sources.items()
        if path.is_relative_to(folder / mutant.folder) and path.suffix in _SUFFIXES
        for match in mutant.pattern.finditer(text)
    ]


def plant(
    sources: Mapping[Path, str],
    mutants: Sequence[Mutant],
    folder: Path,
    *,
    leaves_out: bool = False,
) -> dict[Path, str]:
    """Plants mutants in the sources of a folder, by path. Each stands beside the code that it
    replaces. With `leaves_out`, mutants whose quotes are not there are left out."""
    insertions: dict[Path, list[tuple[int, int, int, str]]] = {}
    for number, mutant in enumerate(mutants):
        if leaves_out and len(_matches(mutant, sources, folder)) != 1:
            continue
        path, right = find(mutant, sources, folder)
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
