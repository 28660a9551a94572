"""What runs the handlers: the CPU, and the GPU of the tests, emulated on the CPU or, with
XLA_GPU_TEST_ON=cuda, the machine's own."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from harness.arrays import guarded, to_torch
from harness.compare import assert_close_on_cpu, assert_close_on_cuda
from shared_ffi import paged_attention
from tests.support.calls import (
    call_handler,
    checked_call,
    eager_call,
    numbers,
    results_of,
    specs,
    split_keywords,
    with_wider_rows,
)
from tools.emulated_gpu.calls import Change, captured

ON_CUDA = os.environ.get("XLA_GPU_TEST_ON") == "cuda"
CAPABILITY = int(os.environ.get("XLA_GPU_TEST_CAPABILITY", 90))  # of the emulated GPU: 90 is 9.0

# The most thread blocks of a kernel. With few, each has many work items, and with many, each has one.
MAX_BLOCKS = (2**31, 1, 3, 7)


class Gpu:
    platform = "cuda"
    copy = staticmethod(guarded)
    assert_close = staticmethod(assert_close_on_cuda)

    def __init__(
        self, native: Any, kernels: str = "portable", capability: int = CAPABILITY
    ) -> None:
        """`kernels`: portable, or by GPU for those that the library chooses by itself."""
        self.native = native
        self.kernels = kernels
        self.capability = capability

    def run(
        self, op: Any, operands: Sequence[Any], results: Sequence[Any], seed: int, **attributes: Any
    ) -> None:
        """Calls an op's handler. Writes into the results, which may be operands. The seed chooses
        how many thread blocks a kernel may have, 0 any number; and on the emulated GPU the number
        of multiprocessors and the order of warps."""
        self.native.set_cuda_choice(self.kernels)
        self.native.set_cuda_max_blocks(MAX_BLOCKS[seed % len(MAX_BLOCKS)])
        arrays = specs(operands), specs(results)
        call = eager_call(op.TARGET, attributes, *arrays, "cuda", self.native)
        self._call(call, operands, results, seed)

    def kernels_in_use(self) -> list[str]:
        """The attention kernels that calls use where they apply."""
        self.native.set_cuda_choice(self.kernels)
        return self.native.cuda_kernels_in_use()

    def on_hopper(self) -> Gpu:
        """The same GPU with the kernels of Hopper GPUs. Skips the test where there are none."""
        hopper = type(self)(self.native, "by GPU")
        if "prefill" not in hopper.kernels_in_use():
            pytest.skip("this GPU or this build has no kernels for Hopper")
        return hopper

    def _call(self, call: Any, operands: Sequence[Any], results: Sequence[Any], seed: int) -> None:
        raise NotImplementedError


class Cpu:
    """The kernels of the CPU, called as those of a `Gpu`."""

    platform = "cpu"
    copy = staticmethod(np.copy)
    assert_close = staticmethod(assert_close_on_cpu)

    def __init__(self, num_threads: int | None = None) -> None:
        """`num_threads`: chosen by the seed of a call if it is None."""
        self._num_threads = num_threads

    def run(
        self, op: Any, operands: Sequence[Any], results: Sequence[Any], seed: int, **attributes: Any
    ) -> None:
        """Calls an op's handler. Writes into the results, which may be operands."""
        call_handler(op.TARGET, attributes, operands, results, self._num_threads or 3 - seed % 3)


Kernels = Cpu | Gpu


def skip_without_code(gpu: Gpu, capability: int) -> None:
    """Skips a test on the emulated GPU where a build has no code for it."""
    architectures = [int(x) for x in re.findall(r"\d+", gpu.native.cuda_architectures)]
    if ON_CUDA or capability < min(architectures) or max(architectures) < 90 <= capability:
        pytest.skip("this build has no code for such a GPU")


