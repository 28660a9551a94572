"""vLLM in processes of its own: a server, tensor parallelism, and torch_xla's device."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)

from shared_ffi import _native
from tests.support.model_families import model_of
from tests.support.server import ENVIRONMENT, Server, ready, started
from torch_frontend.integrations import vllm as integration
from xla_paged_attention.server import PROG, attention

XLA_PYTHON = os.environ.get("XLA_GPU_TORCH_XLA_PYTHON")
"""The interpreter of an environment with torch_xla, for the tests of its device."""

TOKENS = """
import json, sys
import torch
from vllm import LLM, SamplingParams
from vllm.utils import cpu_triton_utils

def slots(num_tokens, max_num_tokens, starts, positions, tables, stride, slot_mapping, block_size,
          num_shards=1, shard=0, interleave=1, *_, **__):
    # vLLM's own function for the CPU knows no shards, its Triton kernel does.
    numbers = torch.arange(num_tokens, dtype=starts.dtype)
    sequences = torch.searchsorted(starts[1:], numbers, right=True).clamp(max=len(tables) - 1)
    block, offset = positions // (block_size * num_shards), positions % (block_size * num_shards)
    own = offset // (num_shards * interleave) * interleave + offset % interleave
    is_own = offset // interleave % num_shards == shard
    slot_mapping.fill_(-1)
    slots = tables[sequences, block] * block_size + own
    slot_mapping[:num_tokens] = torch.where(is_own, slots, -1)

cpu_triton_utils._compute_slot_mapping_kernel_impl = slots

def main():
    options = {"attention_backend": "CUSTOM"} | json.loads(sys.argv[1])
    engine = LLM(skip_tokenizer_init=True, dtype="float32", max_model_len=256, enforce_eager=True,
                 **options)
    prompts = [{"prompt_token_ids": [*range(2, 2 + n)]} for n in (1, 12, 40, 90)]
    parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = engine.generate(prompts, parameters, use_tqdm=False)
    print("tokens:", [list(x.outputs[0].token_ids) for x in outputs])

if __name__ == "__main__":
    main()
