from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shared_ffi.spec import ArraySpec

ffi_version: tuple[int, int]
cuda_version: tuple[int, int] | None
cuda_architectures: str | None

def handlers() -> dict[str, dict[str, Any]]: ...
def api_version_at(address: int) -> tuple[int, int]: ...
def register_at(address: int, target: str, platform: str, handler: Any) -> None: ...

class EagerCall:
    def __init__(
        self,
        handler: Any,
        attributes: dict[str, float | int],
        operands: Sequence[ArraySpec],
        results: Sequence[ArraySpec],
    ) -> None: ...
    def __call__(
        self,
        operands: Sequence[int],
        results: Sequence[int],
        num_threads: int = 1,
        stream: int = 0,
    ) -> None: ...

class TorchRules:
    def __init__(self, torch: Any, errors: Any) -> None: ...
    def refuse_derivative(self, op: str, tensors: Sequence[Any]) -> None: ...

def share_elements(
    layout: tuple[int, Sequence[int], Sequence[int]],
    other: tuple[int, Sequence[int], Sequence[int]],
    distance: int,
) -> bool: ...

class EagerKernel:
    def __init__(
        self,
        op: str,
        is_on_cuda: bool,
        rules: TorchRules,
        prepare: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        keys: Sequence[int],
        otherwise: Callable[..., Any] | None,
        returns_out: bool,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Untraced:
    def __init__(self, function: Callable[..., Any]) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def observe_eager_calls(function: Callable[[str, list[int]], object] | None) -> None: ...
def cpu_instruction_sets() -> list[str]: ...
def cpu_instruction_set() -> str: ...
def set_cpu_instruction_set(name: str) -> None: ...
def metadata_error(
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    query_start_loc: np.ndarray,
    num_seqs: int,
    *,
    token_pairs: dict[str, np.ndarray],
    causal: np.ndarray | None,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    sliding_window: int,
    max_query_len: int,
    is_causal: bool,
) -> str: ...
def token_error(
    slot_mapping: np.ndarray,
    positions: np.ndarray | None,
    *,
    num_blocks: int,
    block_size: int,
    max_positions: int,
) -> str: ...

class ScratchSizes:
    split_limit: int
    decode_tokens: int
    enough_slots: int
    most_group_slots: int
    most_runs: int
    max_split_tokens: int
    tile_tokens: int
    max_length: int
    flag_bytes: int
    partial_bytes: int
    alignment: int
    group: int
    max_group_splits: int
    max_slots: int
    slot_bytes: int
    leaf: int

def scratch_sizes(
    *,
    num_heads: int,
    num_kv_heads: int,
    value_head_size: int,
    sliding_window: int,
    max_query_len: int,
) -> ScratchSizes: ...
def cuda_plan(
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    max_seqs: int,
    capacity: int,
    sliding_window: int,
    max_query_len: int,
    has_decode: bool,
    long_rows: int,
    is_hopper: bool,
    launches_early: bool,
) -> list[tuple[str, int, int, int, bool]]: ...

# In builds with the CUDA handlers.
def cuda_kernels() -> list[tuple[str, int, int, int, int, int]]: ...
def cuda_kernels_in_use() -> list[str]: ...
def cuda_choices() -> list[str]: ...
def cuda_choice() -> str: ...
def set_cuda_choice(name: str) -> None: ...
def set_cuda_max_blocks(limit: int) -> None: ...
