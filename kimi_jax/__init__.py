"""Kimi K2.6 text generation in JAX and Pallas."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_jax.llm import LLM, Result
    from kimi_jax.sampling import SamplingParams

__all__ = ["LLM", "Result", "SamplingParams"]

_HOME = {
    "LLM": "kimi_jax.llm",
    "Result": "kimi_jax.llm",
    "SamplingParams": "kimi_jax.sampling",
}


def __getattr__(name: str) -> Any:
    """Imports the public names on first use: `import kimi_jax` alone does not load JAX."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
