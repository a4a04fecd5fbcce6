"""Text from the packed target: cached, absorbed decoding of many sequences at once."""

import functools

import data
import jax
import jax.numpy as jnp
from model import feed_forward, linear, queries_and_rows, rms_norm
from rope import softmax_scale
from shape import Shape
from special import SPECIAL

THINK, END_THINK = SPECIAL["<think>"], SPECIAL["</think>"]


def decode_one(p, cache, tokens, t, s: Shape, capacity=None):
    """tokens [B] at position t -> (logits float32 [B, V], cache). cache: a [B, S, R+PE] a layer."""
    h = p["embed"][tokens]
    new_cache = []
    for i in range(s.layers):
        x = rms_norm(h, p["input_norm"][i], s.eps)
        q, latent, k_pe = queries_and_rows(p, i, x, t, s)
        rows = jnp.concatenate([latent, k_pe], -1)[:, None]
        rows = jax.lax.dynamic_update_slice(cache[i], rows.astype(cache[i].dtype), (0, t, 0))
        new_cache.append(rows)
        kv_b = p["kv_b"][i].reshape(s.heads, s.nope + s.value, s.latent)
        q_lat = jnp.einsum("bhn,hnr->bhr", q[..., : s.nope], kv_b[:, : s.nope])
        q_row = jnp.concatenate([q_lat, q[..., s.nope :]], -1)
        scores = jnp.einsum("bhr,bsr->bhs", q_row, rows, preferred_element_type=jnp.float32)
        scores = scores * softmax_scale(s.nope + s.rope, s)
        seen = jnp.arange(rows.shape[1]) <= t
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1).astype(h.dtype)
        mixed = jnp.einsum("bhs,bsr->bhr", weights, rows[..., : s.latent])
        a = jnp.einsum("bhr,hvr->bhv", mixed, kv_b[:, s.nope :])
        h = h + linear(a.reshape(h.shape[0], -1), p["o"][i])
        x = rms_norm(h, p["post_norm"][i], s.eps)
        h = h + feed_forward(p, i, x, s, capacity)[0]
    final = rms_norm(h, p["norm"], s.eps)
    logits = jnp.einsum("bd,vd->bv", final, p["head"], preferred_element_type=jnp.float32)
    return logits, tuple(new_cache)


def nucleus(logits, top_p: float):
    """Keeps the smallest set of most probable ids whose probability reaches top_p. [B, V]."""
    ordered = -jnp.sort(-logits, -1)
    p = jax.nn.softmax(ordered, -1)
    kept = jnp.cumsum(p, -1) - p < top_p
    lowest = jnp.where(kept, ordered, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("shape", "length", "top_p", "capacity"))
def generate(
    p,
    prompts,
    prompt_length,
    temperature,
    key,
    *,
    shape: Shape,
    length: int,
    top_p: float = 1.0,
    capacity: float | None = None,
):
    """Continues prompts to `length` tokens in all; top_p is applied after the temperature.

    capacity: None for exact experts; a factor is faster and good enough to make training text.

    prompts int32 [B, P], prompt_length int32 [B] (<= P), temperature float32 [B] (0: greedy) ->
    tokens int32 [B, length].
    """
    batch = prompts.shape[0]
    prompts = jnp.pad(prompts, ((0, 0), (0, length - prompts.shape[1])))
    row = shape.latent + shape.rope
    cache = tuple(jnp.zeros((batch, length, row), p["embed"].dtype) for _ in range(shape.layers))

    def step(carry, t):
        cache, tokens = carry
        logits, cache = decode_one(p, cache, tokens, t, shape, capacity)
        noise = jax.random.gumbel(jax.random.fold_in(key, t), logits.shape)
        noise = jnp.where(temperature[:, None] > 0, noise, 0.0)
        scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
        if top_p < 1:
            scaled = nucleus(scaled, top_p)
        drawn = jnp.argmax(scaled + noise, -1)
        tokens = jnp.where(t + 1 < prompt_length, prompts[:, t + 1], drawn)
        return (cache, tokens), tokens

    first = prompts[:, 0]
    _, rest = jax.lax.scan(step, (cache, first), jnp.arange(length - 1))
    return jnp.concatenate([first[:, None], rest.T], 1)


def prompts_from(stream: data.Stream, key, batch: int, longest: int = 160):
    """Prompts for self-generation: text of 1-64 tokens, or a dialogue up to its first answer."""
    k_window, k_short, k_length = jax.random.split(key, 3)
    starts = data.window_starts(stream, k_window, batch, longest, starts_share=0.3)
    tokens = data.windows(stream, starts, longest)
    short = jax.random.uniform(k_short, (batch,)) < 0.25
    length = jnp.where(
        short,
        jax.random.randint(k_length, (batch,), 1, 16),
        jax.random.randint(k_length, (batch,), 16, 65),
    )
    dialogue = (tokens[:, 0] == SPECIAL["<|im_user|>"]) | (tokens[:, 0] == SPECIAL["<|im_system|>"])
    is_think = tokens == THINK
    at = is_think.argmax(1)
    after = jnp.take_along_axis(tokens, jnp.minimum(at + 1, longest - 1)[:, None], 1)[:, 0]
    answer = at + 1 + (after == END_THINK)
    found = dialogue & is_think.any(1) & (answer < longest)
    return tokens, jnp.where(found, answer, length)
