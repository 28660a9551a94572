"""A model of the cycles that loops of a Hopper kernel take, from its machine code.

``python -m tools.sass.cycles OBJECT...`` prints it for the turns of prefill kernels. No GPU is
needed. The model is a quarter of a multiprocessor, whose warps execute the instructions of their
loops in order, as the control codes in the machine code say: how many cycles the next instruction
waits, and for which scoreboards. It knows how many cycles the units take, but not caches, conflicts
in shared memory or the fetch of instructions. Two numbers are estimates: PORTS, and COPY. It orders
variants of a kernel more surely than it gives their cycles.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

# How much longer arithmetic takes while products run, which read registers, too.
PORTS = (1.5, 2.0)
LOAD, COPY = 700, 800  # cycles from global memory to a register, or to shared memory
QUEUE = 6  # products that have been issued and have not ended
MIO_QUEUE = 40  # cycles that the unit for memory and barriers may be behind
MIO_LATENCY, CONSTANT, RESULT, EXPONENTIAL = 28, 40, 14, 26
BARRIERS = {"MEMBAR": 30, "FENCE": 20}  # cycles that the warp waits


class MachineCode:
    """The instructions of a kernel in their order."""

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.instructions: list[str] = []
        self.bits: list[int] = []  # the upper half of an instruction

    def find(self, pattern: str) -> list[int]:
        """The instructions in which the pattern is found."""
        return [i for i, text in enumerate(self.instructions) if re.search(pattern, text)]

    def barrier(self, i: int) -> str:
        """The barrier in shared memory, less the register with the stage, of an instruction."""
        found = re.search(r"0x[0-9a-f]+(?=\])", self.instructions[i])
        return found[0] if found else ""

    def stall(self, i: int) -> int:
        """The cycles before the warp's next instruction."""
        return max(1, self.bits[i] >> 41 & 15)

    def scoreboard(self, i: int) -> int:
        """The scoreboard that tells when a load is complete. 7: none."""
        return self.bits[i] >> 46 & 7

    def read_scoreboard(self, i: int) -> int:
        """The scoreboard that tells when the operands have been read. 7: none."""
        return self.bits[i] >> 49 & 7

    def waits(self, i: int, scoreboard: int) -> bool:
        """Whether an instruction waits for a scoreboard."""
        return self.bits[i] >> 52 >> scoreboard & 1 == 1

    @cached_property
    def following(self) -> list[list[int]]:
        """The instructions that may come after each one. A call comes back."""
        places = {address: i for i, address in enumerate(self.addresses)}
        following = []
        for i, text in enumerate(self.instructions):
            words = text.split()
            is_guarded = words[0].startswith("@")
            name, *operands = words[is_guarded:]
            after = []
            if name.startswith("BRA"):
                after.append(places[int(operands[-1], 16)])
                is_guarded |= len(operands) > 1
            if is_guarded or not name.startswith(("BRA", "EXIT", "RET")):
                after.append(i + 1)
            following.append([n for n in after if n < len(self.addresses)])
        return following

    def shortest_way(
        self, start: int, goals: Iterable[int], without: Container[int] = ()
    ) -> list[int] | None:
        """The instructions after `start` up to the nearest of the goals. None: there is no way."""
        before: dict[int, int] = {}
        ends = [start]
        goals = {*goals}
        while ends:
            behind = []
            for i in ends:
                for n in self.following[i]:
                    if n in before or n in without:
                        continue
                    before[n] = i
                    behind.append(n)
                    if n in goals:
                        way = [n]
                        while before[way[-1]] != start:
                            way.append(before[way[-1]])
                        return way[::-1]
            ends = behind
        return None

    def shortest_loop(self, *marks: Sequence[int]) -> list[int] | None:
        """The shortest loop through one instruction of each mark, in this order."""
        loops = []
        for start in marks[0]:
            loop: list[int] = []
            at = start
            for goals in [*marks[1:], [start]]:
                way = self.shortest_way(at, goals)
                if way is None:
                    break
                loop += way
                at = loop[-1]
            else:
                loops.append(loop)
        return min(loops, key=len, default=None)


