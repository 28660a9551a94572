from collections.abc import Sequence
from typing import Any

ffi_version: tuple[int, int]

def handlers() -> dict[str, dict[str, Any]]: ...
def api_version_at(address: int) -> tuple[int, int]: ...
def register_at(address: int, target: str, platform: str, handler: Any) -> None: ...
def cpu_instruction_sets() -> list[str]: ...
def cpu_instruction_set() -> str: ...
def set_cpu_instruction_set(name: str) -> None: ...

class EagerCall:
    def __init__(
        self,
        platform: str,
        target: str,
        attributes: dict[str, float | int],
        dtypes: Sequence[str] = (),
    ) -> None: ...
    def __call__(
        self,
        operands: Sequence[Any],
        results: Sequence[Any],
        num_threads: int = 1,
        stream: int = 0,
    ) -> None: ...
