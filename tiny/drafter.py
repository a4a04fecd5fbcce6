"""The DFlash drafter for training: many anchors of one sequence drafted at once.

A block is [anchor, mask x 7] at positions s..s+7. Its queries see the context (target features of
positions before s, projected by each layer's own k/v) and the whole block, not causally. Slot k
predicts the token at s+k. Embedding and head are the target's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from model import linear, mlp, rms_norm
from rope import cos_sin, rotate_halves
from shape import DraftShape, Shape


def init(s: Shape, d: DraftShape, seed: int) -> dict:
    """Float32 parameters, stacked over layers; `mask` is the embedding row of the mask id."""
    rng = np.random.default_rng(seed)

    def normal(*dims, gain=1.0):
        return jnp.asarray(rng.standard_normal(dims, np.float32) * gain * dims[-1] ** -0.5)

    n, h = d.layers, s.hidden
    wide, narrow = d.heads * d.head_dim, d.kv_heads * d.head_dim
    return {
        "mask": normal(h, gain=4.0),
        "fc": normal(h, len(d.taps) * h),
        "hidden_norm": jnp.ones(h),
        "norm": jnp.ones(h),
        "input_norm": jnp.ones((n, h)),
        "post_norm": jnp.ones((n, h)),
        "q": normal(n, wide, h),
        "k": normal(n, narrow, h),
        "v": normal(n, narrow, h),
        "o": normal(n, h, wide, gain=0.5),
        "q_norm": jnp.ones((n, d.head_dim)),
        "k_norm": jnp.ones((n, d.head_dim)),
        "gate": normal(n, d.width, h),
        "up": normal(n, d.width, h),
        "down": normal(n, h, d.width, gain=0.5),
    }


def features(outputs, d: DraftShape):
    """The tapped layers' outputs side by side: [B, L, taps * D]."""
    return jnp.concatenate([outputs[i] for i in d.taps], -1)


def _heads(x, w, count, dim):
    return linear(x, w).reshape(*x.shape[:-1], count, dim)


def _keys(dp, i, x, cos, sin, s: Shape, d: DraftShape):
    k = rms_norm(_heads(x, dp["k"][i], d.kv_heads, d.head_dim), dp["k_norm"][i], s.eps)
    return rotate_halves(k, cos, sin).astype(x.dtype)


def draft(dp, target, taps, tokens, anchors, s: Shape, d: DraftShape):
    """Hidden states after the final norm, [B, A, block, D].

    taps [B, L, taps*D], tokens int32 [B, L], anchors int32 [B, A].
    """
    assert d.heads == d.kv_heads
    context = rms_norm(linear(taps, dp["fc"]), dp["hidden_norm"], s.eps)
    batch, length = tokens.shape
    slots = jnp.arange(d.block)
    anchor_tokens = jnp.take_along_axis(tokens, anchors, 1)
    mask_row = dp["mask"].astype(context.dtype)
    h = jnp.where(
        (slots == 0)[:, None], target["embed"][anchor_tokens][:, :, None], mask_row
    )  # [B, A, block, D]
    position = anchors[..., None] + slots  # [B, A, block]
    cos_b, sin_b = (x[..., None, :] for x in cos_sin(position, d.head_dim, s))
    cos_c, sin_c = (x[..., None, :] for x in cos_sin(jnp.arange(length), d.head_dim, s))
    distance = position[..., None] - jnp.arange(length)  # [B, A, block, L]
    before = jnp.arange(length) < anchors[..., None, None]
    for i, kind in enumerate(d.layer_types):
        x = rms_norm(h, dp["input_norm"][i], s.eps)

        q = rms_norm(_heads(x, dp["q"][i], d.heads, d.head_dim), dp["q_norm"][i], s.eps)
        q = rotate_halves(q, cos_b, sin_b).astype(h.dtype)
        k_block, k_context = (
            _keys(dp, i, x, cos_b, sin_b, s, d),
            _keys(dp, i, context, cos_c, sin_c, s, d),
        )
        v_block = _heads(x, dp["v"][i], d.kv_heads, d.head_dim)
        v_context = _heads(context, dp["v"][i], d.kv_heads, d.head_dim)
        visible = before
        if kind == "sliding_attention":
            visible = visible & (distance < d.window)
        of_context = jnp.einsum(
            "bakhd,blhd->bhakl", q, k_context, preferred_element_type=jnp.float32
        )
        of_context = jnp.where(visible[:, None], of_context, -1e30)
        of_block = jnp.einsum("bakhd,bajhd->bhakj", q, k_block, preferred_element_type=jnp.float32)
        scores = jnp.concatenate([of_context, of_block], -1) * d.head_dim**-0.5
        weights = jax.nn.softmax(scores, -1).astype(h.dtype)
        out = jnp.einsum("bhakl,blhd->bakhd", weights[..., :length], v_context)
        out = out + jnp.einsum("bhakj,bajhd->bakhd", weights[..., length:], v_block)
        h = h + linear(out.reshape(*h.shape[:-1], -1), dp["o"][i])
        x = rms_norm(h, dp["post_norm"][i], s.eps)
        h = h + mlp(x, dp["gate"][i], dp["up"][i], dp["down"][i])
    return rms_norm(h, dp["norm"], s.eps)


def slot_logits(dp, target, taps, tokens, anchors, s: Shape, d: DraftShape):
    """Float32 logits of the mask slots: [B, A, block - 1, V]."""
    hidden = draft(dp, target, taps, tokens, anchors, s, d)[:, :, 1:]
    return jnp.einsum("bakd,vd->bakv", hidden, target["head"], preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames=("s", "d", "top"))
def top_proposals(dp, target, taps, tokens, anchors, *, s: Shape, d: DraftShape, top: int = 64):
    """Per slot the `top` best log-probabilities (temperature 1) and ids, lower id first."""
    logp = jax.nn.log_softmax(slot_logits(dp, target, taps, tokens, anchors, s, d))
    return jax.lax.top_k(logp, top)
