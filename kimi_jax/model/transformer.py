"""The target: K2.6's decoder stack over flat rows (steps) and over chunks (prefill)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from kimi_jax import cache
from kimi_jax.config import ModelConfig
from kimi_jax.model import mla, moe, rope
from kimi_jax.model.embedding import lookup
from kimi_jax.model.kernels import REFERENCE, Kernels
from kimi_jax.model.norm import rms_norm
from kimi_jax.model.rows import Rows
from kimi_jax.model.weights import DenseMLP, Layer, Weights
from kimi_jax.numerics import einsum
from kimi_jax.sharding.layout import SINGLE, Layout


@struct.dataclass
class Forward:
    """What the target says of a step's rows, before anything is accepted.

    logits float32 [M, VOCAB]; taps [n_taps, M, D]: residual stream after the tapped layers;
    rows [L, M, R + PE]: the rows' own latents; experts int32 [L_moe, M, K] (-1: dead row).
    """

    logits: jax.Array
    taps: jax.Array
    rows: jax.Array
    experts: jax.Array


def embed(weights: Weights, tokens: jax.Array, layout: Layout = SINGLE) -> jax.Array:
    """int32 [M] -> [M, D]."""
    return lookup(weights.embed, tokens, layout.group("vocab"))


def unembed(weights: Weights, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Residual stream [M, D] -> logits float32 [M, VOCAB], or a device's part of them."""
    return einsum("md,vd->mv", rms_norm(hidden, weights.norm, config.rms_norm_eps), weights.lm_head)


