"""Extends MkDocs: the pages of docs/ may link to files outside of it, as they do on a code hosting
site, and drawings have the colors of the scheme that the reader chose.

The README is the home page. CHANGELOG.md and CONTRIBUTING.md are pages, too. Any other file outside
of docs/ that a page names is copied to files/.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import check

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    ROOT / "README.md": "index.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside of docs/."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    pages = [*PAGES, *(Path(x.abs_src_path) for x in files if x.src_uri.endswith(".md"))]
    for path in {target for page in pages for target in _targets(page)}:
        uri = _uri(path)
        if path.is_file() and uri.startswith("files/") and uri not in files.src_uris:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lets links lead to where the files are on the site, and puts drawings into the page."""
    folder = Path(page.file.abs_src_path).parent

    def on_site(link: re.Match[str]) -> str:
        start, target, end = link.groups()
        path = (folder / target).resolve()
        if "://" in target or not path.is_relative_to(ROOT):
            return link[0]
        if start.startswith("!") and path.suffix == ".svg":
            return f"<figure>{_inline(path)}</figure>"
        if start.endswith(".md]("):  # a page that is called by its file has a title here
            start = f"[{path.read_text().splitlines()[0].removeprefix('# ')}]("
        return start + os.path.relpath(_uri(path), Path(page.file.src_uri).parent) + end

    return _LINK.sub(on_site, markdown)


def on_post_build(config: Any) -> None:
    """Refuses a site with a broken link, or with a part that a reader's browser would fetch."""
    if faults := check.faults(Path(config.site_dir)):
        raise PluginError("\n".join(["The site has faults:", *faults]))


def _targets(page: Path) -> list[Path]:
    """The files that a page links to."""
    links = [target for _, target, _ in _LINK.findall(page.read_text()) if "://" not in target]
    return [(page.parent / target).resolve() for target in links]


def _uri(path: Path) -> str:
    if path in PAGES:
        return PAGES[path]
    return (
        path.relative_to(DOCS).as_posix()
        if path.is_relative_to(DOCS)
        else f"files/{path.relative_to(ROOT).as_posix()}"
    )


def _inline(drawing: Path) -> str:
    """The drawing on one line, which Markdown leaves as it is."""
    return re.sub(r"\s*\n\s*", " ", drawing.read_text()).strip()
