"""The trials of a campaign: a call, and the wrong values that a corrupt one has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.arrays import CODES
from harness.layouts import LATENT_LAYOUTS, LAYOUTS, SEPARATE_LAYOUTS
from tests.cases.case import Case, Groups
from tests.cases.updates import UpdateCase
from tests.cases.varlen import VarlenCase

FAMILIES = ("valid", "corrupt", "handler")
_POISON = 127  # the least magnitude of what must not be read
_SIZES = ("head_size", "block_size", "num_tokens", "num_padding", "padding_seqs")
_SIZES += ("padding_blocks", "padding_tokens", "unused_blocks", "first_token", "padding")

_CASES = {"paged_attention": Case, "kv_cache_update": UpdateCase, "varlen_attention": VarlenCase}
AnyCase = Case | UpdateCase | VarlenCase


@dataclass(frozen=True)
class Change:
    """A value in place of another: of an entry of an array, or with no index of a number."""

    name: str
    value: int | float
    index: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trial:
    """A call for all backends. Without changes it is valid."""

    case: AnyCase
    changes: tuple[Change, ...] = ()
    handler_only: bool = False  # the changes are of the attributes of the handler's call
    more_columns: int = 0  # how much wider the rows are that hold queries, or keys and values

    @property
    def op(self) -> str:
        return next(op for op, kind in _CASES.items() if isinstance(self.case, kind))

    def arguments(self) -> tuple[Any, dict[str, Any]]:
        """The operands and the keyword arguments, with the changes. A trial with changes has no NaN
        and no infinity: a changed table may name any block of the pool."""
        inputs, attributes = self.case.inputs(), self.case.attributes()
        if self.changes:
            inputs = inputs._replace(**_finite(inputs._asdict()))
            attributes = _finite(attributes)
        if not self.handler_only:
            arrays = inputs._asdict() | attributes
            for change in self.changes:
                if change.index is not None:
                    arrays[change.name][change.index] = change.value
                else:
                    attributes[change.name] = change.value
        return inputs, attributes

    def handler_attributes(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of a checked call, with the changes."""
        changed = {change.name: change.value for change in self.changes if self.handler_only}
        return {**attributes, **changed}

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op} | asdict(self)


