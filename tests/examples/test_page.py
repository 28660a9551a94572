"""The report of an example, in a browser."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from examples.page import Headline, Report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


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
