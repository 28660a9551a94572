"""The documentation's site, as `make docs` builds it, opened from its folder and over HTTP."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from examples.page import Headline, Report

ROOT = Path(__file__).parents[1]
MKDOCS = Path(f"{sys.prefix}-docs/bin/mkdocs")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)

BROKEN_IMAGES = "[...document.images].filter(x => x.complete && !x.naturalWidth).map(x => x.src)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not MKDOCS.exists():
        pytest.skip("make docs has not installed mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [MKDOCS, "build", "--strict", "--quiet", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return folder


class Page(HTMLParser):
    """The links of a page, what it loads, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.found: dict[str, set[str]] = defaultdict(set)
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value and name in ("id", "name", "href", "src"):
                self.found["load" if tag == "link" or name == "src" else name].add(value)


def test_links_lead_to_files_and_anchors(site: Path) -> None:
    """A browser shows a folder of files as a list, and index.html only over HTTP."""
    # A server shows 404.html at any address, so its links begin at the root.
    pages = {x: Page(x).found for x in site.rglob("*.html") if x.name != "404.html"}
    assert len(pages) > 20
    broken, foreign = [], []
    for page, found in pages.items():
        foreign += [x for x in found["load"] if urlsplit(x).netloc]
        for link in found["href"] | found["load"]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchors = pages.get(target, {})
            has_anchor = not parts.fragment or any(
                unquote(parts.fragment) in anchors[x] for x in ("id", "name") if anchors
            )
            if not target.is_file() or not has_anchor:
                broken.append((page.name, link))
    assert broken == []
    assert foreign == [], "a reader's browser fetches nothing from elsewhere"


@pytest.fixture(params=["file", "http"])
def address(site: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the site begins."""
    if request.param == "file":
        yield site.as_uri()
        return

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_comment_ends_no_list(site: Path) -> None:
    shown = (site / "index.html").read_text()
    (items,) = re.findall(r"<p>Use something else</p>(.*?)<p>On two CPU cores", shown, re.DOTALL)
    assert items.count("<ul>") == items.count("</ul>") == 1 and items.strip().endswith("</ul>")


def test_a_report_in_dark_mode_and_on_a_phone(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("Chromium is optional")
    columns = ["backend", "tokens/s", "programs compiled", "difference to first", "equal answers"]
    report = Report(
        *("title", "run", [Headline("a label of many words", "good", True)]),
        rows=[columns, ["x" * 12] * len(columns)],
        legend="words " * 50,
        summary="words " * 50,
        calls={"jax": {"operand " * 20 + "x" * 99: "1 times:"}},
        plots=[lambda axes: axes.set_title("of a plot")],
        conversation=[("a list", "1. one\n2. two\n\n")],
    )
    report.to_html(tmp_path / "report.html")
    found = {}
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        for scheme in ("light", "dark"):
            size = {"width": 390, "height": 900}
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.goto((tmp_path / "report.html").as_uri())
            page.locator("summary").click()
            assert page.inner_text("dd") == "1. one\n2. two"
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            parts = "[...document.querySelectorAll('dl, table, pre, p, section')]"
            assert page.evaluate(f"Math.max(...{parts}.map(x => x.scrollWidth))") <= 390
            body, cell, text = (
                page.evaluate(f"getComputedStyle(document.querySelector('{x}')).{color}")
                for x, color in (("body", "backgroundColor"), ("p", "color"), ("svg text", "fill"))
            )
            assert cell == text != body
            found[scheme] = body, cell
        browser.close()
    assert sum(map(int, re.findall(r"\d+", found["dark"][0]))) < 150
    assert found["light"] != found["dark"]


def test_reading_in_a_browser(site: Path, address: str) -> None:
    """A reader follows a link and searches; from the folder, opens each page on a screen and on a
    phone."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("Chromium is optional")
    problems: list[str] = []
    left = lambda request: request.failure == "net::ERR_ABORTED"  # for the next page
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("console", lambda message: problems.append(f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
        page.on("requestfailed", lambda x: left(x) or problems.append(f"failed: {x.url}"))
        page.on(
            "request",
            lambda x: (
                x.url.startswith((address, "data:")) or problems.append(f"elsewhere: {x.url}")
            ),
        )

        page.goto(f"{address}/index.html")
        page.get_by_role("link", name="Getting started").first.click()
        page.wait_for_url("**/getting-started.html")
        page.locator(".md-search__input").click()
        page.keyboard.type("fp8")
        result = page.locator(".md-search-result__link[href*=caches]").first
        result.wait_for()
        result.click()
        page.wait_for_url("**/features/caches.html*")

        pages = [x.relative_to(site) for x in site.rglob("*.html") if x.name != "404.html"]
        for width in (1280, 390) if address.startswith("file:") else ():
            page.set_viewport_size({"width": width, "height": 900})
            for path in pages:
                page.goto(f"{address}/{path}")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
                assert page.evaluate(BROKEN_IMAGES) == [], path
        browser.close()
    assert problems == []
