"""Mixture of experts: sigmoid router with correction bias, routed INT4 experts, shared expert."""

import jax
import jax.numpy as jnp
from jax import lax

from kimi_jax.config import ModelConfig
from kimi_jax.model.weights import DenseMLP, MoE
from kimi_jax.numerics import einsum
from kimi_jax.pallas.int4_moe import api as int4_moe
from kimi_jax.sharding.layout import SINGLE, Layout


def dense_mlp(weights: DenseMLP, x: jax.Array) -> jax.Array:
    """down(silu(gate x) * up x): x [M, D] -> float32 [M, D] (partial if the width is split)."""
    gate_up = einsum("md,gfd->mgf", x, weights.gate_up)
    hidden = (jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]).astype(x.dtype)
    return einsum("mf,df->md", hidden, weights.down)


def route(
    weights: MoE, config: ModelConfig, x: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """x [M, D], live bool [M] -> expert ids int32 [M, K] (-1 for a dead row), weights float32.

    All in float32 (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): the bias takes part in the
    choice only, the weights are the unbiased sigmoids. `routed_scaling_factor` enters here and
    nowhere else.
    """
    scores = jax.nn.sigmoid(
        einsum("md,ed->me", x.astype(jnp.float32), weights.router.astype(jnp.float32))
    )
    _, ids = lax.top_k(scores + weights.router_bias, config.num_experts_per_tok)
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    if config.norm_topk_prob:
        chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20)
    return jnp.where(live[:, None], ids, -1), chosen * config.routed_scaling_factor


def moe(
    weights: MoE,
    config: ModelConfig,
    x: jax.Array,
    live: jax.Array,
    *,
    layout: Layout = SINGLE,
) -> tuple[jax.Array, jax.Array]:
    """Routed sum + shared expert: x [M, D] normed -> (float32 [M, D], expert ids int32 [M, K]).

    Under a layout the sum is partial, over the devices of `layout.model`. A device sees all rows
    and serves the experts that it has: another's id is, here, not routed. Nothing is dropped.
    """
    ids, shares = route(weights, config, x, live)
    travel = layout.rows_travel
    routed = int4_moe.routed_experts(
        travel.gather(x, axis=0),
        layout.group("expert").local(
            travel.gather(ids, axis=0), int4_moe.num_experts(weights.experts)
        ),
        travel.gather(shares, axis=0),
        weights.experts,
        routed_over=config.n_routed_experts,
    )
    return travel.sum_parts(routed, axis=0) + dense_mlp(weights.shared, x), ids
