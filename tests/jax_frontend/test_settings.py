"""The ops in the settings that people use JAX in: each is right, or refused by its rule."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from harness.compare import assert_same_bits
from harness.hlo import COLLECTIVES
from tests.support.jax_settings import (
    FLAG_SETTINGS,
    FLAGS,
    KINDS,
    SETTINGS,
    TRANSFORMATIONS,
    Kind,
    Setting,
    flags,
)


@cache
def expected(name: str, transformation: str) -> list[np.ndarray]:
    """The results of calls that are made directly, on one device."""
    kind = KINDS[name]
    function = TRANSFORMATIONS[transformation].expected(kind, kind.function)
    return [*map(np.asarray, function(*kind.arrays))]


def compare(kind: Kind, setting: Setting, results: Any, wanted: list[np.ndarray]) -> None:
    for result, want in zip(results, wanted, strict=True):
        for one in np.split(np.asarray(result), 2 if setting.is_doubled else 1):
            if kind.is_exact:
                assert_same_bits(one, want)
            else:
                np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-6)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_setting(setting: str, transformation: str, name: str) -> None:
    kind, used, chosen = KINDS[name], TRANSFORMATIONS[transformation], SETTINGS[setting]
    if kind.adds_up and "check_vma=False" in setting:
        pytest.skip("a gradient inside of it is a part of the sum, as JAX defines it")
    wanted = expected(name, transformation)
    mesh = chosen.mesh()
    with chosen.context(mesh):
        arrays = chosen.place(kind, mesh)
        program = chosen.wrap(kind, used.apply(kind, kind.function))
        if used.is_jitted:
            program = jax.jit(program)
        compare(kind, chosen, program(*arrays), wanted)


@cache
def jax_gathers(setting: str) -> bool:
    """Whether JAX gathers the operands of its own functions there, as JAX 0.10 does where
    ``shard_map`` leaves explicit axes."""
    array = np.zeros((4, 4), np.float32)
    kind = Kind("negative", lambda x: (-x,), (array,), (1,), (1,), ())
    chosen = SETTINGS[setting]
    mesh = chosen.mesh()
    with chosen.context(mesh):
        program = jax.jit(chosen.wrap(kind, kind.function))
        text = program.lower(*chosen.place(kind, mesh)).compile().as_text()
    return COLLECTIVES.search(text or "") is not None


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, kind in KINDS.items()
        if kind.dims.count(None) < len(kind.dims) and not kind.adds_up
    ],
)
@pytest.mark.parametrize("setting", [name for name, x in SETTINGS.items() if x.axis and x.mesh()])
def test_program(setting: str, name: str) -> None:
    """Compiled ahead of time, with a donated cache: nothing is sent, an update writes in place, and
    a device holds as many bytes as before."""
    kind, chosen = KINDS[name], SETTINGS[setting]
    mesh = chosen.mesh()
    with chosen.context(mesh):
        arrays = chosen.place(kind, mesh)
        written = tuple(array for array, _ in kind.carried) if kind.is_update else ()
        jitted = jax.jit(chosen.wrap(kind, kind.function), donate_argnums=written)
        compiled = jitted.lower(*arrays).compile()
        text = compiled.as_text()
        assert text is not None
        if not jax_gathers(setting):
            assert not COLLECTIVES.search(text)
        sizes = [x.addressable_shards[0].data.nbytes for x in arrays]
        shapes = [x.sharding.shard_shape(x.shape) for x in arrays]
        results = compiled(*arrays)
        compare(kind, chosen, results, expected(name, "jit"))
        for array, result in kind.carried:
            assert results[result].addressable_shards[0].data.nbytes == sizes[array]
            assert arrays[array].is_deleted() == kind.is_update
        if kind.is_update:
            assert "input_output_alias" in text.partition("\n")[0]
            assert "output_to_operand_aliasing" in text
            copies = [line for line in text.splitlines() if " copy(" in line]
            for array in written:
                size = f"[{','.join(map(str, shapes[array]))}]"
                assert jax_gathers(setting) or not any(size in line for line in copies)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("setting", FLAG_SETTINGS)
@pytest.mark.parametrize("flag", FLAGS)
def test_flag(flag: str, setting: str, name: str) -> None:
    kind, chosen = KINDS[name], SETTINGS[setting]
    wanted = expected(name, "jit")
    mesh = chosen.mesh()
    with flags(FLAGS[flag]), chosen.context(mesh):
        with jax.transfer_guard("allow"):
            arrays = chosen.place(kind, mesh)
        results = jax.jit(chosen.wrap(kind, kind.function))(*arrays)
        with jax.transfer_guard("allow"):
            compare(kind, chosen, results, wanted)
