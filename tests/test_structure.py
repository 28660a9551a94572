"""The layout of the repository, and the imports that are allowed."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import jax_frontend
import torch_frontend
from shared_ffi import OPS

ROOT = Path(__file__).parents[1]


def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports. `from a import b` counts as `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imported(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(path)}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


# The floors of the house: the folders that each folder may import.
FRONTENDS = {"shared_ffi", "jax_frontend", "torch_frontend"}
FLOORS = {
    "shared_ffi": set(),
    "jax_frontend": {"shared_ffi"},
    "torch_frontend": {"shared_ffi"},
    "xla_paged_attention": FRONTENDS,
    "harness": FRONTENDS | {"xla_paged_attention"},
    "examples": FRONTENDS | {"xla_paged_attention", "harness"},
    "benchmarks": FRONTENDS | {"xla_paged_attention", "harness", "tools"},
    "tools": set(),
}
# torchax runs PyTorch's programs in JAX.
IMPORTS_BOTH_FRONTENDS = ROOT / "torch_frontend/integrations/torchax.py"


# Runs in a process of its own for each backend; no other file imports it.
SMOKE_STEP = ROOT / "shared_ffi/selftest/smoke_step.py"


@pytest.mark.parametrize("folder", FLOORS)
def test_no_folder_imports_one_above_it(folder: str) -> None:
    allowed = FLOORS[folder] | {folder}
    folders = {*FLOORS, "tests"}
    for path in {*python_files(folder)} - {SMOKE_STEP, IMPORTS_BOTH_FRONTENDS}:
        assert imported(path) & folders <= allowed, path


LEAVES = {"benchmarks", "examples"}


def test_nothing_imports_benchmarks_or_examples() -> None:
    """But for themselves and their own tests. Scripts for other processes count, too."""
    folders = [ROOT / "tests" / name for name in LEAVES]
    for path in python_files("tests"):
        in_scripts = re.findall(
            rf"^ *(?:from|import) ({'|'.join(LEAVES)})\b", path.read_text(), re.M
        )
        if not any(path.is_relative_to(folder) for folder in folders):
            assert not in_scripts, path


def test_neither_modules_nor_rooms_import_in_a_circle() -> None:
    """A room is a folder with its modules. Its `__init__` and `__main__` are above it: they show
    what other rooms have."""
    modules = {"shared_ffi._native": ROOT / "shared_ffi/_native.pyi"}
    for path in {*python_files(*FRONTENDS, "xla_paged_attention")} - {SMOKE_STEP}:
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path

    def imports(path: Path) -> set[str]:
        """`from package import name` imports the module of that name, if there is one."""
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in modules else node.module for name in found}
        return names & {*modules}

    by_module = {name: imports(path) for name, path in modules.items()}
    [*TopologicalSorter(by_module).static_order()]
    faces = {name for name, path in modules.items() if path.stem in ("__init__", "__main__")}
    by_room: dict[str, set[str]] = {}
    for name in {*modules} - faces:
        room = name.rpartition(".")[0]
        rooms = {imported.rpartition(".")[0] for imported in by_module[name] - faces}
        by_room.setdefault(room, set()).update(rooms - {room})
    [*TopologicalSorter(by_room).static_order()]


def test_support_imports_no_test() -> None:
    for path in [*python_files("tests/support", "tests/cases"), ROOT / "tests/conftest.py"]:
        for name in imported_modules(path) & {*TEST_MODULES}:
            pytest.fail(f"{path} imports {name}")


TEST_MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
}


@pytest.mark.parametrize("module", TEST_MODULES)
def test_no_test_imports_another(module: str) -> None:
    """Scripts for other processes count too. They may import the module that contains them."""
    path = TEST_MODULES[module]
    in_scripts = re.findall(r"(?:from|import) (tests\.[\w.]*test_\w+)", path.read_text())
    assert imported_modules(path) & {*TEST_MODULES} == set()
    assert set(in_scripts) <= {module}


@pytest.mark.parametrize("path", python_files("shared_ffi"), ids=lambda path: path.name)
def test_shared_ffi_knows_no_frontend(path: Path) -> None:
    frontends = {"jax_frontend", "torch_frontend", "torch"}
    assert path == SMOKE_STEP or not imported(path) & frontends
    assert "shared_ffi.selftest.smoke_step" not in imported_modules(path)


@pytest.mark.parametrize("path", python_files("torch_frontend"), ids=lambda path: path.name)
def test_only_three_files_know_torch_xla(path: Path) -> None:
    """How an op reaches XLA, how torch_xla reaches a GPU, and the openxla backend for other
    tensors."""
    knows = imported(path) & {"torch_xla", "jax", "jax_frontend"}
    files = ("operator/xla.py", "cuda_plugin.py", "compilers/openxla.py")
    is_integration = "integrations" in path.parts
    assert is_integration or str(path.relative_to(ROOT / "torch_frontend")) in files or not knows


INTEGRATIONS = sorted({x.stem for x in (ROOT / "torch_frontend/integrations").glob("[!_]*")})


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_integrations_stand_alone(name: str) -> None:
    """No other file imports an integration: without it, its library is not needed. The server is
    vLLM's."""
    module = f"torch_frontend.integrations.{name}"
    folders = [folder for folder in FLOORS if folder != "examples"]
    own = [
        x for x in python_files("torch_frontend/integrations") if name in (x.stem, x.parent.name)
    ]
    servers = python_files("xla_paged_attention/server") if name == "vllm" else []
    others = {*python_files(*folders)} - {*own, *servers}
    assert own and not [x for x in others if module in imported_modules(x)]
    for path in own:
        assert imported(path) & {*INTEGRATIONS} <= {name}  # varlen is a part of PyTorch
    outside = [x for x in python_files("torch_frontend") if "integrations" not in x.parts]
    assert [x for x in outside if name in imported(x)] == []


