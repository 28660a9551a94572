"""Checks that one version is meant everywhere: ``python release/check_version.py [v1.2.3]``.

pyproject.toml has the version. CITATION.cff repeats it. A tag, if one is given, must name it, and
the changelog must have a section for it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def faults(tag: str | None) -> list[str]:
    """Returns a line for each place that names another version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    found = []
    if cited != [version]:
        found.append(f"CITATION.cff must name version {version}; got {', '.join(cited)}")
    if tag is None:
        return found
    if tag != f"v{version}":
        found.append(f"the tag must be v{version}; got {tag}")
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md must have a section [{version}]")
    return found


if __name__ == "__main__":
    lines = faults(sys.argv[1] if len(sys.argv) > 1 else None)
    print(*lines, sep="\n")
    sys.exit(bool(lines))
