"""Every Python block of the documentation runs in a process of its own. The processes are forks of one
that has imported PyTorch, which takes seconds."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import pydoc
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from shared_ffi.batch import Batch, pad_batch
from tests.cases.all import CASES, SHORT_CASES, SHORT_UPDATE_CASES, UPDATE_CASES
from tests.cases.case import Case

ROOT = Path(__file__).parents[1]
OF_ROOT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*OF_ROOT, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "tools").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{i}")
    for path in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]
EXPECTED = {
    'setLevel("DEBUG")': "copies kv_cache if it is an argument, as none like it is donated (donate_argnums); kv",
    "lowered.as_text": 'custom_call_target="XlaGpuSimpleAdd"',
    "_get_xla_tensors_hlo": 'custom_call_target="XlaGpuSimpleAdd"',
    'export_platform("cuda")': "stablehlo.custom_call @xla_gpu_paged_attention",
    ".allclose(": "True",
    "as_text()\nprint(": "False",
    "aoti_load_package": "True",
    "_get_xla_sharding_spec": "devices=[1,4,1]",
    "jax.set_mesh(": "query must be sharded along dimension 1 alone, its heads",
    "jax.lax.scan(": "copies of the pool: 0",
    "generate_batch(": "the same tokens: True",
    "from vllm import": "new tokens: [8, 8]",
    "out=output": "same: True",
    "import pytest": "3 passed",
    "jax_view(step)": "True",
    'print("as dense attention:"': "as dense attention: True",
    'print("learns:"': "learns: True",
    'print("same:", losses': "same: tensor(True)",
    'print("as by hand:"': "as by hand: True",
    'print("as each alone:"': "as each alone: True",
    'print("same bits:"': "same bits: True",
    'print("programs:"': "programs: 2 importance ratio: 1.00000",
    'print("found:"': "which sequence 'c' wrote in step 2",
    'print("still in use:"': "still in use: [0, 1, 3] free: [2]",
}


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [x for x in ("torch_xla", "torch_frontend") if importlib.util.find_spec(x)]
)


def _run_in_a_fork(script: str, output: Path, environment: dict[str, str]) -> None:
    os.environ |= environment
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    exec(compile(script, "block", "exec"), {"__name__": "__main__"})


def run(script: str, folder: Path, **environment: str) -> str:
    """What a script prints in a new process, on the CPU."""
    output = folder / "output"
    variables = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": "", **environment}
    process = FORKS.Process(target=_run_in_a_fork, args=(script, output, variables))
    process.start()
    process.join()
    printed = output.read_text()
    assert process.exitcode == 0, printed
    return printed


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, tmp_path: Path) -> None:
    for library in re.findall(r"import torch_frontend\.integrations\.(\w+)", block):
        try:
            metadata.version(library)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{library} is optional: pip install 'xla-paged-attention[{library}]'")
    for library in ("vllm", "flax", "torch.nn.attention.varlen"):
        if f"from {library} import" in block and not importlib.util.find_spec(library):
            pytest.skip(f"{library} is optional")
    if "\ndef test_" in block:
        (tmp_path / "test_block.py").write_text(block)
        arguments = [str(tmp_path), f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
        block += f"\nassert pytest.main({arguments}) == 0"
    printed = run(block, tmp_path)
    for code, text in EXPECTED.items():
        assert code not in block or text in printed


@pytest.mark.parametrize("code", EXPECTED)
def test_expected_code_is_in_a_block(code: str) -> None:
    assert any(code in block.values[0] for block in BLOCKS)


def fenced(language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return [x for page in PAGES for x in re.findall(pattern, page.read_text(), re.M | re.S)]


def test_every_kind_of_fenced_block_is_tested() -> None:
    fences = {x for page in PAGES for x in re.findall(r"^```(\w*)$", page.read_text(), re.M) if x}
    assert fences == {"python", "cpp", "diff"}


def test_diffs_add_imports_that_work() -> None:
    for line in re.findall(r"^\+(.*)$", "".join(fenced("diff")), re.M):
        exec(line, {})


def test_cpp_compiles(tmp_path: Path) -> None:
    """test_aot_inductor.py runs a program with the same call."""
    import torch  # noqa: PLC0415  (after the settings of conftest.py)

    (block,) = fenced("cpp")
    include, code = block.split("\n\n", 1)
    source = tmp_path / "block.cc"
    source.write_text(f"{include}\nvoid Run(std::vector<at::Tensor> arguments) {{\n{code}}}\n")
    headers = Path(torch.__file__).parent / "include"
    paths = [f"-I{headers}", f"-I{headers}/torch/csrc/api/include"]
    subprocess.run(["g++", "-std=c++17", "-w", "-fsyntax-only", *paths, source], check=True)


def test_the_picture_of_a_step_is_what_pad_batch_returns() -> None:
    sizes = {"num_tokens": 10, "max_seqs": 4, "max_blocks_per_seq": 3}
    tokens, blocks = [[0] * 4, [0], [0] * 3], [[5, 1], [2, 0, 6], [4]]
    batch = pad_batch(tokens, [6, 9, 3], blocks, block_size=4, **sizes)._asdict()
    picture = (ROOT / "docs/step.svg").read_text()
    shown = re.findall(r'<g id="(\w+)">(.*?)</g>', picture, re.S)
    assert {name for name, _ in shown} == {*batch} - {"tokens"}
    for name, group in shown:
        assert re.findall(r">(-?\d+)<", group) == [*map(str, batch[name].ravel().tolist())]


def test_help_shows_the_arrays_of_a_batch() -> None:
    beginning = pydoc.plain(pydoc.render_doc(Batch))[:1500]
    for name, shape in {
        "tokens": "[num_tokens]",
        "positions": "[num_tokens]",
        "slot_mapping": "[num_tokens]",
        "context_lens": "[max_seqs]",
        "block_tables": "[max_seqs, max_blocks_per_seq]",
        "query_start_loc": "[max_seqs + 1]",
        "num_seqs": "[1]",
    }.items():
        assert f"{name}: ``{shape}``, " in beginning


def test_the_page_counts_the_tested_cases() -> None:
    openxla = importlib.import_module("tests.torch_frontend.compilers.test_openxla")
    for words in (
        f"the same {len(CASES)} cases of attention and {len(UPDATE_CASES)} of the cache's update",
        f"Inductor runs {len(SHORT_CASES)} of the cases of attention and {len(SHORT_UPDATE_CASES)} of",
        f"openxla on PyTorch's own tensors {len(openxla.EXCHANGEABLE)} and {len(openxla.EXCHANGEABLE_UPDATES)}",
    ):
        assert words in " ".join((ROOT / "docs/features/README.md").read_text().split())
    features = (
        "sliding_window soft_cap return_lse sinks alibi_slopes tree ranges causal causal_seqs "
    )
    features += (
        "window_right max_query_len kv_layout own_value_head_size value_head_size cache_dtype"
    )
    not_in = {
        name
        for name in [*features.split(), "value_cache_dtype"]
        if all(getattr(case, name) == getattr(Case, name) for case in SHORT_CASES)
    }
    assert not_in == {"tree", "own_value_head_size"}


def test_the_reference_is_complete() -> None:
    import jax_frontend  # noqa: PLC0415
    import torch_frontend  # noqa: PLC0415

    for name, package in (("jax", jax_frontend), ("torch", torch_frontend)):
        page = (ROOT / f"docs/reference/{name}.md").read_text()
        shown = set(re.findall(r"^::: (?:\S+)\.(\w+)$", page, re.M))
        shown |= set(re.findall(r"\[`(\w+)`\]\(jax\.md#", page))
        assert {*package.__all__} <= shown


IN_CODE = r"(?:`|^    |&& )(make|python3?(?: -P)? -m) ([a-z][\w.-]*)"
COMMANDS = {
    f"{program} {name}": (program, name)
    for page in PAGES
    for program, name in re.findall(IN_CODE, page.read_text(), re.M)
}


@pytest.mark.parametrize(("program", "name"), COMMANDS.values(), ids=COMMANDS)
def test_commands_exist(program: str, name: str) -> None:
    """What the pages tell a reader to run."""
    if program == "make":
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.M)
    else:
        if name.startswith("vllm."):
            pytest.importorskip("vllm", reason="vLLM is optional: docs/vllm.md")
        assert importlib.util.find_spec(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert [x for x in links if "://" not in x and not (page.parent / x).exists()] == []


@pytest.mark.parametrize(
    ("module", "pattern"),
    [
        ("import jax_frontend as f; f.simple_add([1.0], [1.0])", "*jit_*"),
        (
            "import torch, torch_xla, torch_frontend; x = torch.ones(1).to('xla');"
            "torch.ops.xla_gpu.simple_add(x, x).cpu()",
            "*SyncTensorsGraph*",
        ),
    ],
    ids=["jax", "torch_xla"],
)
def test_dump(module: str, pattern: str, tmp_path: Path) -> None:
    run(module, tmp_path, XLA_FLAGS=f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
    for stage in ("before_optimizations", "after_optimizations"):
        dumps = [path.read_text() for path in tmp_path.glob(f"{pattern}{stage}.txt")]
        assert any("XlaGpuSimpleAdd" in text for text in dumps), stage
