"""What the CUDA kernels take of a multiprocessor. CMake uses this file twice.

As the compiler's launcher, `resources.py nvcc ...` runs a command and keeps what ptxas says about
the object file beside it. After linking, `resources.py --table MODULE FOLDER` prints a table of all
kernels, and writes it to FOLDER/resources.json, where a test finds it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# Of a multiprocessor, by compute capability: registers, bytes of shared memory, threads. CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability".
LIMITS = {
    "80": (65536, 164 * 1024, 2048),
    "90a": (65536, 228 * 1024, 2048),
    "100": (65536, 228 * 1024, 2048),
    "120": (65536, 100 * 1024, 1536),
}
RESERVED_SHARED_BYTES = 1024  # of each block, for the system
STORAGES = {"f": "float32", "4Half": "float16", "8BFloat16": "bfloat16"}


def launch(command: list[str]) -> int:
    """Runs the compiler."""
    outcome = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    lines = outcome.stderr.splitlines()
    if "-c" in command and "-o" in command:
        report = Path(command[command.index("-o") + 1] + ".ptxas")
        report.write_text(outcome.stderr)
    noise = re.compile(r"^ptxas info|bytes stack frame, +0 bytes spill stores")
    sys.stderr.writelines(f"{line}\n" for line in lines if not noise.search(line))
    return outcome.returncode


def kernels(reports: Path) -> list[dict[str, Any]]:
    """What ptxas said of each kernel and target."""
    found = []
    for report in sorted(reports.rglob("*.ptxas")):
        for part in report.read_text().split("Compiling entry function ")[1:]:
            name, target = re.match(r"'(\S+)' for 'sm_(\w+)'", part).groups()
            kernel = re.search(
                r"\d(TensorCoreAttention|CudaCoreAttention|Finish|Update|Add)(.*)", name
            )
            assert kernel is not None, name
            storage = re.match(r"I(f|NS_(4Half|8BFloat16)E)", kernel[2])
            size = re.search(r"Li(\d+)E", kernel[2])
            frame = re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
            )
            found.append(
                {
                    "kernel": kernel[1],
                    "storage": STORAGES[storage[2] or storage[1]] if storage else "",
                    "size": int(size[1]) if size else 0,
                    "target": target,
                    "registers": int(re.search(r"Used (\d+) registers", part)[1]),
                    "stack_bytes": int(frame[1]),
                    "spill_bytes": int(frame[2]) + int(frame[3]),
                }
            )
    return found


def add_occupancy(found: list[dict[str, Any]], launches: list[tuple[str, int, int, int]]) -> None:
    """Adds shared memory and how many blocks fit a multiprocessor."""
    launched = {(kernel, size): rest for kernel, size, *rest in launches}
    for entry in found:
        threads, shared_bytes = launched.get((entry["kernel"], entry["size"]), (256, 0))
        registers, shared, max_threads = LIMITS[entry["target"]]
        of_block = -(-entry["registers"] // 8) * 8 * threads
        entry["shared_bytes"] = shared_bytes
        entry["blocks"] = min(
            registers // of_block,
            shared // (shared_bytes + RESERVED_SHARED_BYTES),
            max_threads // threads,
        )


def table(module: Path, folder: Path) -> None:
    """Prints and writes the table."""
    spec = importlib.util.spec_from_file_location("_native", module)
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    found = [entry for entry in kernels(folder) if entry["target"] in LIMITS]
    add_occupancy(found, native.cuda_kernels())
    found.sort(
        key=lambda entry: (entry["kernel"], entry["storage"], entry["size"], entry["target"])
    )
    (folder / "resources.json").write_text(json.dumps(found, indent=2))
    columns = ["kernel", "storage", "size", "target", "registers", "spill_bytes", "shared_bytes"]
    row = "{:<21}{:<10}{:>5}{:>8}{:>11}{:>13}{:>14}{:>8}"
    print(row.format(*columns, "blocks"))
    for entry in found:
        print(row.format(*(entry[column] for column in columns), entry["blocks"]))


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        table(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(launch(sys.argv[1:]))
