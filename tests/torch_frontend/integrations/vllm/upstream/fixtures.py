"""The conftest of vLLM's own tests: theirs needs more than is installed."""

import pytest


@pytest.fixture
def default_vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config  # noqa: PLC0415

    with set_current_vllm_config(VllmConfig()):
        yield


def pytest_addoption(parser):
    parser.addoption("--every", type=int, default=1, help="run each n-th test only")


def pytest_collection_modifyitems(config, items):
    items[:] = items[:: config.getoption("--every")]
