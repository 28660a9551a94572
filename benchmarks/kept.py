"""Results as JSON with one row a line, so that a change of a row is a change of a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def _has_rows(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_rows, value.values()))
    return isinstance(value, list) and any(isinstance(x, Mapping) for x in value)


def by_row(results: Mapping[str, Any]) -> str:
    """The JSON. Each key has a line, or a line for each row of its list."""
    return _text(results, "") + "\n"


def _text(value: Any, indent: str) -> str:
    if not indent or _has_rows(value):
        inner = f"{indent} "
        lines: Iterable[str]
        if isinstance(value, Mapping):
            begin, end = "{", "}"
            lines = (f"{json.dumps(key)}: {_text(x, inner)}" for key, x in value.items())
        else:
            begin, end = "[", "]"
            lines = map(json.dumps, value)
        content = f",\n{inner}".join(lines)
        return f"{begin}\n{inner}{content}\n{indent}{end}"
    return json.dumps(value)