def test_every_op_has_its_files_and_its_backends() -> None:
    names = [op.OP for op in OPS if not op.OP.endswith("_backward")]
    ops = ["hadamard", "merge_attention", "ragged_paged_attention", *names]
    ops += ["Batch", "BatchHistory", "BlockPool", "check_batch", "pad_batch", "slot_mapping"]
    assert sorted(jax_frontend.__all__) == sorted(
        [*ops, "ragged_paged_attention_hd64", "ragged_paged_attention_v3"]
    )
    others = ["aoti_compile_and_package", "export_platform"]
    others.append("replace_tpu_kernels")
    assert sorted(torch_frontend.__all__) == sorted([*ops, *others])
    for name in names:
        assert (ROOT / "jax_frontend" / f"{name}.py").exists()
        assert (ROOT / "torch_frontend" / f"{name}.py").exists()
        csrc = ROOT / "shared_ffi/csrc" / name
        assert (csrc / "params.h").exists() and (csrc / "handler.cc").exists()
        for kernel in ("cpu.cc", "cuda.cu"):
            small, large = csrc / kernel, csrc / Path(kernel).stem / f"run{Path(kernel).suffix}"
            assert small.exists() != large.exists()


CSRC = ROOT / "shared_ffi/csrc"
RUNTIME_ROOMS = ("ffi", "eager", "python", "torch")


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for path in CSRC.rglob("*.*")
        if path.name != "CMakeLists.txt" and path.relative_to(CSRC).parts[0] not in RUNTIME_ROOMS
    ),
    ids=lambda path: str(path.relative_to(CSRC)),
)
def test_only_handlers_know_xla(path: Path) -> None:
    """Kernels know neither XLA nor a framework."""
    includes = re.findall(r"#include [<\"](.*)[>\"]", path.read_text())
    rooms = "|".join(("xla", *RUNTIME_ROOMS))
    known = [x for x in includes if re.search(rf"(^|/)({rooms})/", x) and "ffi/export.h" not in x]
    assert path.name in ("handler.cc", "backward_handler.cc") or not known


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NAME = re.compile(r"\b(?:k[A-Z]\w+|[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+)\b")
_DEFINES = re.compile(r"\b(?:constexpr|inline|static|__device__|__global__)\b.*")


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def test_names_of_csrc_are_defined_and_used() -> None:
    """Comments name what is defined somewhere, and what is defined is used, if only by a test."""
    texts = [path.read_text() for path in sorted(CSRC.rglob("*.*"))]
    codes = [_COMMENT.sub(" ", text) for text in texts]
    comments = [comment for text in texts for comment in _COMMENT.findall(text)]
    count = Counter(word for code in codes for word in words(code))
    other = {
        word
        for folder in ("tests", "benchmarks", "shared_ffi", "cmake")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".cc", ".cu", ".cmake", ".toml") and CSRC not in path.parents
        for word in words(path.read_text())
    }
    named = {name for comment in comments for name in _NAME.findall(comment)}
    known = {*count, *other, "F16C"}  # the last: a set of instructions
    known |= {f"{name}s" for name in known}
    assert sorted(named - known) == []
    lines = [line for code in codes for line in _DEFINES.findall(code)]
    defined = {name for line in lines for name in _NAME.findall(line)}
    assert sorted(name for name in defined - other if count[name] == 1) == []


_FILE = re.compile(r"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.(?:py|cc|cuh?|h)\b(?![\w(/])")
FILES_OF_OTHERS = {"c_api.h", "cuda_fp8.h", "pjrt_c_api.h", "pjrt_c_api_gpu_extension.h", "shim.h"}


def test_files_that_are_named_exist() -> None:
    """In comments of csrc, and anywhere in the packages' Python."""
    texts = {path: path.read_text() for path in CSRC.rglob("*.*")}
    texts = {path: "\n".join(_COMMENT.findall(text)) for path, text in texts.items()}
    packages = ("shared_ffi", "jax_frontend", "torch_frontend", "xla_paged_attention", "harness")
    texts |= {path: path.read_text() for path in python_files(*packages)}
    folders = [*packages, "tests", "cmake"]
    existing = {f"/{path.relative_to(ROOT)}" for x in folders for path in (ROOT / x).rglob("*.*")}
    for path, text in texts.items():
        for name in _FILE.findall(text):
            if Path(name).name not in FILES_OF_OTHERS:
                assert any(x.endswith(f"/{name}") for x in existing), (path, name)


def test_functions_are_used_outside_of_tests() -> None:
    """But for what other libraries call."""
    others = ("torch_frontend/integrations/vllm", "torch_frontend/cuda_plugin.py")
    files = {*python_files("shared_ffi", "jax_frontend", "torch_frontend")}
    readers = [*files, *python_files("harness", "examples", "benchmarks")]
    readers += [*(ROOT / "docs").rglob("*.md"), *CSRC.rglob("*.cc")]
    texts = [path.read_text() for path in readers]
    count = Counter(word for text in texts for word in words(text))
    defined = {
        node.name
        for path in files
        if not str(path.relative_to(ROOT)).startswith(others)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("__")
    }
    assert sorted(name for name in defined if count[name] == 1) == []
