"""Counts the repository by room: ``python -m tools.count [REVISION]``.

A room is a folder with a purpose of its own. Lines of files that git calls binary do not count.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The longest name that a path begins with is its room.
ROOMS = (
    *("shared_ffi", "shared_ffi/xla", "shared_ffi/selftest", "shared_ffi/csrc"),
    *("shared_ffi/csrc/paged_attention/cpu", "shared_ffi/csrc/paged_attention/cuda"),
    *("shared_ffi/csrc/varlen_attention/cpu", "shared_ffi/csrc/varlen_attention/cuda"),
    *("shared_ffi/csrc/torch", "jax_frontend", "jax_frontend/compat", "torch_frontend"),
    *("torch_frontend/integrations", "xla_paged_attention", "harness", "examples", "benchmarks"),
    *("tests", "docs", "docs/results", "cmake", "tools/emulated_gpu", "tools/lease"),
    *("tools/mutants", "tools/sass", "tools"),
)


def git(*words: str) -> bytes:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


def room_of(path: str) -> str:
    """The room of a path; the top has none."""
    return max((room for room in ROOMS if path.startswith(f"{room}/")), key=len, default="(top)")


def count(revision: str) -> dict[str, tuple[int, int, int]]:
    """Files, lines, and words of pages, by room."""
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path in git("ls-tree", "-r", "--name-only", "-z", revision).decode().split("\0")[:-1]:
        content = git("show", f"{revision}:{path}")
        room = rooms[room_of(path)]
        room[0] += 1
        if b"\0" not in content:
            room[1] += content.count(b"\n")
        if path.endswith(".md"):
            room[2] += len(content.split())
    return {name: (files, lines, words) for name, (files, lines, words) in sorted(rooms.items())}


def main() -> None:
    """The command."""
    counts = count(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
    for tools, title in ((False, "the project without tools/"), (True, "tools/")):
        found = {name: x for name, x in counts.items() if name.startswith("tools") == tools}
        print(f"{title:40}{'files':>7}{'lines':>8}{'words of pages':>16}")
        total = tuple(map(sum, zip(*found.values(), strict=True))) or (0, 0, 0)
        for name, (files, lines, words) in {**found, "in all": total}.items():
            print(f"  {name:38}{files:7}{lines:8}{words:16}")


if __name__ == "__main__":
    main()
