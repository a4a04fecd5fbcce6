"""The DFlash drafter's forward pass, in the conventions of the `dflash` 0.1.0 package.

The drafter sees the target's text only through the target: the outputs of some of its layers (the
taps) at every committed position are projected to one feature, from which each drafter layer makes
its own context keys and values (`project_context`, once per committed position). A block of the
anchor and DEPTH mask tokens then attends to that context and to itself; the mask in slot i becomes
a distribution of the token at the mask's own position (`propose_logits`). Embedding and head are
the target's.

The context's attention is plain JAX and the definition of what a kernel must compute: it streams
over blocks of pages, as many as the longest sequence of the batch needs, and in a sliding layer
starts at the first page that its window reaches.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kimi_jax.config import DrafterConfig
from kimi_jax.model import rope
from kimi_jax.model.embedding import lookup
from kimi_jax.model.norm import rms_norm
from kimi_jax.numerics import OnlineSoftmax, einsum
from kimi_jax.sharding.layout import SINGLE, Layout
from kimi_jax.speculation.weights import DrafterLayer, DrafterWeights

BLOCK = 256  # tokens of context folded in at a time, fixed: a row's sum never depends on the batch


def project_context(
    weights: DrafterWeights,
    config: DrafterConfig,
    taps: jax.Array,
    positions: jax.Array,
    layout: Layout = SINGLE,
) -> tuple[jax.Array, jax.Array]:
    """Context keys and values of T committed positions, for every drafter layer.

    Args:
        taps: [n_taps, T, D] outputs of the target's layers `target_layer_ids`, in that order: the
            whole residual stream behind the layer, before any norm.
        positions: int32 [T].

    Returns:
        k (normed and rotated) and v, [Ld, T, KV, HD] in the weights' dtype.
    """
    dtype = weights.fc.dtype
    width = layout.group("tap_embed")
    taps = width.part(taps.astype(dtype), axis=2)
    # One product a tap, then their sum: a contraction over (tap, D) would transpose fc first.
    features = width.sum(einsum("ntd,ned->nte", taps, weights.fc).sum(axis=0))
    context = rms_norm(features, weights.hidden_norm, config.rms_norm_eps).astype(dtype)
    cos, sin = _cos_sin(config, positions)
    rows = [_keys_values(layer, config, context, cos, sin) for layer in weights.layers]
    return jnp.stack([k for k, _ in rows]), jnp.stack([v for _, v in rows])


def propose_logits(
    weights: DrafterWeights,
    config: DrafterConfig,
    target_embed: jax.Array,
    lm_head: jax.Array,
    draft_k: jax.Array,
    draft_v: jax.Array,
    page_table: jax.Array,
    length: jax.Array,
    anchor: jax.Array,
    layout: Layout = SINGLE,
) -> jax.Array:
    """Logits of the DEPTH tokens behind each anchor: float32 [B, DEPTH, VOCAB].

    Under a layout, of this device's part of the vocabulary. The mask token's logit is among them;
    leave it out before proposing.

    Args:
        target_embed: [VOCAB, D]; lm_head: [VOCAB, D].
        draft_k, draft_v: [Ld, pages, P, KV, HD], what `project_context` gave for positions below
            `length`. Other places of the pages may hold anything, NaN included.
        page_table: int32 [B, MP]: position t is row t % P of page page_table[t // P].
        length: int32 [B] positions of context, which is the anchor's position too. Give 0 for a
            slot without a sequence: it costs no context then, and its logits mean nothing.
        anchor: int32 [B].
    """
    dtype = weights.fc.dtype
    batch, slots = anchor.shape[0], config.block_size
    block = jnp.full((batch, slots), config.mask_token_id, anchor.dtype).at[:, 0].set(anchor)
    x = lookup(target_embed, block.reshape(-1), layout.group("vocab")).astype(dtype)
    positions = length[:, None] + jnp.arange(slots)
    cos, sin = _cos_sin(config, positions.reshape(-1))
    for index, layer in enumerate(weights.layers):
        sliding = config.layer_types[index] == "sliding_attention"
        x = _layer(
            *(layer, x, cos, sin, draft_k, draft_v, jnp.int32(index), page_table, length),
            config=config,
            sliding=sliding,
            layout=layout,
        )
    hidden = rms_norm(x, weights.norm, config.rms_norm_eps).reshape(batch, slots, -1)
    return einsum("btd,vd->btv", hidden[:, 1:], lm_head)


@functools.partial(jax.jit, static_argnames=("config", "sliding", "layout"))
def _layer(
    weights: DrafterLayer,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    draft_k: jax.Array,
    draft_v: jax.Array,
    index: jax.Array,
    page_table: jax.Array,
    length: jax.Array,
    *,
    config: DrafterConfig,
    sliding: bool,
    layout: Layout,
) -> jax.Array:
    """One decoder block: x [B * block_size, D] -> the same. Jitted by itself to be traced once."""
    dtype, eps = x.dtype, config.rms_norm_eps
    normed = rms_norm(x, weights.input_norm, eps)
    q = rms_norm(einsum("md,hnd->mhn", normed, weights.q), weights.q_norm, eps)
    q = rope.rotate_half(q, cos, sin).astype(dtype)
    own_k, own_v = _keys_values(weights, config, normed, cos, sin)
    window = config.sliding_window if sliding else None
    heads = _attend(
        *(q, own_k, own_v, draft_k, draft_v, index, page_table, length),
        window=window,
        causal=sliding and config.sliding_causal,
    )
    out = einsum("mhn,dhn->md", heads.astype(dtype), weights.o)
    x = x + layout.group("draft_heads").sum(out).astype(dtype)
    normed = rms_norm(x, weights.post_attention_norm, eps)
    gate, up = einsum("md,gid->gmi", normed, weights.gate_up)
    hidden = (jax.nn.silu(gate) * up).astype(dtype)
    out = einsum("mi,di->md", hidden, weights.down)
    return x + layout.group("draft_width").sum(out).astype(dtype)


def _attend(
    q: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
    draft_k: jax.Array,
    draft_v: jax.Array,
    index: jax.Array,
    page_table: jax.Array,
    length: jax.Array,
    *,
    window: int | None,
    causal: bool,
) -> jax.Array:
    """Attention of each sequence's block to its context and to itself: float32 [M, H, HD].

    q [M, H, HD], own_k and own_v [M, KV, HD] with M = B * block_size. With a window, a key is
    visible at a distance below it, on both sides; `causal` concerns the block alone, since the
    context lies before every query anyway.
    """
    batch, table_pages = page_table.shape
    page_size, kv_heads, width = draft_k.shape[2:]
    slots = q.shape[0] // batch
    # Query head h reads key/value head h // G.
    queries = q.reshape(batch, slots, kv_heads, -1, width)
    positions = length[:, None] + jnp.arange(slots)

    def fold(
        softmax: OnlineSoftmax, k: jax.Array, v: jax.Array, visible: jax.Array
    ) -> OnlineSoftmax:
        scores = einsum("bqkgn,btkn->bkgqt", queries, k) * width**-0.5
        return softmax.fold(
            jnp.where(visible[:, None, None], scores, -jnp.inf),
            lambda p: einsum("bkgqt,btkn->bkgqn", p.astype(v.dtype), v),
        )

    def near(keys: jax.Array) -> jax.Array:
        """bool [B, slots, T]: keys [B, T] within the window of each query."""
        distance = positions[:, :, None] - keys[:, None, :]
        return jnp.abs(distance) < window if window else jnp.full(distance.shape, True)

    # The anchor reaches back furthest, to length - window + 1.
    first_page = jnp.maximum(length - window + 1, 0) // page_size if window else length * 0
    block_pages = min(max(BLOCK // page_size, 1), table_pages)
    block_tokens = block_pages * page_size

    def context_block(i: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
        page = first_page[:, None] + i * block_pages + jnp.arange(block_pages)
        keys = (page[:, :, None] * page_size + jnp.arange(page_size)).reshape(batch, -1)
        written = keys < length[:, None]
        ids = jnp.take_along_axis(page_table, jnp.minimum(page, table_pages - 1), axis=1)

        def read(pages: jax.Array) -> jax.Array:
            rows = pages[index, ids].reshape(batch, block_tokens, kv_heads, width)
            return jnp.where(written[:, :, None, None], rows, 0)  # 0 * NaN would be NaN

        return fold(softmax, read(draft_k), read(draft_v), near(keys) & written[:, None, :])

    blocks = jnp.max(length - first_page * page_size + block_tokens - 1) // block_tokens
    softmax = OnlineSoftmax.start((*queries.shape[:1], *queries.shape[2:4], slots), width)
    softmax = lax.fori_loop(0, blocks, context_block, softmax)

    visible = near(positions)
    if causal:
        visible &= positions[:, None, :] <= positions[:, :, None]
    own = (batch, slots, kv_heads, width)
    out, _ = fold(softmax, own_k.reshape(own), own_v.reshape(own), visible).finish()
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _keys_values(
    weights: DrafterLayer, config: DrafterConfig, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """k (normed and rotated) and v of rows x [T, D]: [T, KV, HD] in x's dtype."""
    k = rms_norm(einsum("td,knd->tkn", x, weights.k), weights.k_norm, config.rms_norm_eps)
    v = einsum("td,knd->tkn", x, weights.v)
    return rope.rotate_half(k, cos, sin).astype(x.dtype), v.astype(x.dtype)


def _cos_sin(config: DrafterConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [T, HD / 2], times the amplitude that engines disagree about."""
    cos, sin = rope.cos_sin(
        positions,
        dim=config.head_dim,
        theta=config.rope_theta,
        yarn=config.rope_scaling,
        max_position=config.max_position_embeddings,
    )
    return cos * config.yarn_amplitude, sin * config.yarn_amplitude
