"""What a parameter is before it has values: shape, dtype, logical axes, random distribution.

`model/weights.py` and `speculation/weights.py` describe their trees once, as trees of `Param`;
everything else (abstract arrays for compiling and planning, axes for sharding, random weights for
tests and dry runs, the loader's checks) is derived here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Normal:
    """Normal values around `mean`."""

    std: float
    mean: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Uniform bytes: every INT4 code equally likely."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Positive values within a factor of sqrt(2) around `center`, uniform in the logarithm."""

    center: float


@dataclass(frozen=True, kw_only=True)
class Param:
    """One leaf. `axes` names each dimension, once, for the sharding rules."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str, ...]
    init: Normal | Codes | Scales

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes) == len(set(self.axes)), (self.shape, self.axes)


# The builders return Any: in the trees a description stands where the classes announce an array.


def leaf(
    shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any, init: Normal | Codes | Scales
) -> Any:
    """A `Param`."""
    return Param(shape=shape, axes=axes, dtype=np.dtype(dtype), init=init)


def linear(
    shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any, fan_in: int, gain: float = 1.0
) -> Any:
    """A projection that maps unit-variance inputs to outputs of standard deviation `gain`."""
    return leaf(shape, axes, dtype, Normal(std=gain * fan_in**-0.5))


def norm(width: int, axis: str, dtype: Any) -> Any:
    """A norm's weight: about 1, but not exactly, so that leaving it out shows."""
    return leaf((width,), (axis,), dtype, Normal(mean=1.0, std=0.1))


def abstract(tree: Any) -> Any:
    """The tree with a `jax.ShapeDtypeStruct` for every `Param`."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), tree)


def logical_axes(tree: Any) -> Any:
    """The tree with the tuple of axis names for every `Param`.

    The tuples are themselves pytrees; map over them with the abstract tree first:
    `jax.tree.map(f, abstract, logical_axes)`.
    """
    return jax.tree.map(lambda p: p.axes, tree)


def random(tree: Any, key: jax.Array, shardings: Any = None) -> Any:
    """Draws every `Param` of the tree.

    Args:
        tree: a tree of `Param`.
        key: a JAX key; the same key and tree give the same values under any sharding.
        shardings: None, or the same tree of `jax.sharding.Sharding`; each device then draws its own
            part.
    """
    params, treedef = jax.tree.flatten(tree)
    places = [None] * len(params) if shardings is None else treedef.flatten_up_to(shardings)
    salts = jax.random.bits(key, (len(params), 2), jnp.uint32)
    drawn = [
        jax.jit(values, static_argnames="param", out_shardings=place)(salt, param=p)
        for p, place, salt in zip(params, places, salts, strict=True)
    ]
    return jax.tree.unflatten(treedef, drawn)


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays, abstract arrays or `Param` in the tree, over all devices."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def values(salt: jax.Array, param: Param) -> jax.Array:
    """Random values of one parameter, from two 32-bit words of randomness.

    Each element hashes its own index, so XLA fuses the whole computation into the write of the
    result. `jax.random` needs up to 16 times the result in temporary memory on a CPU, which for
    one layer's experts is 84 GiB.
    """
    lead = jax.lax.broadcasted_iota(jnp.uint32, param.shape, 0)
    inner = jnp.zeros(param.shape, jnp.uint32)
    for axis, size in enumerate(param.shape[1:], start=1):
        inner = inner * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, param.shape, axis)
    bits = _mix(_mix(lead ^ salt[0]) ^ _mix(inner ^ salt[1]))
    return from_bits(param.init, bits).astype(param.dtype)


def _mix(x: jax.Array) -> jax.Array:
    """A bijective 32-bit hash with low bias (constants: C. Wellons, "lowbias32")."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def from_bits(init: Normal | Codes | Scales, bits: jax.Array) -> jax.Array:
    """32 random bits an element -> values of the distribution."""
    if isinstance(init, Codes):
        return bits >> 24
    # 23 bits, so that adding a half is exact and 1.0, whose erf_inv is infinite, is never reached.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * np.float32(2**-23)
    if isinstance(init, Scales):
        return init.center * jnp.exp2(uniform - 0.5)
    return init.mean + init.std * np.float32(2**0.5) * jax.lax.erf_inv(2 * uniform - 1)
