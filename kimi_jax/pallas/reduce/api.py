"""Sums over devices: the one place where a step's partial results meet.

To be called inside `jax.shard_map`. Every implementation leaves the same bits on every device, so
that what follows from a sum (a route, a draw, a tree) is the same everywhere.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from kimi_jax.pallas.reduce import reference

Implementation = Literal["auto", "psum", "reference", "mosaic"]


def choose(implementation: Implementation = "auto") -> str:
    """The implementation that will run: "psum" (XLA's all-reduce) unless another is named.

    Raises NotImplementedError for a named one that does not exist: nothing falls back in silence.
    """
    if implementation in ("auto", "psum"):
        return "psum"
    if implementation == "reference":
        return "reference"
    raise NotImplementedError(
        f"reduce: implementation={implementation!r} does not exist; use 'auto', 'psum' or "
        "'reference'"
    )


def all_reduce(
    x: jax.Array, axes: tuple[str, ...], *, implementation: Implementation = "auto"
) -> jax.Array:
    """The sum of `x` over all devices along the mesh axes `axes`, on each of them.

    Args:
      x: partial sums, float32 (bfloat16 would round each part before it is added) or int32.
      axes: names of mesh axes.
      implementation: "reference" adds in rank order; "psum" in XLA's.

    Raises:
      ValueError: x has another dtype.
    """
    if x.dtype not in (jnp.float32, jnp.int32):
        raise ValueError(f"reduce: partial sums are {x.dtype}, expected float32 or int32")
    if choose(implementation) == "reference":
        return reference.all_reduce(x, axes)
    return lax.psum(x, axes)
