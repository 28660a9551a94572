"""Reports the registers, spills and shared memory of the CUDA kernels. CMake uses this file twice.

As the compiler's launcher, `resources.py nvcc ...` runs a command and writes ptxas's report beside
the object file. After linking, `resources.py --table MODULE FOLDER OBJECT...` prints a table of the
objects' kernels and writes it to FOLDER/resources.json, which a test reads.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# Registers, bytes of shared memory and threads of a multiprocessor, by compute capability: CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability".
LIMITS = {
    "80": (65536, 164 * 1024, 2048),
    "86": (65536, 100 * 1024, 1536),
    "89": (65536, 100 * 1024, 1536),
    "90a": (65536, 228 * 1024, 2048),
    "100": (65536, 228 * 1024, 2048),
    "120": (65536, 100 * 1024, 1536),
}
RUN_BY = {"80": ("80", "86", "89")}
"""The GPUs that run the code for a compute capability, where there are others than that one."""
RESERVED_SHARED_BYTES = 1024  # of each thread block, for the system
TYPES = {
    "f": "float32",
    "a": "int8",
    "NS_4HalfE": "float16",
    "NS_8BFloat16E": "bfloat16",
    "NS_10Float8E4M3E": "float8_e4m3fn",
    "NS_10Float8E5M2E": "float8_e5m2",
    "NS_10Int4OrInt8E": "uint8",
    "NS_10ScaledByteE": "of groups",
    "NS_10ScaledCodeE": "codes",
}
"""Types by their mangled names. In a kernel's name, S2_ or so repeats an earlier type."""
_TYPE = rf"(?:{'|'.join(TYPES)}|S\d*_)"


def launch(command: list[str]) -> int:
    """Runs the compiler and writes ptxas's report."""
    outcome = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    lines = outcome.stderr.splitlines()
    if "-c" in command and "-o" in command:
        report = Path(command[command.index("-o") + 1] + ".ptxas")
        report.write_text(outcome.stderr)
    # ptxas calls "info" what costs most, too: (C75xx) is setmaxnreg ignored, wgmma serialized.
    noise = re.compile(r"^ptxas info(?!.*\(C75)|bytes stack frame, +0 bytes spill stores")
    sys.stderr.writelines(f"{line}\n" for line in lines if not noise.search(line))
    return outcome.returncode


def kernels(objects: list[str]) -> list[dict[str, Any]]:
    """The entries of ptxas's reports, one for each kernel and target. The build folder may hold
    reports of objects that are no longer built."""
    found = []
    for path in objects:
        for part in Path(path + ".ptxas").read_text().split("Compiling entry function ")[1:]:
            name, target = re.match(r"'(\S+)' for 'sm_(\w+)'", part).groups()
            kernel = re.search(
                r"\d(TensorCoreAttention|TensorCorePrefill|DecodeAttention|PrefillAttention"
                r"|TensorCoreKeyGradients|TensorCoreQueryGradients|CudaCoreGradients"
                r"|HopperKeyGradients|HopperQueryGradients"
                r"|CopyLengths|CopyTokens|MakeTables|PrepareRows|SumOverTokens"
                r"|CudaCoreAttention|Combine|ZeroArrivals|Update|Add)(.*)",
                name,
            )
            assert kernel is not None, name
            types = re.match(f"I({_TYPE}*)", kernel[2])
            names = re.findall(_TYPE, types[1]) if types else []
            storage, cache = ([TYPES.get(name) for name in names] + ["", ""])[:2]
            sizes = [int(size) for size in re.findall(r"Li(\d+)E", kernel[2])] + [0, 0]
            frame = re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
            )
            found.append(
                {
                    "kernel": kernel[1],
                    "storage": storage,
                    "cache": storage if cache is None else cache,
                    "size": sizes[0],
                    "variant": sizes[1],
                    "target": target,
                    "registers": int(re.search(r"Used (\d+) registers", part)[1]),
                    "stack_bytes": int(frame[1]),
                    "spill_bytes": int(frame[2]) + int(frame[3]),
                }
            )
    return found


def add_occupancy(
    found: list[dict[str, Any]], launches: list[tuple[str, int, str, int, int, int]]
) -> None:
    """Adds shared memory, and how many thread blocks fit a multiprocessor of each GPU that runs the
    code, by compute capability."""
    launched = {tuple(key): rest for *key, rest in ((*x[:4], x[4:]) for x in launches)}
    for entry in found:
        cache = entry["cache"]
        if cache not in ("", "uint8", "codes"):
            cache = "16 bits" if cache == entry["storage"] else "8 bits"
        key = (entry["kernel"], entry["size"], cache, entry["variant"])
        threads, shared_bytes = launched.get(key, (256, 0))
        of_block = -(-entry["registers"] // 8) * 8 * threads
        entry["shared_bytes"] = shared_bytes
        entry["blocks"] = {}
        for gpu in RUN_BY.get(entry["target"], (entry["target"],)):
            registers, shared, max_threads = LIMITS[gpu]
            entry["blocks"][gpu] = min(
                registers // of_block,
                shared // (shared_bytes + RESERVED_SHARED_BYTES),
                max_threads // threads,
            )


def table(module: Path, folder: Path, objects: list[str]) -> None:
    """Prints and writes the table."""
    spec = importlib.util.spec_from_file_location("_native", module)
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    found = [entry for entry in kernels(objects) if entry["target"] in LIMITS]
    add_occupancy(found, native.cuda_kernels())
    columns = ["kernel", "storage", "cache", "size", "variant", "target"]
    found.sort(key=lambda entry: [entry[column] for column in columns])
    (folder / "resources.json").write_text(json.dumps(found, indent=2))
    columns += ["registers", "spill_bytes", "shared_bytes", "blocks"]
    row = "{:<21}{:<15}{:<15}{:>5}{:>9}{:>8}{:>11}{:>13}{:>14}  {}"
    print(row.format(*columns))
    for entry in found:
        *numbers, blocks = (entry[column] for column in columns)
        print(row.format(*numbers, ", ".join(f"{blocks[gpu]} on {gpu}" for gpu in blocks)))


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        table(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(launch(sys.argv[1:]))
