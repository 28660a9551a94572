"""A short share of the calls under sanitizers, on one instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.reliability import sanitize
from tests.support import native

# Writes past the end of an array.
OVERFLOW = """
import sys
import numpy as np
from tests.support import native
module = native.load(sys.argv[1], "shared_ffi._native")
from shared_ffi.spec import ArraySpec
spec = ArraySpec((1000,), "float32")
call = module.EagerCall(module.handlers()["cpu"]["XlaGpuSimpleAdd"], {}, [spec, spec], [spec])
a, small = np.ones(1000, np.float32), np.ones(10, np.float32)
call([a.ctypes.data, a.ctypes.data], [small.ctypes.data], 1)
"""

# Two calls write to one array without waiting for each other.
RACE = """
import sys, threading
import numpy as np
from tests.support import native
module = native.load(sys.argv[1], "shared_ffi._native")
from shared_ffi.spec import ArraySpec
spec = ArraySpec((200_000,), "float32")
call = module.EagerCall(module.handlers()["cpu"]["XlaGpuSimpleAdd"], {}, [spec, spec], [spec])
a = np.ones(200_000, np.float32)
run = lambda: [call([a.ctypes.data] * 2, [a.ctypes.data], 1) for _ in range(50)]
threads = [threading.Thread(target=run) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""

BUGS = {
    "address": (OVERFLOW, "AddressSanitizer: heap-buffer-overflow"),
    "thread": (RACE, "ThreadSanitizer: data race"),
}


@pytest.mark.parametrize("name", ["address", pytest.param("thread", marks=pytest.mark.nightly)])
def test_sanitizer(name: str, tmp_path: Path) -> None:
    library = f"lib{sanitize.SANITIZERS[name].library}.so"
    if native.run("gcc", f"-print-file-name={library}").stdout.strip() == library:
        pytest.skip(f"this compiler has no {library}")
    with FileLock(tmp_path.parent.parent / f"sanitize-{name}.lock"):
        module = sanitize.build(name, ["baseline"], optimize="-O0")  # a third of the build's time
    variables = os.environ | sanitize.environment(name)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=native.ROOT,
            env=variables,
            text=True,
            capture_output=True,
        )

    script, message = BUGS[name]
    assert message in run("-c", script, module).stderr
    for command in sanitize.commands(module, seconds=1, seed=1, tests=False):
        outcome = run(*command)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
