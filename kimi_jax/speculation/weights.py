"""The DFlash drafter's parameters as a pytree: shapes, dtypes, logical axes, random values.

HD head width, KV key/value heads. The drafter has no embedding and no head of its own: it uses the
target's.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from kimi_jax.config import DrafterConfig
from kimi_jax.model import param
from kimi_jax.model.param import linear, norm

__all__ = ["DrafterLayer", "DrafterWeights", "abstract", "logical_axes", "random", "describe"]


@flax.struct.dataclass(kw_only=True)
class DrafterLayer:
    """One decoder block of the drafter, Qwen3-shaped."""

    input_norm: jax.Array  # [D]
    q: jax.Array  # [H, HD, D]
    k: jax.Array  # [KV, HD, D]
    v: jax.Array  # [KV, HD, D]
    o: jax.Array  # [D, H, HD]
    q_norm: jax.Array  # [HD]
    k_norm: jax.Array  # [HD]
    post_attention_norm: jax.Array  # [D]
    gate_up: jax.Array  # [2, I, D] gate, then up
    down: jax.Array  # [D, I]


@flax.struct.dataclass(kw_only=True)
class DrafterWeights:
    """All parameters of the drafter."""

    fc: jax.Array  # [n_taps, D, D] fc.weight split by tap: fc(concat h) = sum_i fc[i] h_i
    hidden_norm: jax.Array  # [D]
    layers: tuple[DrafterLayer, ...]
    norm: jax.Array  # [D]


def describe(config: DrafterConfig, dtype: Any) -> DrafterWeights:
    """The tree of `Param`: the one place that knows every shape."""
    hidden, taps = config.hidden_size, len(config.target_layer_ids)
    return DrafterWeights(
        fc=linear(
            (taps, hidden, hidden), ("tap", "embed", "tap_embed"), dtype, fan_in=taps * hidden
        ),
        hidden_norm=norm(hidden, "embed", dtype),
        layers=tuple(_layer(config, dtype) for _ in range(config.num_hidden_layers)),
        norm=norm(hidden, "embed", dtype),
    )


def abstract(config: DrafterConfig, dtype: Any) -> DrafterWeights:
    """The tree of `jax.ShapeDtypeStruct`."""
    return param.abstract(describe(config, dtype))


def logical_axes(config: DrafterConfig) -> DrafterWeights:
    """The tree of axis names; see `param.logical_axes`."""
    return param.logical_axes(describe(config, jnp.bfloat16))


def random(
    config: DrafterConfig, dtype: Any, key: jax.Array, shardings: Any = None
) -> DrafterWeights:
    """Random weights that behave like `model.weights.random`'s."""
    return param.random(describe(config, dtype), key, shardings)


def _layer(c: DrafterConfig, dtype: Any) -> DrafterLayer:
    hidden, heads, kv, head, width = (
        *(c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim),
        c.intermediate_size,
    )
    kv_axes = ("draft_kv_heads", "draft_head", "embed")
    return DrafterLayer(
        input_norm=norm(hidden, "embed", dtype),
        q=linear(
            (heads, head, hidden), ("draft_heads", "draft_head", "embed"), dtype, fan_in=hidden
        ),
        k=linear((kv, head, hidden), kv_axes, dtype, fan_in=hidden),
        v=linear((kv, head, hidden), kv_axes, dtype, fan_in=hidden),
        o=linear(
            (hidden, heads, head),
            ("embed", "draft_heads", "draft_head"),
            dtype,
            fan_in=heads * head,
        ),
        q_norm=norm(head, "draft_head", dtype),
        k_norm=norm(head, "draft_head", dtype),
        post_attention_norm=norm(hidden, "embed", dtype),
        gate_up=linear(
            (2, width, hidden), ("gate_up", "draft_width", "embed"), dtype, fan_in=hidden
        ),
        down=linear((hidden, width), ("embed", "draft_width"), dtype, fan_in=width),
    )
