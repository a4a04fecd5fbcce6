"""Settings for every test."""

import os

import pytest
from hypothesis import settings

# An example's time says nothing here: the first one compiles, and test machines are shared.
settings.register_profile("kimi_jax", deadline=None)
settings.load_profile("kimi_jax")


def pytest_addoption(parser):
    parser.addoption(
        "--full", action="store_true", help="run the long checks at their full size (an hour)"
    )


@pytest.fixture(scope="session")
def full(request) -> bool:
    """Whether long checks run at full size; without it they run smaller, none is left out."""
    return request.config.getoption("--full")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Compiled programs are kept for the session, apart from the user's; processes share them."""
    os.environ["KIMI_JAX_COMPILATION_CACHE"] = str(tmp_path_factory.getbasetemp() / "xla")
