"""The programs of JAX and torch_xla for CUDA, compiled for an H200 without a GPU. They make the
same custom calls, with the layouts and the aliasing that the kernels need."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch._dynamo.backends.common import aot_autograd
from torch_xla.stablehlo import exported_program_to_stablehlo

import jax_frontend
import torch_frontend
from harness import hlo
from harness.hlo import ATTENTION, UPDATE
from shared_ffi import cuda_driver
from shared_ffi.spec import ArraySpec
from shared_ffi.xla import pjrt, programs
from tests.support import scripts
from tests.support.models import Layer, layer_inputs
from torch_frontend.compilers import openxla
from torch_frontend.compilers.in_place import cut_at_updates

pytest.importorskip("jax_plugins.xla_cuda13", reason="make .venv/jax-cuda/installed")


# XLA's description of an NVIDIA H200, a GpuTargetConfigProto.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


@pytest.fixture(scope="module")
def h200() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H200, topology="1x1x1"
        )
        yield topology.devices[0]


def jax_hlo(h200: Any, function: Callable[..., Any], *operands: Any, donate: Any = ()) -> str:
    """The optimized HLO of a JAX function."""
    sharding = jax.sharding.SingleDeviceSharding(h200)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in operands]
    jitted = jax.jit(function, donate_argnums=donate)
    text = jitted.trace(*shapes).lower(lowering_platforms=("cuda",)).compile().as_text()
    assert text is not None
    return text


def torch_xla_hlo(h200: Any, module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> str:
    """The optimized HLO of a module that torch_xla exports for CUDA."""
    with torch_frontend.export_platform("cuda"):
        exported = exported_program_to_stablehlo(torch.export.export(module, arguments))
    (function,) = exported._bundle.stablehlo_funcs
    operands, results = (
        [ArraySpec(tuple(array.shape), array.dtype) for array in signature]
        for signature in (function.meta.input_signature, function.meta.output_signature)
    )
    return programs.compile_stablehlo(function.bytecode, operands, results, h200).as_text()


def layer_in_jax(cache: Any, key: Any, slots: Any, query: Any, *metadata: Any) -> Any:
    """The layer of tests/support/models.py in JAX."""
    cache = jax_frontend.kv_cache_update(cache, key, key * 2, slots)
    return jax_frontend.paged_attention(query, cache, *metadata, 0.5), cache


def operands(dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """Operands of paged_attention: a decode step of 16 sequences, 8 heads and 2 KV heads."""
    shapes = [(16, 8, 128), (64, 16, 4, 128), (16,), (16, 8), (17,), (1,)]
    dtypes = [dtype, dtype, *[jnp.int32] * 4]
    return tuple(jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


attend = partial(jax_frontend.paged_attention, scale=0.125, sliding_window=100, soft_cap=30.0)


def test_jax_and_torch_xla_make_the_same_calls(h200: Any) -> None:
    layer, (key, slots, *rest) = Layer(), layer_inputs()
    arguments = (key, slots.int(), *rest)
    exported = torch_xla_hlo(h200, layer, arguments)
    in_jax = [jnp.asarray(x.numpy()) for x in (layer.cache, *arguments)]
    jitted = jax_hlo(h200, layer_in_jax, *in_jax, donate=0)
    for target in (ATTENTION, UPDATE):
        (call,) = hlo.custom_calls(exported, target)
        assert hlo.custom_calls(jitted, target) == [call]
        assert "operand_layout_constraints={" in call and "API_VERSION_TYPED_FFI" in call
    assert "output_to_operand_aliasing={{}: (0, {})}" in call


def test_four_devices_share_a_call_by_heads() -> None:
    """Each makes the call of its heads, with scratch of that call, and sends nothing."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H200, topology="1x1x4"
        )
    mesh = Mesh(np.array(topology.devices), ("model",))
    query, _, *metadata = operands()
    kv_cache = jnp.zeros((64, 16, 8, 128), query.dtype)
    specs = [P(None, "model"), P(None, None, "model"), P(), P(), P(), P()]
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip((query, kv_cache, *metadata), specs, strict=True)
    ]
    program = jax.jit(attend).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    text = program.as_text()
    assert text is not None and "all-gather" not in text
    (call,) = hlo.custom_calls(text, ATTENTION)
    parts = (query[:, :2], kv_cache[:, :, :2], *metadata)
    traced = jax.jit(attend).trace(*parts).lower(lowering_platforms=("cuda",))
    (alone,) = hlo.custom_calls(traced.compiler_ir("hlo").as_hlo_text(), ATTENTION)
    assert call.partition(" custom-call(")[0] == alone.partition(" custom-call(")[0]


