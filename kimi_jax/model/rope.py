"""Rotary position embedding with YaRN, accurate over the whole context.

A float32 product position * frequency loses 1e-2 radians at position 262,143. The tables here are
made in float64 for the high and the low part of a position and joined by the angle-sum identity,
which keeps cos and sin within 2e-7 at every position and needs two small constants only.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.config import YarnConfig

_LOW = 512  # positions in the fine table; the coarse one has max_position / 512 rows


def inverse_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> np.ndarray:
    """float64 [dim / 2] radians per position.

    YaRN interpolates the slow dimensions by `factor`, keeps the fast ones, and ramps linearly
    between the dimensions that turn `beta_fast` and `beta_slow` times over the original context.
    """
    extrapolated = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if yarn is None:
        return extrapolated

    def dimension_turning(turns: float) -> float:
        context = yarn.original_max_position_embeddings
        return dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(dimension_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension_turning(yarn.beta_slow)), dim - 1)
    width = max(high - low, 0.001)  # equal bounds make a step, not a division by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / width, 0.0, 1.0)
    return extrapolated / yarn.factor * ramp + extrapolated * (1.0 - ramp)


@functools.lru_cache(maxsize=16)
def _tables(
    dim: int, theta: float, yarn: YarnConfig | None, max_position: int
) -> tuple[np.ndarray, np.ndarray]:
    """Coarse float32 [2, ceil(max / 512) + 1, dim / 2] and fine [2, 512, dim / 2]: cos, sin."""
    frequencies = inverse_frequencies(dim, theta, yarn)

    def table(rows: int, stride: int) -> np.ndarray:
        angles = np.outer(np.arange(rows, dtype=np.float64) * stride, frequencies)
        return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    return table(-(-max_position // _LOW) + 1, _LOW), table(_LOW, 1)


def cos_sin(
    positions: jax.Array, *, dim: int, theta: float, yarn: YarnConfig | None, max_position: int
) -> tuple[jax.Array, jax.Array]:
    """int32 [T] -> float32 cos, sin [T, dim / 2].

    Positions up to 512 beyond max_position are served too: the nodes of a tree at the end of the
    context lie there, and are never accepted. The YaRN amplitude is the caller's affair.
    """
    coarse, fine = _tables(dim, theta, yarn, max_position)
    cos_high, sin_high = jnp.asarray(coarse)[:, positions // _LOW]
    cos_low, sin_low = jnp.asarray(fine)[:, positions % _LOW]
    return cos_high * cos_low - sin_high * sin_low, sin_high * cos_low + cos_high * sin_low


def rotate_interleaved(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x[2i], x[2i+1]): x [T, ..., dim], cos and sin [T, dim / 2].

    The order of DeepSeek's and Kimi's checkpoints, kept in the cache as well.
    """
    cos, sin = _match(cos, x), _match(sin, x)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def rotate_half(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x[i], x[i + dim / 2]): x [T, ..., dim], cos and sin [T, dim / 2].

    The order of Qwen3, which the DFlash drafter follows.
    """
    cos, sin = _match(cos, x), _match(sin, x)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _match(table: jax.Array, x: jax.Array) -> jax.Array:
    """[T, n] -> [T, 1, ..., n] with x's rank."""
    return table.reshape(table.shape[0], *(1,) * (x.ndim - 2), table.shape[-1])
