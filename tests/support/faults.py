"""Planted faults: wrong code that the tests of a kernel must catch.

`tests/faults/cpu.toml` and `cuda.toml` hold the faults of the two suites.
`quote` is source code with marks around the statements or the expression that the fault replaces.
`wrong` is the replacement. The quote must be found exactly once in shared_ffi/csrc, or in `folder`
of it. White space and the file do not matter, so code can be moved.
`caught_by` names a test that is tried before the others, for a fault that few tests catch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "shared_ffi/csrc"
_SUFFIXES = (".cc", ".h", ".cu", ".cuh")

# The code before and behind the code that a fault replaces. The builds with faults include a
# header that defines planted_fault, the number of the fault in effect.
_STATEMENTS = "if (planted_fault == {}) {{ {} }} else {{ ", " }"
_EXPRESSION = "(planted_fault == {} ? ({}) : (", "))"


@dataclass(frozen=True)
class PlantedFault:
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


def load(suite: str) -> list[PlantedFault]:
    """Reads the faults of a suite."""
    table = tomllib.loads((ROOT / f"tests/faults/{suite}.toml").read_text())
    return [PlantedFault(name, **entry) for name, entry in table.items()]


def find(fault: PlantedFault, sources: Mapping[Path, str]) -> tuple[Path, re.Match[str]]:
    """The file of a fault's quote, and the quote in it."""
    folder = CSRC / fault.folder
    found = [
        (path, match)
        for path, text in sources.items()
        if path.is_relative_to(folder) and path.suffix in _SUFFIXES
        for match in fault.pattern.finditer(text)
    ]
    files = ", ".join(path.name for path, _ in found) or "no file"
    assert len(found) == 1, (
        f"the quote of the fault {fault.name!r} must be in the sources of {folder.name}/ once; it is "
        f"there {len(found)} times ({files}): {fault.quote}"
    )
    return found[0]


def plant(sources: Mapping[Path, str], faults: list[PlantedFault]) -> dict[Path, str]:
    """Plants faults in sources, by path. Each fault stands beside the code that it replaces."""
    insertions: dict[Path, list[tuple[int, int, int, str]]] = {}
    for number, fault in enumerate(faults):
        path, right = find(fault, sources)
        begin, end = right.span("right")
        is_statement = right["right"].endswith(";")
        opening, closing = _STATEMENTS if is_statement else _EXPRESSION
        # Where faults touch, ends come before beginnings, and the longest code begins first.
        insertions.setdefault(path, []).extend(
            [
                (begin, 1, begin - end, opening.format(number, fault.wrong)),
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
