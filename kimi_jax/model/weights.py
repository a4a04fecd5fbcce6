"""The target's parameters as a pytree: shapes, dtypes, logical axes, random values.

D hidden, H heads, Q query rank, R latent, E experts, F expert width, I an MLP's width, G = 32.
Matrices keep the checkpoint's [output, input] order. The routed experts are the published INT4
codes, bit for bit: byte j of a row holds input columns 2j (low nibble) and 2j + 1 (high nibble) in
offset binary, value = code - 8; a weight is value * scale, one scale per 32 columns.

`dtype` is bfloat16 or, for oracles, float32. It does not touch codes (uint8), scales (bfloat16 as
published) or the router's bias (float32 from file to compare: rounded to bfloat16 most of its
values coincide, and other experts are chosen).
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from kimi_jax.config import ModelConfig
from kimi_jax.model import param
from kimi_jax.model.param import Codes, Normal, Scales, leaf, linear, norm, num_bytes

__all__ = [
    "Attention",
    "DenseMLP",
    "Experts",
    "MoE",
    "Layer",
    "Weights",
    "abstract",
    "describe",
    "logical_axes",
    "num_bytes",
    "random",
]

CODE_STD = (255 / 12) ** 0.5
"""Standard deviation of a uniform code in -8..7."""


@flax.struct.dataclass(kw_only=True)
class Attention:
    """Multi-head latent attention; `kv_b` is stored split into its key and value halves."""

    qkv_a: jax.Array  # [Q+R+PE, D] q_a rows, then kv_a_proj_with_mqa rows (latent, rotary key)
    q_a_norm: jax.Array  # [Q]
    kv_a_norm: jax.Array  # [R]
    q_b: jax.Array  # [H, NOPE+PE, Q]
    w_uk: jax.Array  # [H, NOPE, R]
    w_uv: jax.Array  # [H, V, R]
    o: jax.Array  # [D, H, V]


@flax.struct.dataclass(kw_only=True)
class DenseMLP:
    """SwiGLU MLP of a dense layer, or the shared expert (I = F * n_shared_experts)."""

    gate_up: jax.Array  # [2, I, D] gate, then up
    down: jax.Array  # [D, I]


@flax.struct.dataclass(kw_only=True)
class Experts:
    """The routed experts of one layer, in INT4."""

    gate_up_codes: jax.Array  # uint8 [E, 2, F, D//2]
    gate_up_scales: jax.Array  # bfloat16 [E, 2, F, D//G]
    down_codes: jax.Array  # uint8 [E, D, F//2]
    down_scales: jax.Array  # bfloat16 [E, D, F//G]


@flax.struct.dataclass(kw_only=True)
class MoE:
    """Router, routed experts and shared expert of one layer."""

    router: jax.Array  # [E, D]
    router_bias: jax.Array  # float32 [E], added to the scores for the choice only
    experts: Experts
    shared: DenseMLP


@flax.struct.dataclass(kw_only=True)
class Layer:
    """One transformer block."""

    input_norm: jax.Array  # [D]
    attention: Attention
    post_attention_norm: jax.Array  # [D]
    mlp: DenseMLP | MoE


@flax.struct.dataclass(kw_only=True)
class Weights:
    """All parameters of the target."""

    embed: jax.Array  # [VOCAB, D]
    layers: tuple[Layer, ...]
    norm: jax.Array  # [D]
    lm_head: jax.Array  # [VOCAB, D]


def describe(config: ModelConfig, dtype: Any) -> Weights:
    """The tree of `Param`: the one place that knows every shape."""
    vocab, hidden = config.vocab_size, config.hidden_size
    table = (vocab, hidden), ("vocab", "embed")
    return Weights(
        embed=leaf(*table, dtype, Normal(std=1.0)),
        layers=tuple(_layer(config, dtype, i) for i in range(config.num_hidden_layers)),
        norm=norm(hidden, "embed", dtype),
        # Gain 4: logits with a clear favourite, so that greedy tests do not hang on near ties.
        lm_head=linear(*table, dtype, fan_in=hidden, gain=4.0),
    )


def abstract(config: ModelConfig, dtype: Any) -> Weights:
    """The tree of `jax.ShapeDtypeStruct`."""
    return param.abstract(describe(config, dtype))


def logical_axes(config: ModelConfig) -> Weights:
    """The tree of axis names, e.g. ("heads", "nope", "latent"); see `param.logical_axes`."""
    return param.logical_axes(describe(config, jnp.bfloat16))


def random(config: ModelConfig, dtype: Any, key: jax.Array, shardings: Any = None) -> Weights:
    """Random weights that behave: finite logits, attention and router not degenerate."""
    return param.random(describe(config, dtype), key, shardings)


def _layer(c: ModelConfig, dtype: Any, index: int) -> Layer:
    return Layer(
        input_norm=norm(c.hidden_size, "embed", dtype),
        attention=_attention(c, dtype),
        post_attention_norm=norm(c.hidden_size, "embed", dtype),
        mlp=_moe(c, dtype)
        if c.is_moe(index)
        else _dense(c.hidden_size, c.intermediate_size, "mlp_width", dtype),
    )


def _attention(c: ModelConfig, dtype: Any) -> Attention:
    hidden, heads, q_rank, latent = (
        c.hidden_size,
        c.num_attention_heads,
        c.q_lora_rank,
        c.kv_lora_rank,
    )
    return Attention(
        qkv_a=linear((q_rank + c.cache_row, hidden), ("qkv_a", "embed"), dtype, fan_in=hidden),
        q_a_norm=norm(q_rank, "q_rank", dtype),
        kv_a_norm=norm(latent, "latent", dtype),
        q_b=linear(
            (heads, c.qk_head_dim, q_rank), ("heads", "qk_head", "q_rank"), dtype, fan_in=q_rank
        ),
        w_uk=linear(
            (heads, c.qk_nope_head_dim, latent), ("heads", "nope", "latent"), dtype, fan_in=latent
        ),
        w_uv=linear(
            (heads, c.v_head_dim, latent), ("heads", "v_head", "latent"), dtype, fan_in=latent
        ),
        o=linear(
            (hidden, heads, c.v_head_dim),
            ("embed", "heads", "v_head"),
            dtype,
            fan_in=heads * c.v_head_dim,
        ),
    )


def _dense(hidden: int, width: int, axis: str, dtype: Any) -> DenseMLP:
    return DenseMLP(
        gate_up=linear((2, width, hidden), ("gate_up", axis, "embed"), dtype, fan_in=hidden),
        down=linear((hidden, width), ("embed", axis), dtype, fan_in=width),
    )


def _moe(c: ModelConfig, dtype: Any) -> MoE:
    hidden, experts, width = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size

    def codes(*shape: int, axes: tuple[str, ...]) -> Any:
        return leaf((*shape[:-1], shape[-1] // 2), axes, jnp.uint8, Codes())

    def scales(*shape: int, axes: tuple[str, ...]) -> Any:
        scale = Scales(center=shape[-1] ** -0.5 / CODE_STD)
        return leaf((*shape[:-1], shape[-1] // c.group_size), axes, jnp.bfloat16, scale)

    gate_up_axes = ("expert", "gate_up", "expert_width", "embed")
    down_axes = ("expert", "embed", "expert_width")
    return MoE(
        # Not "expert": unlike the experts, the score vector is needed whole by every device.
        router=linear((experts, hidden), ("router", "embed"), dtype, fan_in=hidden),
        router_bias=leaf((experts,), ("router",), jnp.float32, Normal(std=0.05)),
        experts=Experts(
            gate_up_codes=codes(experts, 2, width, hidden, axes=gate_up_axes),
            gate_up_scales=scales(experts, 2, width, hidden, axes=gate_up_axes),
            down_codes=codes(experts, hidden, width, axes=down_axes),
            down_scales=scales(experts, hidden, width, axes=down_axes),
        ),
        shared=_dense(hidden, width * c.n_shared_experts, "shared_width", dtype),
    )