def test_openxla_makes_the_same_calls_on_cuda_tensors(h200: Any) -> None:
    """Checks the program that torch.compile(backend="openxla") runs on CUDA tensors."""
    layer, (key, slots, *rest) = Layer(), layer_inputs()
    arguments = (key, slots.int(), *rest)
    graph = torch.export.export(layer, arguments).run_decompositions().graph_module
    tensors = [x.to("meta") for x in (layer.cache, *arguments)]
    trace = openxla.trace_on_placeholders(graph, tensors, "cuda")
    program = programs.compile_stablehlo(trace.program, trace.operands, trace.results, h200)
    text = program.as_text()
    jitted = jax_hlo(
        h200, layer_in_jax, *[jnp.asarray(x.numpy()) for x in (layer.cache, *arguments)]
    )
    for target in (ATTENTION, UPDATE):
        (call,) = hlo.custom_calls(text, target)
        assert hlo.custom_calls(jitted, target) == [call]


def test_openxla_does_not_copy_cuda_caches(h200: Any) -> None:
    """The update runs eagerly; the program that attends has no array as large as the cache."""
    graphs: list[torch.fx.GraphModule] = []
    texts: list[str] = []

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(part: torch.fx.GraphModule) -> Callable[..., list[Any]]:
        def run(*tensors: torch.Tensor) -> list[Any]:
            trace = openxla.trace_on_placeholders(part, tensors, "cuda")
            program = programs.compile_stablehlo(trace.program, trace.operands, trace.results, h200)
            texts.append(program.as_text())
            return [torch.empty(spec.shape, device="meta") for spec in trace.results]

        return run

    layer, arguments = Layer(), layer_inputs()
    with torch.no_grad():
        torch.compile(layer, backend=aot_autograd(fw_compiler=collect))(*arguments)
        run = cut_at_updates(graphs[0], compiled)
        assert run is not None
        examples = [x.meta["val"] for x in graphs[0].graph.find_nodes(op="placeholder")]
        run(*[torch.empty(x.shape, dtype=x.dtype, device="meta") for x in examples])
    assert [len(hlo.custom_calls(text, ATTENTION)) for text in texts] == [0, 1]
    assert not any(hlo.custom_calls(text, UPDATE) for text in texts)
    shape = ",".join(map(str, layer.cache.shape))
    assert re.findall(rf"= f32\[{shape}\]\S* (\w+)\(", texts[1]) == ["parameter"]