def rotary(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos, sin [T, PE / 2], shared by all layers."""
    cos, sin = rope.cos_sin(
        positions,
        dim=config.qk_rope_head_dim,
        theta=config.rope_theta,
        yarn=config.rope_scaling,
        max_position=config.max_position_embeddings,
    )
    amplitude = config.rope_scaling.amplitude if config.rope_scaling else 1.0
    return cos * amplitude, sin * amplitude


def _mlp(
    layer: Layer, config: ModelConfig, x: jax.Array, live: jax.Array, layout: Layout
) -> tuple[jax.Array, jax.Array | None]:
    """The layer's second half, residual included: x [M, D] -> ([M, D], expert ids or None)."""
    normed = rms_norm(x, layer.post_attention_norm, config.rms_norm_eps)
    if isinstance(layer.mlp, DenseMLP):
        out, ids = moe.dense_mlp(layer.mlp, normed), None
    else:
        out, ids = moe.moe(layer.mlp, config, normed, live, layout=layout)
    return x + layout.model.sum(out).astype(x.dtype), ids


# The layer is jitted by itself, its number an argument: identical kernels then compile once.
@functools.partial(jax.jit, static_argnames=("config", "layout", "kernels"))
def _step_layer(
    layer: Layer,
    config: ModelConfig,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rows: Rows,
    latent: jax.Array,
    index: jax.Array,
    layout: Layout,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
    with jax.named_scope("attention"):
        out, own = mla.step_attention(
            *(layer.attention, config, normed, cos, sin, rows, latent, index),
            context=layout.group("page_offset"),
            implementation=kernels.tree_mla,
        )
    x = x + layout.model.sum(out).astype(x.dtype)
    with jax.named_scope("experts"):
        x, ids = _mlp(layer, config, x, rows.live, layout)
    return x, own, ids


def forward(
    weights: Weights,
    config: ModelConfig,
    latent: jax.Array,
    rows: Rows,
    taps: Sequence[int],
    layout: Layout = SINGLE,
    kernels: Kernels = REFERENCE,
) -> Forward:
    """Sends a step's rows through the target; latent [L, pages, P, R + PE] is only read.

    taps: 0-based ids of the layers whose outputs are returned (before the final norm).
    layout: where the parts of weights and cache lie; a layer then has two reductions, one behind
    its attention and one behind its experts.
    kernels: what attention runs on; the experts run on what they were prepared for.
    """
    cos, sin = rotary(config, rows.position)
    x = embed(weights, rows.token, layout)
    own_rows, experts, tapped = [], [], {}
    for index, layer in enumerate(weights.layers):
        with jax.named_scope(f"layer{index}"):
            x, own, ids = _step_layer(
                layer, config, x, cos, sin, rows, latent, jnp.int32(index), layout, kernels
            )
        own_rows.append(own)
        if ids is not None:
            experts.append(ids)
        if index in taps:
            tapped[index] = x
    with jax.named_scope("unembed"):
        logits = unembed(weights, config, x)
    return Forward(
        logits=logits,
        taps=_stack_taps(tapped, taps, x),
        rows=jnp.stack(own_rows),
        experts=_stack_experts(experts, config, x.shape[0]),
    )


@struct.dataclass
class Chunk:
    """A chunk after the last layer.

    hidden [C, D] (before the final norm); latent: the pages, written; taps [n_taps, C, D];
    experts int32 [L_moe, C, K]. What stands in the rows after `count` means nothing.
    """

    hidden: jax.Array
    latent: jax.Array
    taps: jax.Array
    experts: jax.Array


@functools.partial(jax.jit, static_argnames=("config", "layout"))
def _chunk_layer(
    layer: Layer,
    config: ModelConfig,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    latent: jax.Array,
    index: jax.Array,
    page_row: jax.Array,
    end: jax.Array,
    layout: Layout,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    context = layout.group("page_offset")
    normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
    q_nope, q_pe, own = mla.project(layer.attention, config, normed, cos, sin)
    page_size = latent.shape[2] * context.size
    pages, offsets = page_row[positions // page_size], positions % page_size
    offsets, written = cache.part_places(offsets, valid, latent.shape[2], context)
    pages = jnp.where(written, pages, latent.shape[1])
    latent = latent.at[index, pages, offsets].set(own.astype(latent.dtype), mode="drop")
    out = mla.prefill_attention(
        *(layer.attention, config, q_nope, q_pe, positions, latent, index, page_row, end),
        context=context,
    )
    x = x + layout.model.sum(out).astype(x.dtype)
    x, ids = _mlp(layer, config, x, valid, layout)
    return x, latent, ids


def forward_chunk(
    weights: Weights,
    config: ModelConfig,
    latent: jax.Array,
    page_row: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    taps: Sequence[int],
    layout: Layout = SINGLE,
) -> Chunk:
    """A chunk of one sequence: writes positions start..start+count-1 and attends causally.

    Args:
      latent [L, pages, P, R + PE]; page_row int32 [pages of the longest context].
      tokens int32 [C], of which the first `count` are real.
    """
    offsets = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    valid = offsets < count
    positions = jnp.where(valid, start + offsets, 0)
    cos, sin = rotary(config, positions)
    x = embed(weights, tokens, layout)
    experts, tapped = [], {}
    for index, layer in enumerate(weights.layers):
        with jax.named_scope(f"layer{index}"):
            x, latent, ids = _chunk_layer(
                layer,
                config,
                x,
                cos,
                sin,
                positions,
                valid,
                latent,
                jnp.int32(index),
                page_row,
                start + count,
                layout,
            )
        if ids is not None:
            experts.append(ids)
        if index in taps:
            tapped[index] = x
    return Chunk(
        hidden=x,
        latent=latent,
        taps=_stack_taps(tapped, taps, x),
        experts=_stack_experts(experts, config, x.shape[0]),
    )


def _stack_taps(tapped: dict[int, jax.Array], taps: Sequence[int], like: jax.Array) -> jax.Array:
    """[n_taps, M, D] in the order of `taps`."""
    if not taps:
        return jnp.zeros((0, *like.shape), like.dtype)
    return jnp.stack([tapped[index] for index in taps])


def _stack_experts(experts: list[jax.Array], config: ModelConfig, num_rows: int) -> jax.Array:
    """int32 [L_moe, M, K]."""
    if not experts:
        return jnp.zeros((0, num_rows, config.num_experts_per_tok), jnp.int32)
    return jnp.stack(experts)
