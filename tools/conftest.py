"""Marks of the tools' tests, which `pytest tools` runs in full. tests/conftest.py selects of them."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pairwise: make test runs some sets of parameters")