"""


def tokens_of(folder: Path, model: str, *runs: dict[str, object], **changes: int) -> list[str]:
    """The tokens of a model in each of some runs of vLLM, which differ in their options."""
    model_of(model, **changes).save_pretrained(folder)
    script = folder / "tokens.py"  # vLLM starts its workers from the file
    script.write_text(TOKENS)
    found = []
    for options in runs:
        command = [sys.executable, str(script), json.dumps({"model": str(folder)} | options)]
        result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
        lines = [x for x in result.stdout.splitlines() if x.startswith("tokens:")]
        assert lines, result.stderr[-3000:]
        found += lines
    return found


def test_tensor_parallelism(tmp_path: Path) -> None:
    one, two = tokens_of(tmp_path, "llama", {}, {"tensor_parallel_size": 2})
    assert one == two


def test_decode_context_parallelism(tmp_path: Path) -> None:
    """Two processes share the cache of one kv head; long prompts are read in several steps."""
    shared: dict[str, object] = {
        "attention_backend": "XLA_GPU",
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 4,
        "max_num_batched_tokens": 64,
    }
    one, two = tokens_of(tmp_path, "llama", {}, shared, num_key_value_heads=1)
    assert one == two


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from ready(tmp_path_factory.mktemp("server"))


def test_the_server_uses_our_attention(server: Server) -> None:
    version, isa = metadata.version("xla-paged-attention"), _native.cpu_instruction_set()
    name = f"xla-paged-attention {version}, {isa}"
    assert attention.ask(server.url) == [name]
    assert sum(line.endswith(f"] attention: {name}") for line in server.lines()) == 1
    (ready,) = [line for line in server.lines() if " is ready after " in line]
    begin, end = f"{PROG}: {server.url}/v1 is ready after ", f" s, attention: {name}"
    assert re.fullmatch(rf"{re.escape(begin)}\d+{re.escape(end)}", ready)


def test_the_server_warns_of_no_conversion(server: Server) -> None:
    assert [line for line in server.lines() if "Attempted to load weight" in line] == []


# The last test of the server: it ends it.
def test_an_interrupt_leaves_nothing(server: Server) -> None:
    folder = Path(tempfile.gettempdir())
    assert [*folder.glob("xla-serve-*/*")], "no sockets"
    before = len(server.lines())
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=300) == 128 + signal.SIGINT
    assert [*folder.glob("xla-serve-*")] == []
    with pytest.raises(OSError):
        attention.ask(server.url)
    assert server.lines()[before:] == []


@pytest.mark.parametrize("kind", ["attention", "chunks", "latent"])
def test_a_worker_knows_each_of_our_backends(kind: str) -> None:
    backend: Any = integration.XlaGpuAttentionBackend
    if kind == "latent":
        backend = integration.XlaGpuLatentBackend
    if kind == "chunks":  # as vLLM makes it for Llama 4
        backend = create_chunked_local_attention_backend(backend, 16)
    worker = attention.Worker()
    worker.device = torch.device("cpu")
    worker.model_runner = SimpleNamespace(attn_groups=[[SimpleNamespace(backend=backend)]])
    assert attention.is_ours(worker.attention_names())


def test_another_attention_ends_the_server(tmp_path: Path) -> None:
    with started(tmp_path, "--attention-backend", "CPU_ATTN") as server:
        assert server.process.wait(timeout=500) == 1
    assert server.lines()[-1] == (
        f"{PROG}: the attention backend must be CUSTOM of xla-paged-attention; vLLM uses "
        "CPU_ATTN. Its log above says why"
    )


@pytest.mark.parametrize(
    ("break_it", "environment", "message"),
    [
        (
            "sys.modules['torch_frontend.integrations.vllm'] = None",
            {},
            "the attention backend must load; import of torch_frontend.integrations.vllm halted",
        ),
        (
            "",
            {"VLLM_PLUGINS": "other"},
            "vLLM must load the plugin xla_paged_attention; it does not. Install",
        ),
        (
            "sys.modules['vllm'] = None",
            {},
            "vLLM is not installed: pip install 'xla-paged-attention[serve]'",
        ),
        (
            "sys.path.insert(0, '{folder}')",
            {},
            "torchvision must fit PyTorch; it does not load (operator does not "
            "exist). Models of text do without: pip uninstall torchvision torchaudio torchcodec",
        ),
    ],
    ids=["no-import", "no-plugin", "no-vllm", "torchvision"],
)
def test_a_backend_that_is_broken_is_named(
    break_it: str, environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator does not exist')")
    script = f"import sys; {break_it.format(folder=tmp_path)}\n"
    script += f"from xla_paged_attention.server import prepare; prepare.main('float32', {str(tmp_path)!r})"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and result.stdout == ""
    assert any(line.startswith(f"{PROG}: {message}") for line in result.stderr.splitlines()), (
        result.stderr
    )


@pytest.mark.skipif(XLA_PYTHON is None, reason="XLA_GPU_TORCH_XLA_PYTHON is not set")
def test_layers_on_torch_xla_device(tmp_path: Path) -> None:
    """vLLM is pure Python there: its compiled part is for another PyTorch."""
    origin = importlib.util.find_spec("vllm").origin
    assert origin is not None
    arguments = ["--backend", "torch", "vllm-torch_xla", "vllm-openxla", "--max-new-tokens", "16"]
    script = (
        f"import runpy, sys; sys.path.append({str(Path(origin).parents[1])!r}); "
        f"sys.argv[1:] = {[*arguments, '--json']!r}; "
        "runpy.run_module('examples.generate', run_name='__main__')"
    )
    command = [XLA_PYTHON, "-W", "ignore", "-c", script]
    environment = ENVIRONMENT | {"PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert report["same_tokens"] and report["same_as_transformers"] and report["same_custom_calls"]
    for backend in ("vllm-torch_xla", "vllm-openxla"):
        assert report["backends"][backend]["programs"] == 2
        assert report["backends"][backend]["late_programs"] == 0
