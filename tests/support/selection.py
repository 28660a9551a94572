"""Which tests `make test` runs, and which only `make test-all` does, by pytest's option --all.

A test with the mark `pairwise` has many sets of parameters. So many of them run that every two values of
different parameters occur together which do so in any set. A case counts as many parameters: its
traits. With `pairwise(each="case")` every value of that parameter is run, too. Tests with the mark
`nightly` are left out. The test that a mutant names as `caught_by` is always run.
"""

from __future__ import annotations

import functools
import heapq
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain, combinations, product
from typing import Any

import pytest

from tests.cases.case import Case
from tests.cases.updates import UpdateCase
from tests.cases.varlen import VarlenCase
from tests.support import mutants

everything = False  # whether --all is given

SUITES = {  # of mutants
    "test_cpu_kernel.py": "cpu",
    "test_cuda_kernel.py": "cuda",
    "test_varlen_kernel.py": "varlen_cpu",
    "test_varlen_cuda_kernel.py": "varlen_cuda",
}
Trait = tuple[str, Hashable]
AnyCase = Case | UpdateCase | VarlenCase


def select(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests of `make test`, in the same order."""
    groups: dict[str, list[pytest.Item]] = {}
    left_out = set[pytest.Item]()
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            left_out.add(item)
        elif item.get_closest_marker("pairwise") is not None:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in groups.values():
        marker = group[0].get_closest_marker("pairwise")
        assert marker is not None
        sets = {item.nodeid: item.callspec.params for item in group}  # type: ignore[attr-defined]
        chosen = pairwise(sets, **marker.kwargs)
        left_out |= {item for item in group if item.nodeid not in chosen}
    named = {
        (file, mutant.caught_by)
        for file, suite in SUITES.items()
        for mutant in mutants.SUITES[suite]
    }
    return [x for x in items if x not in left_out or (x.path.name, x.name) in named]


def pairwise(sets: Mapping[str, Mapping[str, Any]], each: str | None = None) -> set[str]:
    """The names of the chosen sets of parameters: always the set with the most pairs that no chosen
    one has, and of equals one by the checksum of its name."""
    bit_numbers: dict[Hashable, int] = {}  # of pairs

    def bits(wanted: Iterable[Hashable]) -> int:
        return functools.reduce(
            lambda mask, x: mask | 1 << bit_numbers.setdefault(x, len(bit_numbers)), wanted, 0
        )

    within = functools.cache(lambda traits: bits(combinations(traits, 2)))
    queue = []
    for name, parameters in sets.items():
        traits = [_traits(key, value) for key, value in parameters.items()]
        mask = bits(chain.from_iterable(product(*two) for two in combinations(traits, 2)))
        for parameter_traits in traits:
            mask |= within(parameter_traits)
        if each is not None:
            mask |= bits([_name(parameters[each])])
        queue.append((-mask.bit_count(), zlib.crc32(name.encode()), name, mask))
    heapq.heapify(queue)
    missing, chosen = (1 << len(bit_numbers)) - 1, set()
    while missing:
        gain, checksum, name, mask = heapq.heappop(queue)
        if (left := (mask & missing).bit_count()) < -gain:  # chosen sets have some of them
            heapq.heappush(queue, (-left, checksum, name, mask))
            continue
        chosen.add(name)
        missing &= ~mask
    return chosen


def _name(value: Any) -> Hashable:
    return getattr(value, "id", None) or getattr(value, "__name__", None) or repr(value)


@functools.cache
def _traits_of_case(case: AnyCase) -> tuple[Trait, ...]:
    return (*_traits_of_fields(case),)


def _traits(name: str, value: Any) -> tuple[Trait, ...]:
    if isinstance(value, AnyCase):
        return _traits_of_case(value)
    return ((name, _name(value)),)


def _traits_of_fields(case: AnyCase) -> Iterator[Trait]:
    """What a kernel or a backend may treat differently."""
    for field in fields(case):
        value = getattr(case, field.name)
        match field.name:
            case "id" | "num_heads":
                pass
            case "sequences":
                yield from _traits_of_sequences(value)
            case "arrays" | "options":
                yield from ((name, True) for name in value)
            case "head_size" | "value_head_size" | "own_value_head_size" if value is not None:
                yield field.name, _size(value, 16, 64, 128, 256)
                # The largest power of two in it, up to 16: how rows are aligned.
                yield f"alignment of {field.name}", value & -value & 15
            case "block_size":
                yield field.name, _size(value, 1, 15, 16, 64)
                yield "block_size is a power of two", value & (value - 1) == 0
            case "num_kv_heads":
                yield field.name, min(value, 3)
            case "num_tokens" | "num_padding" | "padding_tokens":
                yield field.name, _size(value, 0, 1, 20)
            case _ if isinstance(value, bool | str) or value is None:
                yield field.name, value
            case _:
                yield field.name, value != field.default
    if isinstance(case, Case | VarlenCase):
        yield "group", _size(case.num_heads // case.num_kv_heads, 1, 4, 8, 16)


def _traits_of_sequences(sequences: Sequence[tuple[int, int]]) -> Iterator[Trait]:
    q_lens, contexts = zip((0, 0), *sequences, strict=True)
    yield "sequences", min(len(sequences), 2)
    yield "without queries", 0 in q_lens[1:]
    yield "decode", 1 in q_lens
    yield "longest query", _size(max(q_lens), 0, 1, 16, 64)
    yield "longest context", _size(max(contexts), 0, 16, 64, 256)
    yield "more queries than keys", any(q_len > context for q_len, context in sequences)


def _size(value: int, *limits: int) -> int:
    """The number of limits that are less than a value."""
    return sum(value > limit for limit in limits)
