"""Packs what a GPU machine without a network lacks: ``python -m benchmarks.gpu.pack``.

Builds the module for that machine's GPU and Python, and writes it with XLA's FFI headers and the
packages that the tests need as files small enough to be copied one by one. There,
``python -m benchmarks.gpu.check --pack FOLDER`` joins and unpacks them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PIECE = 60 << 20  # bytes
# What else the tests import comes with JAX or PyTorch. The last package has compute-sanitizer.
NEEDS = [
    *("pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "expecttest", "filelock", "rich"),
    "nvidia-cuda-sanitizer-api",
]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 25, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def build(cuda: str, python: Path, headers: Path, options: Sequence[str]) -> Path:
    """Builds with CUDA or without. Returns the build's folder."""
    import nanobind  # noqa: PLC0415

    folder = ROOT / "build" / f"pack-{cuda}-{_version(python)}"
    configure: list[object] = [
        *("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *options),
        f"-DPython_EXECUTABLE={python}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        f"-DXLA_FFI_INCLUDE_DIR={headers.resolve()}",
        f"-DXLA_GPU_CUDA={cuda}",
        "-DXLA_GPU_CPU_INSTRUCTION_SETS=baseline",
    ]
    if cuda == "ON" and "CUDACXX" not in os.environ and (nvcc := shutil.which("nvcc")):
        configure.append(f"-DCMAKE_CUDA_COMPILER={nvcc}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in (configure, ["cmake", "--build", folder]):
        subprocess.run([str(word) for word in command], check=True, env=os.environ | {"PATH": path})
    return folder


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


def install(wheels: Sequence[str], target: Path, version: str, *options: str) -> None:
    """Installs packages for another Python into a folder."""
    if wheels:
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *options]
        command += ["--only-binary", ":all:", "--python-version", version, *platforms]
        subprocess.run([*command, "--target", str(target), *wheels], check=True)


def copy_metadata(target: Path) -> None:
    """Writes what an installed package says of itself; the sources of a pack are not installed."""
    import shared_ffi  # noqa: PLC0415

    name, version = "xla-paged-attention", shared_ffi.__version__
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


def write(folder: Path, out: Path, version: str, piece: int = PIECE) -> None:
    """Writes each folder in `folder` to `out`, as an archive cut into pieces, and a manifest."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    archives: dict[str, dict[str, str]] = {}
    for part in sorted(folder.iterdir()):
        pieces = archives[part.name] = {}
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
                archive.add(part, arcname=".")
            file.seek(0)
            while content := file.read(piece):
                name = f"{part.name}.tar.gz.{len(pieces):03}"
                (out / name).write_bytes(content)
                pieces[name] = hashlib.sha256(content).hexdigest()
    manifest = {
        "commit": commit(),
        "sources": sources(),
        "python": version,
        "archives": archives,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def unpack(pack: Path, target: Path) -> dict[str, Any]:
    """Joins and unpacks what is new in a pack, and puts its module beside the sources.

    Returns the manifest, with what is missing: the archives of which a piece is not there. Only
    the peers may be.
    """
    manifest = json.loads((pack / "manifest.json").read_text())
    if manifest["sources"] != sources():
        sys.exit("gpu-check: the pack's module was built from other sources; pack it again")
    if manifest["python"] != (version := "{}.{}".format(*sys.version_info)):
        sys.exit(f"gpu-check: the pack is for Python {manifest['python']}; this is {version}")
    manifest["missing"] = []
    for name, pieces in manifest["archives"].items():
        done = target / f"{name}.json"
        if done.exists() and json.loads(done.read_text()) == pieces:
            continue
        lost = [piece for piece in pieces if not (pack / piece).exists()]
        if lost and name == "peers":
            manifest["missing"].append(name)
            continue
        if lost:
            sys.exit(f"gpu-check: the pack lacks {', '.join(lost)}")
        shutil.rmtree(target / name, ignore_errors=True)
        with tempfile.TemporaryFile() as joined:
            for piece, digest in pieces.items():
                with (pack / piece).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                        sys.exit(f"gpu-check: {piece} is damaged; copy it again")
                    file.seek(0)
                    shutil.copyfileobj(file, joined)
            joined.seek(0)
            with tarfile.open(fileobj=joined) as archive:
                archive.extractall(target / name, filter="data")
        done.write_text(json.dumps(pieces))
    copy_module(target / "module", ROOT / "shared_ffi")
    return manifest


def remove_module() -> None:
    """Removes the module that `unpack` put beside the sources, where it hides an installed one."""
    for path in module_files(ROOT / "shared_ffi"):
        path.unlink()


def paths(target: Path) -> Iterable[Path]:
    """The folders of an unpacked pack that packages are imported from."""
    return (path for name in ("packages", "peers") if (path := target / name).exists())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pack", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-pack")
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        help="an interpreter, with its headers, of the version that the GPU machine has",
    )
    parser.add_argument("--architectures", default="90a-real", help="the GPU's, for CMake")
    parser.add_argument("--option", action="append", default=[], help="another option for CMake")
    parser.add_argument(
        "--ffi-headers",
        type=Path,
        default=next(ROOT.glob("build/*/xla_ffi"), None),
        help="the include folder of jaxlib 0.8.0, as pip install --editable leaves it in build",
    )
    parser.add_argument("--needs", nargs="*", default=NEEDS, help="packages for the tests")
    parser.add_argument(
        "--peers", nargs="*", default=[], help="wheels to compare with, as they are"
    )
    parser.add_argument(
        "--emulated", type=Path, help="for check --rehearse: a build of the tests' emulated GPU"
    )
    options = parser.parse_args()
    if options.ffi_headers is None:
        sys.exit("no folder with XLA's FFI headers; name one with --ffi-headers")
    version = _version(options.python)
    with tempfile.TemporaryDirectory() as folder:
        parts = Path(folder)
        common = (options.python, options.ffi_headers)
        if options.emulated:
            copy_module(build("OFF", *common, options.option), parts / "module")
            copy_module(options.emulated, parts / "emulated")
        else:
            architectures = f"-DXLA_GPU_ARCHITECTURES={options.architectures}"
            copy_module(build("ON", *common, [architectures, *options.option]), parts / "module")
        shutil.copytree(options.ffi_headers / "xla", parts / "headers/xla")
        install(options.needs, parts / "packages", version)
        copy_metadata(parts / "packages")
        install(options.peers, parts / "peers", version, "--no-deps")
        write(parts, options.out, version)
    for path in sorted(options.out.iterdir()):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
