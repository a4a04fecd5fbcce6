"""An engine for each test."""

import pytest
from small_engine import parameters, programs, tokenizer

from kimi_jax.engine.loop import Engine


@pytest.fixture
def engine() -> Engine:
    return Engine(programs(), parameters(), tokenizer=tokenizer())