def _finite(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays, with 0.5 or 0 in place of NaN, infinity, and what they become in 8 bits."""
    return {
        name: np.where(np.abs(x.astype(np.float32)) < _POISON, x, x.dtype.type(0.5))
        if isinstance(x, np.ndarray) and (x.dtype.kind in "fV" or x.dtype == np.int8)
        else x
        for name, x in arrays.items()
    }


def save(trial: Trial, path: Path, **notes: Any) -> None:
    """Writes a trial to a file, with notes for the reader."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notes | trial.as_json(), indent=2) + "\n")


def load(path: Path) -> dict[str, Trial]:
    """Reads what `save` wrote, or several such trials by name."""
    found = json.loads(path.read_text())
    trials = {path.stem: found} if "op" in found else found
    return {name: _from_json(trial) for name, trial in trials.items()}


def _from_json(found: dict[str, Any]) -> Trial:
    case_fields = found["case"]
    if found["op"] == "paged_attention":
        case_fields["sequences"] = tuple(map(tuple, case_fields["sequences"]))
    for name in (
        "num_seqs_shape",
        "made_scales",
        "norm_options",
        "lengths",
        "arrays",
        "prefix_seqs",
    ):
        if name in case_fields:
            case_fields[name] = tuple(case_fields[name])
    if case_fields.get("groups"):
        groups = case_fields["groups"]
        case_fields["groups"] = Groups(**groups | {"of": tuple(groups["of"])})
    case: Any = _CASES[found["op"]](**case_fields)
    changes = tuple(
        Change(x["name"], x["value"], None if x["index"] is None else tuple(x["index"]))
        for x in found["changes"]
    )
    return Trial(case, changes, found["handler_only"], found.get("more_columns", 0))


def is_consistent(trial: Trial) -> bool:
    """Whether the case itself, without the changes, obeys the contract."""
    case = trial.case
    if isinstance(case, VarlenCase):
        longest = max([0, *case.lengths])
        return longest <= case.options.get("max_query_len", longest)
    if case.scales is not None and case.cache_dtype is None:
        return False
    dtypes = (case.cache_dtype, case.value_cache_dtype or case.cache_dtype)
    sizes = (case.head_size, case.own_value_head_size or case.head_size)
    if any(x in CODES and size % 2 != 0 for x, size in zip(dtypes, sizes, strict=True)):
        return False
    if case.groups is not None and case.cache_dtype is None:
        return False
    if case.groups is not None and any(size % case.groups.size != 0 for size in sizes):
        return False
    if dtypes[0] != dtypes[1] and (
        {*dtypes} not in ({"int8", x} for x in CODES) or case.kv_layout not in SEPARATE_LAYOUTS
    ):
        return False
    is_latent = case.is_latent if isinstance(case, UpdateCase) else case.value_head_size is not None
    layouts = LATENT_LAYOUTS if is_latent else LAYOUTS
    if case.kv_layout not in (None, *layouts):
        return False
    columns = case.own_value_head_size
    if columns is not None and (
        is_latent or case.kv_layout not in SEPARATE_LAYOUTS or columns > case.head_size
    ):
        return False
    if is_latent and case.num_kv_heads > 1 and "h" not in (case.kv_layout or ""):
        return False
    if isinstance(case, UpdateCase):
        if case.made_scales and (
            case.cache_dtype is None or (is_latent and "v_scale" in case.made_scales)
        ):
            return False
        is_rotated = case.rotary_dim is not None
        if is_rotated and (is_latent or not 2 <= case.rotary_dim <= case.head_size):
            return False
        if is_rotated and (case.rotary_dim % 2 != 0 or case.num_heads % case.num_kv_heads != 0):
            return False
        if is_rotated and case.table_dtype not in ("float32", case.dtype):
            return False
        has_queries = is_rotated or case.norm is not None or "k" in (case.hadamard or "")
        if case.num_heads and not has_queries:
            return False
        if case.has_signs and (
            case.hadamard is None
            or ("v" in case.hadamard and columns not in (None, case.head_size))
        ):
            return False
        if "norm_after_rope" in case.norm_options and not (is_rotated and case.norm == "per head"):
            return False
        if case.hadamard and is_latent:
            return False
        if (case.norm or case.v_norm) and (
            is_latent or case.norm_dtype not in ("float32", case.dtype)
        ):
            return False
        if case.norm_options and case.norm is None:
            return False
        return case.num_padding <= case.num_tokens
    if case.causal and (case.window_right is not None or case.causal_seqs):
        return False
    if any(q > context and case.is_causal(s) for s, (q, context) in enumerate(case.sequences)):
        return False
    if case.value_head_size is not None and case.value_head_size > case.head_size:
        return False
    longest = max([0, *(q_len for q_len, _ in case.sequences)])
    return case.max_query_len is None or case.max_query_len >= longest


def simpler(trial: Trial) -> list[Trial]:
    """Trials that differ from one in being simpler, the largest steps first."""
    found = [
        replace(trial, changes=trial.changes[:i] + trial.changes[i + 1 :])
        for i in range(len(trial.changes))
        if len(trial.changes) > 1
    ]
    if trial.more_columns:
        found += [replace(trial, more_columns=0)]
    case = trial.case
    cases: list[Any] = []
    if isinstance(case, Case):
        for i, (q_len, context) in enumerate(case.sequences):
            before, after = case.sequences[:i], case.sequences[i + 1 :]
            cases.append(replace(case, sequences=before + after))
            for smaller in ((q_len // 2, context), (q_len, context // 2), (q_len, context - 1)):
                if min(smaller) >= 0 and smaller != (q_len, context):
                    cases.append(replace(case, sequences=(*before, smaller, *after)))
            if q_len > 0:
                cases.append(replace(case, sequences=(*before, (q_len - 1, context), *after)))
        if case.num_heads > case.num_kv_heads:
            cases.append(replace(case, num_heads=case.num_kv_heads))
    elif isinstance(case, VarlenCase):
        for i, length in enumerate(case.lengths):
            before, after = case.lengths[:i], case.lengths[i + 1 :]
            shorter = [(x,) for x in (length // 2, length - 1) if 0 <= x < length]
            cases += [replace(case, lengths=before + x + after) for x in ((), *shorter)]
        for name in case.options:
            fewer = {key: x for key, x in case.options.items() if key != name}
            cases.append(replace(case, options=fewer))
    if case.num_kv_heads > 1:
        heads = {}
        if not isinstance(case, UpdateCase):
            heads = {"num_heads": case.num_heads // case.num_kv_heads}
        cases.append(replace(case, num_kv_heads=1, **heads))
    plain: Any = Case("", ()) if isinstance(case, Case) else type(case)("")
    for field in fields(case):
        value, usual = getattr(case, field.name), getattr(plain, field.name)
        if field.name in ("id", "sequences", "lengths", "options", "num_heads", "num_kv_heads"):
            continue
        if field.name not in _SIZES:
            if value != usual:
                cases.append(replace(case, **{field.name: usual}))
            continue
        least = 0 if "padding" in field.name or "unused" in field.name else 1
        for smaller_value in (least, value // 2, value - 1):
            if least <= smaller_value < value:
                cases.append(replace(case, **{field.name: smaller_value}))
    found += [replace(trial, case=simpler_case) for simpler_case in cases]
    return [x for x in found if is_consistent(x)]