class EmulatedGpu(Gpu):
    stream = 0

    @property
    def _machine(self) -> ctypes.CDLL:
        """The library with the kernels."""
        return ctypes.CDLL(self.native.__file__)

    def _check_the_last_kernel(self) -> None:
        """Whatever follows a call is somebody else's: see LetNextKernelBegin."""
        lets_next_begin = ctypes.c_int.in_dll(self._machine, "lets_next_begin")
        assert not lets_next_begin.value, "the last kernel of a call lets the next one begin"

    @contextmanager
    def captured(self, call: Callable[[], None]) -> Iterator[Callable[[int], None]]:
        """Captures what `call` runs on this GPU in a CUDA graph. Yields what replays it, in the order
        of warps of a seed."""

        def call_on(stream: int) -> None:
            self.stream = stream
            try:
                call()
            finally:
                self.stream = 0

        def replay_with(seed: int) -> None:
            with self._is_there(seed):
                replay()
            self._check_the_last_kernel()

        with captured(self._machine, call_on) as replay:
            yield replay_with

    @contextmanager
    def change(
        self, kernel: str, array: np.ndarray, place: int = 0, **fields: int
    ) -> Iterator[Any]:
        """A number of an array changes while the kernels with this name run. Counts their reads."""
        begin, size = array.ctypes.data, array.itemsize
        numbers = dict.fromkeys(("reads", "every", "value", "counted"), 0) | fields
        numbers |= {"begin": begin, "end": begin + array.nbytes, "place": begin + place * size}
        change = Change.in_dll(self._machine, "number_change")
        for name, number in ({"kernel": kernel.encode(), "bytes": size} | numbers).items():
            setattr(change, name, number)
        try:
            yield change
        finally:
            change.kernel = None

    def _is_there(self, seed: int) -> Any:
        numbers = {"EMULATED_GPU_SEED": seed, "EMULATED_GPU_CAPABILITY": self.capability}
        return mock.patch.dict(os.environ, {name: str(x) for name, x in numbers.items()})

    def kernels_in_use(self) -> list[str]:
        with self._is_there(seed=0):
            return super().kernels_in_use()

    def _call(self, call: Any, operands: Sequence[Any], results: Sequence[Any], seed: int) -> None:
        with self._is_there(seed):
            addresses = [[x.ctypes.data for x in arrays] for arrays in (operands, results)]
            call(*addresses, stream=self.stream)
        self._check_the_last_kernel()


class RealGpu(Gpu):
    def _call(self, call: Any, operands: Sequence[Any], results: Sequence[Any], seed: int) -> None:
        import torch  # noqa: PLC0415

        tensors = {id(x): to_cuda(x) for x in (*operands, *results)}
        stream = torch.cuda.current_stream().cuda_stream
        addresses = [[tensors[id(x)].data_ptr() for x in arrays] for arrays in (operands, results)]
        call(*addresses, stream=stream)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # no later call of this process can succeed
            if "PYTEST_XDIST_WORKER" not in os.environ:
                raise
            print(os.environ.get("PYTEST_CURRENT_TEST"), error, file=sys.__stderr__, flush=True)
            os._exit(1)  # xdist starts another worker
        for x in results:
            from_cuda(tensors[id(x)], x)


def to_cuda(array: Any) -> Any:
    """A copy of an array on the GPU."""
    return to_torch(array).to("cuda")


def keywords_to_cuda(keywords: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with their arrays on the GPU."""
    arrays, options = split_keywords(keywords)
    return options | {name: to_cuda(x) for name, x in arrays.items()}


def from_cuda(tensor: Any, array: np.ndarray) -> None:
    """Copies a tensor's bits into an array."""
    import torch  # noqa: PLC0415

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[array.dtype.itemsize]
    array.view(f"i{array.dtype.itemsize}" if bits != torch.uint8 else "u1")[...] = (
        tensor.view(bits).cpu().numpy()
    )


def scratch_of(operands: Any, attributes: dict[str, Any]) -> np.ndarray:
    """Scratch for a call of paged_attention, full of bytes that no kernel writes."""
    call, _ = checked_call("paged_attention", operands, attributes)
    return guarded(np.full(call.results_on("cuda")[-1].shape, 0xFF, np.uint8))


def attend(
    kernels: Kernels,
    operands: Any,
    *,
    seed: int = 0,
    scratch: np.ndarray | None = None,
    more_columns: int = 0,
    **attributes: Any,
) -> Any:
    """The result of paged_attention, or with return_lse a pair of results. `more_columns`: how much wider the rows are that hold the queries."""
    call, arrays = checked_call("paged_attention", operands, attributes)
    results = [
        kernels.copy(x) for x in results_of(call, arrays)
    ]  # NaN: a kernel must write all rows
    arrays, row_attributes = with_wider_rows("paged_attention", arrays, more_columns)
    written = [*results]
    if kernels.platform == "cuda":
        written.append(scratch_of(operands, attributes) if scratch is None else scratch)
    operands = [kernels.copy(x) for x in arrays]
    kernels.run(paged_attention, operands, written, seed, **numbers(call) | row_attributes)
    return tuple(results) if len(results) > 1 else results[0]