def machine_code(path: Path) -> dict[str, MachineCode]:
    """The kernels of an object, by their names and GPUs. It needs cuobjdump: that beside this
    Python's packages (the dependency group test has it), or else the one on PATH."""
    tools = [Path(x, "nvidia/cu13/bin") for x in sys.path]
    places = [str(x) for x in tools if (x / "cuobjdump").exists()]
    environment = os.environ | {"PATH": os.pathsep.join([*places, os.environ["PATH"]])}
    command = ["cuobjdump", "--dump-sass", str(path)]  # it calls nvdisasm
    return parsed(
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    )


def parsed(text: str) -> dict[str, MachineCode]:
    """The kernels in what cuobjdump prints."""
    kernels: dict[str, MachineCode] = defaultdict(MachineCode)
    kernel = target = ""
    for line in text.splitlines():
        if found := re.match(r"\s+code for (sm_\w+)", line):
            target = found[1]
        elif found := re.match(r"\s+Function : (\S+)", line):
            kernel = f"{found[1]} for {target}"
        elif found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*; ", line):
            kernels[kernel].addresses.append(int(found[1], 16))
            kernels[kernel].instructions.append(found[2])
        elif (found := re.match(r"\s+/\* (0x[0-9a-f]{16}) \*/$", line)) and kernel:
            kernels[kernel].bits.append(int(found[1], 16))
    return kernels


def name_of(instruction: str) -> str:
    """``@!P0 FADD.FTZ R1, ...``: FADD.FTZ."""
    words = instruction.split()
    return words[words[0].startswith("@")]


UNITS = {
    "mufu": "MUFU",
    "fma": "FFMA FADD FMUL IMAD",
    "alu": "FMNMX FSETP ISETP LOP3 SEL PRMT VIADD LEA SHF VIMNMX VIADDMNMX F2FP FSEL PLOP3 IADD3"
    " R2UR MOV I2F F2I HADD2 HMUL2 HFMA2 VOTE",
    "mio": "LDS STS SHFL SYNCS BAR MEMBAR FENCE LDC ARRIVES LDGSTS LDG STG S2R REDUX UTMALDG",
    "products": "HGMMA",
}
UNIT_OF = {name: unit for unit, names in UNITS.items() for name in names.split()}


def cycles_of(instruction: str) -> int:
    """The cycles that an instruction of a warp takes of its unit. The four quarters share the unit
    for memory: each 16 bytes of a lane take 16 cycles."""
    name, *modifiers = name_of(instruction).split(".")
    unit = UNIT_OF.get(name)
    if unit == "products":
        found = re.search(r"\.\d+x(\d+)x\d+", instruction)
        assert found is not None, instruction
        return int(found[1]) // 2
    if name in ("LDGSTS", "LDG", "LDS", "STS", "STG"):
        return 16 if "128" in modifiers else 4
    return {"mufu": 8, "fma": 2 if name == "IMAD" else 1}.get(unit or "", 2)


def cycles_of_way(
    code: MachineCode, way: Sequence[int], load: float = LOAD, until: Mapping[int, float] = {}
) -> float:
    """When a warp that is alone has issued these instructions, one after the other.

    Args:
        load: the cycles of a load from global memory.
        until: the instructions at which it waits for others, and when these are there.
    """
    now, boards = 0.0, [0.0] * 8
    for i in way:
        now = max([now, until.get(i, 0), *(boards[b] for b in range(6) if code.waits(i, b))])
        name = name_of(code.instructions[i]).split(".")[0]
        unit = UNIT_OF.get(name)
        result: float = {"mufu": EXPONENTIAL, "mio": MIO_LATENCY}.get(unit or "", RESULT)
        result = {"LDG": load, "LDC": CONSTANT}.get(name, result)
        board, read = code.scoreboard(i), code.read_scoreboard(i)
        boards[board] = max(boards[board], now + result)
        boards[read] = max(boards[read], now + RESULT)
        now += code.stall(i)
    return now


