"""RMSNorm."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis: x [..., n], weight [n] -> [..., n] in x's dtype.

    Statistics are float32; the normalised value is rounded to x's dtype before the weight is
    applied, as in transformers' DeepseekV3RMSNorm, so that both round in the same place.
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps)).astype(x.dtype) * weight.astype(x.dtype)
