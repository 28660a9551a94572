"""``python -m benchmarks.gpu [--module PATH] NAME ...`` calls main() of the module NAME, on another
build of the library with a path. Processes that it spawns do not import this file."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.module import use

if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == "--module":
        use(Path(words[1]))
        words = words[2:]
    sys.argv = words
    import_module(words[0]).main()