@dataclass(eq=False)
class Warp:
    """A warp that executes a loop again and again."""

    code: MachineCode
    loop: list[int]
    # Turns between what it waits for and what the others do: a place that is filled again was
    # freed as many turns before as there are places.
    lag: int = 0
    at: int = 0
    turn: int = 0
    next: float = 0
    syncs: int = 0
    ends: list[float] = field(default_factory=list)  # of its turns
    boards: list[float] = field(default_factory=lambda: [0.0] * 8)
    groups: deque[float] = field(default_factory=deque)  # when their products are complete
    arrivals: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @cached_property
    def arrives(self) -> Counter[str]:
        """The barriers that it arrives at, and how often in a turn."""
        return self._barriers("SYNCS.ARRIVE", "ARRIVES")

    @cached_property
    def waits(self) -> Counter[str]:
        """The barriers that it waits at."""
        return self._barriers("SYNCS.PHASECHK")

    @cached_property
    def copies(self) -> bool:
        """Whether a barrier counts the bytes of its tensor copies."""
        return any("UTMALDG" in self.code.instructions[i] for i in self.loop)

    def _barriers(self, *names: str) -> Counter[str]:
        code = self.code
        found = [i for i in self.loop if name_of(code.instructions[i]).startswith(names)]
        return Counter(code.barrier(i) for i in found)

    def arrival(self, barrier: str, turn: int) -> float:
        """When its arrivals of a turn are complete. Infinite: it has not got there."""
        done, last = self.arrivals[barrier], (turn + 1) * self.arrives[barrier] - 1
        return done[last] if last < len(done) else math.inf


def cycles(warps: Sequence[Warp], ports: float = PORTS[0], turns: int = 24) -> float:
    """The cycles of a turn of the first warp, when all run together. Warps with a BAR.ARV pass the
    turn on, and wait for their next one at BAR.SYNC. Other warps pass a BAR.SYNC."""
    takers = [w for w in warps if any("BAR.ARV" in w.code.instructions[i] for i in w.loop)]
    tokens = [[0.0] if n == 0 else [] for n in range(len(takers))]
    free: dict[str, float] = defaultdict(float)
    products: deque[float] = deque()
    now = 0.0

    def blocked_until(w: Warp, text: str, i: int) -> float:
        """When the warp may issue its next instruction. Infinite: when others have done more."""
        name = name_of(text)
        when = max([w.next, *(w.boards[b] for b in range(6) if w.code.waits(i, b))])
        unit = UNIT_OF.get(name.split(".")[0])
        if unit == "products":
            when = max(when, products[-QUEUE] if len(products) >= QUEUE else 0)
        elif unit is not None:
            when = max(when, free[unit] - (MIO_QUEUE if unit == "mio" else 0))
        if name.startswith("SYNCS.PHASECHK"):
            turn, barrier = w.turn - w.lag, w.code.barrier(i)
            for other in warps:
                if other is w or barrier not in other.arrives or turn < 0:
                    continue
                when = max(when, other.arrival(barrier, turn))
        elif name.startswith("BAR.SYNC") and w in takers:
            mine = tokens[takers.index(w)]
            when = max(when, mine[w.syncs] if w.syncs < len(mine) else math.inf)
        elif found := re.search(r"DEPBAR\.LE gsb0, (0x\d+)", text):
            pending = int(found[1], 16)
            if len(w.groups) > pending:
                when = max(when, w.groups[-1 - pending])
        return when

    def issue(w: Warp, text: str, i: int) -> None:
        name = name_of(text)
        unit, cost = UNIT_OF.get(name.split(".")[0]), float(cycles_of(text))
        w.next = now + w.code.stall(i)
        done = now + RESULT
        read = now + RESULT / 2
        if unit == "products":
            start = max(now + 4, products[-1] if products else 0)
            products.append(start + cost)
            if "gsb0" in text:
                w.groups.append(start + cost + 56)
        elif unit == "mio":
            start = max(now, free[unit])
            free[unit] = start + cost
            done, read = start + cost + MIO_LATENCY, start + cost + 4
            w.next = max(w.next, start + BARRIERS.get(name.split(".")[0], 0))
            if name.startswith("LDG."):
                done = start + LOAD
            elif name.startswith("LDC"):
                done = now + CONSTANT
            elif name.startswith(("SYNCS.ARRIVE", "ARRIVES")):
                copies = COPY if name.startswith("ARRIVES") or w.copies else 0
                w.arrivals[w.code.barrier(i)].append(done + copies)
            elif name.startswith("BAR.SYNC"):
                w.syncs += 1
            elif name.startswith("BAR.ARV"):
                tokens[(takers.index(w) + 1) % len(takers)].append(done)
        elif unit is not None:
            if unit in ("fma", "alu") and products and products[-1] > now:
                cost *= ports
                w.next = max(w.next, now + cost)
            free[unit] = max(free[unit], now) + cost
            done = now + (EXPONENTIAL if unit == "mufu" else RESULT)
        w.boards[w.code.scoreboard(i)] = max(w.boards[w.code.scoreboard(i)], done)
        w.boards[w.code.read_scoreboard(i)] = max(w.boards[w.code.read_scoreboard(i)], read)
        w.at += 1
        if w.at == len(w.loop):
            w.at, w.turn = 0, w.turn + 1
            w.ends.append(now)

    while warps[0].turn < turns:
        ready = []
        for w in warps:
            i = w.loop[w.at]
            ready.append((blocked_until(w, w.code.instructions[i], i), w.next))
        when, _ = min(ready)
        assert when < math.inf, "all warps wait"
        now = max(now, when)
        # The warp that has waited longest issues.
        _, n = min((since, n) for n, (at, since) in enumerate(ready) if at <= now)
        w = warps[n]
        issue(w, w.code.instructions[w.loop[w.at]], w.loop[w.at])
        now += 1
    half = turns // 2
    return (warps[0].ends[-1] - warps[0].ends[half]) / (turns - 1 - half)


