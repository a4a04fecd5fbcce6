"""INT4 in groups of 32 along the input dimension: fake quantisation, codes and packing."""

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 32


def quantize(w):
    """[..., in] float32 -> codes in [-8, 7] (float32, same shape), scales bfloat16 [..., in / 32].

    The scale is rounded to bfloat16 first and the codes are made with the rounded one.
    """
    grouped = w.reshape(*w.shape[:-1], -1, GROUP)
    scale = jnp.abs(grouped).max(-1, keepdims=True) / 7.0
    # Not a cast there and back: a compiler may drop that as excess precision.
    scale = jax.lax.reduce_precision(jnp.maximum(scale, 1e-8), 8, 7).astype(jnp.bfloat16)
    codes = jnp.clip(jnp.round(grouped / scale.astype(jnp.float32)), -8, 7)
    return codes.reshape(w.shape), scale[..., 0]


def dequantize(codes, scale):
    grouped = codes.reshape(*codes.shape[:-1], -1, GROUP)
    return (grouped * scale.astype(jnp.float32)[..., None]).reshape(codes.shape)


def fake_quant(w):
    """Quantised and dequantised; the gradient passes straight through."""
    return w + jax.lax.stop_gradient(dequantize(*quantize(w)) - w)


def pack(codes: np.ndarray) -> np.ndarray:
    """Codes [rows, in] -> int32 [rows, in / 8]: offset binary, column 0 in the lowest nibble."""
    u = (codes.astype(np.int64) + 8).reshape(codes.shape[0], -1, 8)
    words = (u << (4 * np.arange(8))).sum(-1)
    return words.astype(np.uint32).view(np.int32)


def unpack(words: np.ndarray) -> np.ndarray:
    """The inverse of `pack`, float32."""
    u = (words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    return (u.astype(np.int64) - 8).reshape(words.shape[0], -1).astype(np.float32)
