"""The docstrings as Markdown. They are written to be read as they are, by help()."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

_PAGES = Path(__file__).parents[1] / "reference"
_DOCUMENTED = {
    heading or name: name
    for page in _PAGES.glob("*.md")
    for name, heading in re.findall(
        r"^::: (\S+)\n(?:    options: \{heading: ([\w.]+))?", page.read_text(), re.MULTILINE
    )
}
"""The names of what the pages show, as the heading has them, and as it is found."""
_TITLES = {"Args": "Arguments", "Example": "Example", "Raises": "Raises", "Returns": "Returns"}
_TITLES["Reference"] = "References"


class Markdown(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(docstring: str) -> str:
    """Turns sections into lists, and names of functions and pages into links."""
    title = "|".join(_TITLES)
    sections = re.split(rf"^({title})(::?)\n((?:    .*\n|\n)*(?:    .*)?)", docstring, flags=re.M)
    text = sections[0]
    for name, colons, body, rest in zip(*(iter(sections[1:]),) * 4, strict=True):
        body = textwrap.dedent(body).strip("\n")
        if name in ("Args", "Raises"):
            body = _list(body)
        elif colons == "::":
            body = textwrap.indent(body, "    ")
        text = f"{text.rstrip()}\n\n**{_TITLES[name]}**\n\n{body}\n\n{rest.lstrip()}"
    return _links(re.sub(r"::\n", ":\n", text))


def _list(entries: str) -> str:
    """Each entry begins with its names and a colon; its other lines are indented."""
    lines = []
    for entry in re.split(r"\n(?=\S)", entries):
        names, _, text = entry.partition(": ")
        names = ", ".join(f"`{name.strip()}`" for name in names.split(","))
        lines.append(f"- {names}: {' '.join(text.split())}")
    return "\n".join(lines)


def _links(text: str) -> str:
    def function(name: re.Match[str]) -> str:
        target = _DOCUMENTED.get(name[1])
        return f"[`{name[1]}`][{target}]" if target else name[0]

    text = re.sub(r"``([\w.]+)``", function, text)
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", text)
