"""What is read in machine code, and the model of its cycles."""

from __future__ import annotations

import importlib

import pytest

from tools.sass import cycles
from tools.sass.cycles import MachineCode, Warp


def dump(*instructions: tuple[str, int]) -> str:
    """What cuobjdump prints of a kernel: instructions with their control bits."""
    lines = ["\tcode for sm_90a", "\t\tFunction : Loop"]
    for i, (text, bits) in enumerate(instructions):
        lines += [f"        /*{16 * i:04x}*/                   {text} ;     /* 0x{i:016x} */"]
        lines += [f"                                               /* 0x{bits:016x} */"]
    return "\n".join(lines)


def control(stall: int, board: int = 7, wait: int | None = None) -> int:
    """The bits of an instruction that sets a scoreboard, or waits for one."""
    return stall << 41 | board << 46 | 7 << 49 | (0 if wait is None else 1 << 52 << wait)


TEXT = dump(
    ("MOV R0, RZ", control(2)),
    ("LDG.E R1, desc[UR4][R2.64]", control(1, board=3)),
    ("@!P0 BRA 0x50", control(5)),
    ("FADD R4, R1, R1", control(4, wait=3)),
    ("BRA 0x10", control(5)),
    ("@P1 BRA P0, 0x0", control(5)),
    ("EXIT", control(5)),
)


def test_instructions_and_ways() -> None:
    (name,) = kernels = cycles.parsed(TEXT)
    code = kernels[name]
    assert name == "Loop for sm_90a"
    assert code.addresses == [0, 16, 32, 48, 64, 80, 96]
    assert code.find("BRA") == [2, 4, 5] and code.find("LDG") == [1]
    assert [code.stall(i) for i in range(3)] == [2, 1, 5]
    assert [code.scoreboard(i) for i in range(2)] == [7, 3]
    assert code.waits(3, 3) and not code.waits(3, 2) and not code.waits(1, 3)
    assert code.following == [[1], [2], [5, 3], [4], [1], [0, 6], []]
    assert code.shortest_way(0, [4]) == [1, 2, 3, 4]
    assert code.shortest_way(0, [6], without=[3]) == [1, 2, 5, 6]
    assert code.shortest_way(0, [6], without=[5]) is None
    assert code.shortest_way(6, [0]) is None
    assert code.shortest_loop([1], [3]) == [2, 3, 4, 1]
    assert code.shortest_loop([1]) == [2, 5, 0, 1]


def test_the_cycles_of_a_way() -> None:
    """The addition waits for the load, and not for the one before it alone."""
    (code,) = cycles.parsed(TEXT).values()
    assert cycles.cycles_of_way(code, [0, 1, 2], load=500) == 2 + 1 + 5
    assert cycles.cycles_of_way(code, [0, 1, 2, 3], load=500) == 2 + 500 + 4
    assert cycles.cycles_of_way(code, [0, 1, 2, 3], load=1) == 2 + 1 + 5 + 4
    assert cycles.cycles_of_way(code, [0, 1], until={1: 70}) == 70 + 1
    loop = code.shortest_loop([1], [3])
    assert loop is not None
    assert cycles.LOAD < cycles.cycles([Warp(code, loop)]) < cycles.LOAD + 100
    code.bits[3] = control(4)
    assert cycles.cycles([Warp(code, loop)]) < 50


@pytest.fixture(scope="module")
def foreign_loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[MachineCode, list[int]]:
    """The main loop of a matrix product of Triton's."""
    pytest.importorskip("triton", reason="a kernel of its compiler's is modelled")
    kernels = importlib.import_module("tools.emulated_gpu.tests.triton_kernels")
    signature = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "k_size": "i32"}
    signature |= dict.fromkeys(("a_row", "b_row", "c_row"), "i32")
    constants = {"M": 64, "N": 128, "K": 64, "a_column": 1, "b_column": 1}
    kernel = kernels.compiled(kernels.matmul, 90, signature, constants, num_warps=4)
    path = tmp_path_factory.mktemp("triton") / "matmul.cubin"
    path.write_bytes(kernel.asm["cubin"])
    (code,) = cycles.machine_code(path).values()
    loop = code.shortest_loop(code.find("HGMMA.*gsb0"))
    assert loop is not None
    return code, loop


def test_the_model_of_a_foreign_kernel(foreign_loop: tuple[MachineCode, list[int]]) -> None:
    """Its loop has products of 64x128x64, which take 256 cycles, and 12 copies of 16 bytes a lane.
    It has a free slot wherever it waits."""
    code, loop = foreign_loop
    texts = [code.instructions[i] for i in loop]
    assert len([text for text in texts if "HGMMA.64x128x16" in text]) == 4
    assert len([text for text in texts if "LDGSTS.E.BYPASS.128" in text]) == 12
    stalls = sum(code.stall(i) for i in loop)
    alone = cycles.cycles([Warp(code, loop)])
    assert max(stalls, 256) <= alone <= 2 * stalls
    assert alone <= cycles.cycles([Warp(code, loop) for _ in range(2)]) < 2 * alone
    assert cycles.cycles([Warp(code, loop) for _ in range(4)]) >= 4 * 256


def test_the_model_sees_a_wait(foreign_loop: tuple[MachineCode, list[int]]) -> None:
    """A load, in place of the first copy, for which the next instruction waits."""
    code, loop = foreign_loop
    planted = MachineCode()
    planted.addresses = code.addresses
    planted.instructions, planted.bits = [*code.instructions], [*code.bits]
    load = next(i for i in loop if "LDGSTS" in code.instructions[i])
    planted.instructions[load] = "LDG.E R0, desc[UR16][R18.64]"
    planted.bits[load] = code.bits[load] & ~(7 << 46) | 5 << 46
    load_alone = cycles.cycles([Warp(planted, loop)])
    planted.bits[loop[loop.index(load) + 1]] |= 1 << 52 << 5
    assert cycles.cycles([Warp(planted, loop)]) >= load_alone + cycles.LOAD / 2
