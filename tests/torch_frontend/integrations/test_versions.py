"""What an integration says where its library is missing or has another version."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tests.support import scripts
from torch_frontend.integrations._versions import require


@pytest.mark.parametrize("version", ["5.22.1", "5.2.3", "5.24.0", "6.0"])
def test_refuses_another_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
    with pytest.raises(
        ImportError, match=rf"was tried with transformers 5\.23 only; got {version}"
    ):
        require("transformers", "5.23")


@pytest.mark.parametrize("version", ["5.23.0", "5.23.1", "5.23"])
def test_accepts_what_was_tried(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
    require("transformers", "5.23")


def test_names_what_is_not_installed() -> None:
    with pytest.raises(ImportError, match=r"needs no-such-library, which is not installed: pip"):
        require("no-such-library", "1")


def test_the_packages_import_neither_library() -> None:
    script = "import sys, torch_frontend; print({'transformers', 'torchax'} & {*sys.modules})"
    result = scripts.run(script)
    assert result.stdout == "set()\n", result.stderr
