"""The tests of the tools. `pytest tools` runs all, `make test` a share: see tests/conftest.py."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Makes a mark known that tests/conftest.py reads."""
    config.addinivalue_line("markers", "pairwise: make test runs some sets of parameters")