def turns_of(code: MachineCode, without: str = "$^") -> list[list[int]]:
    """The turns of a consumer of the prefill kernel, from a wait for logits to the next one. The
    first is the plain one, where there is one. The last is for tiles that are masked.

    Args:
        without: a pattern of instructions that no turn may have.
    """
    left_out = {*code.find(without)}
    waits = code.find("DEPBAR.LE gsb0, 0x1")
    ways = [code.shortest_way(wait, [wait], left_out) for wait in waits]
    return sorted((way for way in ways if way), key=len)


# What copies KV tiles: the threads of the producer, or tensor copies.
THREADS, BOXES = r"LDGSTS\.E|STS\.128", "UTMALDG"


def prefill_warps(code: MachineCode, turn: list[int], stages: int, by: str = THREADS) -> list[Warp]:
    """Two consumers, and the producer: the loop with the most copies."""
    copies = {*code.find(by)}
    loops = [loop for copy in copies if (loop := code.shortest_loop([copy]))]
    loop = max(loops, key=lambda x: (len(copies & {*x}), -len(x)))
    # The shortest way leaves out what one lane does alone.
    if by == BOXES:
        through = [[x] for x in sorted(copies & {*loop})]
        for copy in sorted(copies - {*loop}):
            longer = code.shortest_loop(*sorted([*through, [copy]]))
            if longer is not None and len(longer) < 1.5 * len(loop):
                loop, through = longer, sorted([*through, [copy]])
    producer = Warp(code, loop, lag=stages)
    marks = [[turn[-1]]]
    for barrier in sorted({*producer.waits} - {*Warp(code, turn).arrives}):
        arrivals = [i for i in code.find(r"SYNCS\.ARRIVE") if code.barrier(i) == barrier]
        marks += [arrivals] if code.shortest_loop(marks[0], arrivals) else []
    turn = (code.shortest_loop(*marks) if len(marks) > 1 else None) or turn
    return [Warp(code, turn), Warp(code, turn), producer]


def main() -> None:
    """The command: see above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objects", nargs="+", type=Path, help="objects with a prefill kernel")
    parser.add_argument("--stages", type=int, default=3, help="KV tiles in shared memory")
    options = parser.parse_args()
    for path in options.objects:
        for name, code in machine_code(path).items():
            print(path.name, name)
            turns = [(turn, THREADS) for turn in turns_of(code)]
            if code.find(BOXES):
                turns += [(turn, BOXES) for turn in turns_of(code, "MEMBAR")]
            for turn, by in turns:
                warps = [prefill_warps(code, turn, options.stages, by) for _ in PORTS]
                found = [round(cycles(*arguments)) for arguments in zip(warps, PORTS, strict=True)]
                counts = [len(warp.loop) for warp in warps[0][1:]]
                print(f"  {found[0]} to {found[1]} cycles a turn of {counts[0]} instructions;")
                print(f"  the producer's has {counts[1]}, with {by}")


if __name__ == "__main__":
    main()
