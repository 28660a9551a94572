"""Checks a built site: ``python docs/site/check.py build/site``.

Every link within the site leads to a file, and to a place in it if it names one. No page or style
sheet fetches anything from elsewhere. A link that a reader may click can lead anywhere.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FETCHED = {"script", "img", "source", "iframe", "video", "audio", "embed", "object", "use"}


class _Page(HTMLParser):
    """The places and the links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, bool]] = []
        """With whether the browser fetches it by itself."""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given and tag != "meta"}
        # A canonical address or another version is named, not fetched.
        is_named = tag == "link" and given.get("rel") in ("canonical", "prev", "next", "alternate")
        is_fetched = tag in _FETCHED or (tag == "link" and not is_named)
        for name in ("href", "src", "srcset", "data", "poster", "xlink:href"):
            if name in given:
                self.links.append((given[name], is_fetched))
        self.links += [(url, True) for url in _urls(given.get("style", ""))]


def _urls(css: str) -> list[str]:
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", css)
    return [of_url or of_import for of_url, of_import in found]


def faults(site: Path) -> list[str]:
    """Returns a line for each fault."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    links = [(path, *link) for path, page in pages.items() for link in page.links]
    for path in sorted(site.rglob("*.css")):
        links += [(path, url, True) for url in _urls(path.read_text())]
    found = []
    for path, link, is_fetched in links:
        parts = urlsplit(link)
        if parts.scheme == "data":
            continue
        if parts.scheme or parts.netloc:
            if is_fetched:
                found.append(f"{path.relative_to(site)} fetches {link}")
            continue
        # 404.html may be shown at any address, so its links start at the root.
        folder = site if parts.path.startswith("/") else path.parent
        target = (folder / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
        if target.is_dir():
            target /= "index.html"
        if not target.is_file():
            found.append(f"{path.relative_to(site)} links to {link}, which is no file")
        elif (
            parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids
        ):
            found.append(f"{path.relative_to(site)} links to {link}, which is no place there")
    return [*dict.fromkeys(found)]


if __name__ == "__main__":
    lines = faults(Path(sys.argv[1]).resolve())
    print(*lines, sep="\n")
    sys.exit(bool(lines))
