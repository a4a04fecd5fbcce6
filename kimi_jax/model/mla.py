"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Two forms over the same weights and the same cache rows: absorbed for steps (queries go to the
latent space, a cached row serves as key and value of all heads) and expanded for prefill (latents
become per-head keys and values, 3.4 times fewer operations when there are many rows).
"""

import jax
import jax.numpy as jnp
from jax import lax

from kimi_jax import cache
from kimi_jax.config import ModelConfig
from kimi_jax.model import rope
from kimi_jax.model.norm import rms_norm
from kimi_jax.model.rows import Rows
from kimi_jax.model.weights import Attention
from kimi_jax.numerics import OnlineSoftmax, einsum
from kimi_jax.pallas.tree_mla import api as tree_mla
from kimi_jax.sharding.group import ALONE, Group

_PREFILL_BLOCK = 256  # tokens of context expanded to keys and values at a time


def project(
    weights: Attention, config: ModelConfig, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normed rows [M, D] -> q_nope [M, H, NOPE], q_pe [M, H, PE], cache rows [M, R + PE]."""
    down = einsum("md,qd->mq", x, weights.qkv_a).astype(x.dtype)
    q, kv_c, k_pe = jnp.split(
        down, [config.q_lora_rank, config.q_lora_rank + config.kv_lora_rank], axis=-1
    )
    q = rms_norm(q, weights.q_a_norm, config.latent_norm_eps)
    q = einsum("mq,hnq->mhn", q, weights.q_b).astype(x.dtype)
    q_nope, q_pe = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    kv_c = rms_norm(kv_c, weights.kv_a_norm, config.latent_norm_eps)
    q_pe = rope.rotate_interleaved(q_pe, cos, sin)
    k_pe = rope.rotate_interleaved(k_pe, cos, sin)
    return q_nope, q_pe, jnp.concatenate([kv_c, k_pe], axis=-1)


def output(weights: Attention, heads: jax.Array) -> jax.Array:
    """Heads' values [M, H, V] -> [M, D] float32 (a partial sum when heads are sharded)."""
    return einsum("mhv,dhv->md", heads, weights.o)


def step_attention(
    weights: Attention,
    config: ModelConfig,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rows: Rows,
    latent: jax.Array,
    layer: jax.Array | int,
    *,
    context: Group = ALONE,
    implementation: tree_mla.Implementation = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Absorbed form: x [M, D] normed -> (output [M, D] float32, the rows' own latents [M, R + PE]).

    The rows see their sequence's cached positions and their ancestors among the step's rows. With
    heads split over devices H is a device's part of them, and the output a partial sum; `context`
    are the devices that hold parts of every page.
    """
    q_nope, q_pe, own = project(weights, config, x, cos, sin)
    q_latent = einsum("mhn,hnr->mhr", q_nope, weights.w_uk).astype(x.dtype)

    def attend(q: jax.Array, ancestors: jax.Array, length: jax.Array):
        return tree_mla.attend(
            q,
            latent,
            layer,
            own,
            ancestors,
            rows.row_start,
            rows.row_count,
            length,
            rows.page_table,
            rank=config.kv_lora_rank,
            scale=config.softmax_scale,
            max_rows=rows.max_rows,
            implementation=implementation,
        )

    q = jnp.concatenate([q_latent, q_pe], axis=-1)
    if context.size == 1:
        attended, _ = attend(q, rows.ancestors, rows.length)
    else:
        # All heads look at this device's part of the context; one device adds the rows' own.
        mine = cache.part_length(rows.length, latent.shape[2], context)
        ancestors = jnp.where(context.index == 0, rows.ancestors, 0)
        attended = _merge(*attend(context.gather(q, axis=1), ancestors, mine), context)
    heads = einsum("mhr,hvr->mhv", attended, weights.w_uv).astype(x.dtype)
    return output(weights, heads), own


def _merge(out: jax.Array, lse: jax.Array, context: Group) -> jax.Array:
    """Joins attention over parts of the context: out [M, all H, R], lse [M, all H] -> [M, H, R].

    A part that saw nothing has lse -inf and weighs nothing; nothing seen anywhere gives 0.
    """
    top = context.max(lse)
    weight = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top))
    weighted = jnp.where(weight[..., None] > 0, out.astype(jnp.float32) * weight[..., None], 0.0)
    joined = jnp.concatenate([weighted, weight[..., None]], axis=-1)
    joined = context.sum_parts(joined, axis=1)
    total = joined[..., -1:]
    return (joined[..., :-1] / jnp.where(total > 0, total, 1.0)).astype(out.dtype)


def prefill_attention(
    weights: Attention,
    config: ModelConfig,
    q_nope: jax.Array,
    q_pe: jax.Array,
    positions: jax.Array,
    latent: jax.Array,
    layer: jax.Array | int,
    page_row: jax.Array,
    end: jax.Array,
    *,
    context: Group = ALONE,
) -> jax.Array:
    """Expanded form for a chunk of one sequence whose rows are in the pages already.

    Args:
      q_nope [C, H, NOPE], q_pe [C, H, PE], positions int32 [C]: the chunk's queries.
      latent [L, pages, P, R + PE], page_row int32 [pages of the longest context]: its cache.
      end: positions < end are written; a query sees those up to its own.
      context: devices that hold parts of every page; blocks of it are gathered one by one.

    Returns:
      [C, D] float32.
    """
    page_size = latent.shape[2] * context.size
    pages_a_block = max(_PREFILL_BLOCK // page_size, 1)
    tokens = pages_a_block * page_size
    table = jnp.pad(page_row, (0, -page_row.shape[0] % pages_a_block))
    chunk, heads, _ = q_nope.shape

    def fold(i: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
        pages = lax.dynamic_slice_in_dim(table, i * pages_a_block, pages_a_block)
        at = i * tokens + jnp.arange(tokens)
        rows = context.gather(latent[layer, pages], axis=1).reshape(tokens, -1)
        rows = jnp.where((at < end)[:, None], rows, 0)  # unwritten memory may hold NaN
        kv_c, k_pe = jnp.split(rows, [config.kv_lora_rank], axis=-1)
        k_nope = einsum("tr,hnr->htn", kv_c, weights.w_uk).astype(rows.dtype)
        values = einsum("tr,hvr->htv", kv_c, weights.w_uv).astype(rows.dtype)
        scores = einsum("chn,htn->cht", q_nope, k_nope) + einsum("chp,tp->cht", q_pe, k_pe)
        visible = (at <= positions[:, None]) & (at < end)
        return softmax.fold(
            jnp.where(visible[:, None, :], scores * config.softmax_scale, -jnp.inf),
            lambda p: einsum("cht,htv->chv", p.astype(rows.dtype), values),
        )

    softmax = OnlineSoftmax.start((chunk, heads), config.v_head_dim)
    out, _ = lax.fori_loop(0, (end + tokens - 1) // tokens, fold, softmax).finish()
    return output(weights, out.astype(q_nope.dtype))
