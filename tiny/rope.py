"""Rotary embedding with YaRN, as the shipped ``config.json`` says, in every phase of training."""

import math

import jax.numpy as jnp
import numpy as np


def inverse_frequencies(dim: int, shape) -> np.ndarray:
    """[dim // 2] float32: YaRN's blend of the plain frequencies and those divided by the factor."""
    extra = shape.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)

    def correction(rotations: float) -> float:
        length = shape.yarn_original / (2 * math.pi * rotations)
        return dim * math.log(length) / (2 * math.log(shape.theta))

    low = max(math.floor(correction(shape.beta_fast)), 0)
    high = min(math.ceil(correction(shape.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (extra / shape.yarn_factor * ramp + extra * (1 - ramp)).astype(np.float32)


def softmax_scale(dim: int, shape) -> float:
    """dim^-0.5 times YaRN's temperature squared (mscale_all_dim = 1)."""
    return dim**-0.5 * (0.1 * math.log(shape.yarn_factor) + 1.0) ** 2


def cos_sin(positions, dim: int, shape):
    angle = positions.astype(jnp.float32)[..., None] * inverse_frequencies(dim, shape)
    return jnp.cos(angle), jnp.sin(angle)


def rotate_interleaved(x, cos, sin):
    """Pairs (2i, 2i+1), order kept. x [..., dim]; cos, sin broadcast to [..., dim/2]."""
    x = x.astype(jnp.float32)
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def rotate_halves(x, cos, sin):
    """Pairs (i, i + dim/2): the drafter's order."""
    x = x.astype(jnp.float32)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