def test_scratch_is_an_unused_result(h200: Any) -> None:
    (call,) = hlo.custom_calls(jax_hlo(h200, attend, *operands()), ATTENTION)
    # 16 tokens with a flag each, for each token and each of two leaves a partial of 8 heads with a
    # flag, a counter, the arrivals at 16 sequences of 2 kv heads and at two groups of each, and what
    # each sequence has in common with its neighbours.
    flags_bytes = -(-4 * (16 + 32 + 1 + 16 * 2 * 3 + 16) // 16) * 16
    num_bytes = flags_bytes + 4 * 32 * 8 * (128 + 2)
    assert call.startswith(
        f"(bf16[16,8,128]{{2,1,0}}, u8[{num_bytes}]{{0}}) custom-call(6 operands)"
    )


def test_transposed_operands_keep_the_default_layouts(h200: Any) -> None:
    def transposing(query: Any, kv_cache: Any, *metadata: Any) -> Any:
        return attend(query.transpose(2, 0, 1), kv_cache.transpose(3, 2, 1, 0), *metadata)

    query, kv_cache, *metadata = operands(jnp.float32)
    text = jax_hlo(
        h200, transposing, query.transpose(1, 2, 0), kv_cache.transpose(3, 2, 1, 0), *metadata
    )
    plain = jax_hlo(h200, attend, query, kv_cache, *metadata)
    assert hlo.custom_calls(text, ATTENTION) == hlo.custom_calls(plain, ATTENTION)
    layouts = "{f32[16,8,128]{2,1,0}, f32[64,16,4,128]{3,2,1,0}, s32[16]{0}, s32[16,8]{1,0},"
    assert f"operand_layout_constraints={layouts}" in hlo.custom_calls(text, ATTENTION)[0]


def test_a_donated_cache_is_updated_in_place(h200: Any) -> None:
    _, kv_cache, *_ = operands()
    key = jnp.zeros((16, 2, 128), jnp.bfloat16)
    update = (kv_cache, key, key, jnp.zeros(16, jnp.int32))
    text = jax_hlo(h200, jax_frontend.kv_cache_update, *update, donate=0)
    assert "input_output_alias={ {}: (0, {}, may-alias) }" in text.partition("\n")[0]
    assert " copy(" not in text


def test_vmap(h200: Any) -> None:
    batched = jax.tree.map(lambda x: jnp.stack([x] * 3), operands())
    text = jax_hlo(h200, jax.vmap(attend), *batched)
    assert len(hlo.custom_calls(text, ATTENTION)) == 1 and "while(" not in text


PRELUDE = """
    import jax
    import jax.numpy as jnp
    from functools import partial
    from shared_ffi import _native
    from shared_ffi.xla import pjrt, runtimes
    from tests.backends.test_cuda_program import H200, attend, jax_hlo, operands
    from jax.experimental import topologies

    def compile_for_h200():
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H200, topology="1x1x1"
        )
        return jax_hlo(topology.devices[0], attend, *operands())

    del runtimes._RUNTIMES["jaxlib"]
"""


def in_process(program: str) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(PRELUDE) + textwrap.dedent(program)
    return scripts.run(script, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")


def test_without_registration_nothing_compiles() -> None:
    outcome = in_process("compile_for_h200()")
    assert f"No FFI handler registered for {ATTENTION}" in outcome.stderr


def test_registering_with_the_plugin_alone() -> None:
    """Registers twice through PJRT's C API, without JAX, as torch_xla on CUDA needs it."""
    outcome = in_process("""
        plugin = pjrt.Plugin(str(pjrt.find_cuda_plugin()))
        assert plugin.api_version >= (0, 75), plugin.api_version
        for _ in range(2):
            for target, handler in _native.handlers()["cuda"].items():
                plugin.register(target, handler)
        assert "xla_gpu_paged_attention" in compile_for_h200()
        print("compiled")
        pjrt._TYPED_FFI = 7
        plugin.register("XlaGpuSimpleAdd", _native.handlers()["cuda"]["XlaGpuSimpleAdd"])
    """)
    assert outcome.stdout == "compiled\n", outcome.stderr
    assert "xla_cuda_plugin.so refused XlaGpuSimpleAdd: " in outcome.stderr


def test_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_GPU_CUDA_PLUGIN", str(tmp_path / "none.so"))
    with pytest.raises(
        RuntimeError, match=r"^shared_ffi: XLA_GPU_CUDA_PLUGIN must name .*none\.so"
    ):
        pjrt.find_cuda_plugin()
    monkeypatch.delenv("XLA_GPU_CUDA_PLUGIN")
    monkeypatch.setattr(pjrt.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(
        RuntimeError, match=r"^shared_ffi: no CUDA plugin is installed; pip install"
    ):
        pjrt.find_cuda_plugin()


def test_plugin_fits_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for major in (12, 13):
        (tmp_path / f"xla_cuda{major}").mkdir()
        (tmp_path / f"xla_cuda{major}/xla_cuda_plugin.so").touch()

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(pjrt.importlib.util, "find_spec", lambda package: Spec)
    for driver, expected in {(0, 0): 13, (12, 8): 12, (13, 0): 13, (14, 1): 13}.items():
        monkeypatch.setattr(cuda_driver, "version", lambda driver=driver: driver)
        assert pjrt.find_cuda_plugin().parent.name == f"xla_cuda{expected}"
    monkeypatch.setattr(cuda_driver, "version", lambda: (11, 8))
    with pytest.raises(RuntimeError, match="no CUDA plugin for CUDA 11 or older is installed"):
        pjrt.find_cuda_plugin()


def test_an_unknown_platform() -> None:
    with (
        pytest.raises(ValueError, match="^export_platform: platform must be 'cpu' or 'cuda'; got"),
        torch_frontend.export_platform("tpu"),
    ):
        pass
