"""The drafter over pages, batches and windows. Its numbers are checked against golden data."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import DrafterConfig
from kimi_jax.speculation import drafter, weights

CONFIG = DrafterConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-5,
    vocab_size=50,
    block_size=5,
    mask_token_id=48,
    target_layer_ids=(0, 2),
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=300,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=2048,
)
CONTEXT = 1024
# Around a block of the stream, around the window, and nothing at all.
LENGTHS = (0, 1, drafter.BLOCK - 1, drafter.BLOCK, drafter.BLOCK + 1, 299, 300, 301, 700, CONTEXT)
EMBED, HEAD = jnp.float32(
    np.random.default_rng(1).normal(size=(2, CONFIG.vocab_size, CONFIG.hidden_size))
)


@jax.jit
def project(parameters, taps, positions):
    return drafter.project_context(parameters, CONFIG, taps, positions)


@functools.cache
def random_weights(dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def fill(leaf):
        if len(leaf.shape) == 1:  # a norm
            return jnp.asarray(1 + 0.2 * rng.normal(size=leaf.shape), dtype)
        return jnp.asarray(rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5, dtype)

    return jax.tree.map(fill, weights.abstract(CONFIG, dtype))


@functools.cache
def random_context(dtype=jnp.float32):
    """k, v [Ld, CONTEXT, KV, HD] of made-up taps."""
    shape = (len(CONFIG.target_layer_ids), CONTEXT, CONFIG.hidden_size)
    taps = jax.random.normal(jax.random.key(2), shape).astype(dtype)
    return project(random_weights(dtype), taps, jnp.arange(CONTEXT))


@functools.partial(jax.jit, static_argnames="config")
def propose(parameters, k, v, page_table, length, anchor, config=CONFIG):
    return drafter.propose_logits(parameters, config, EMBED, HEAD, k, v, page_table, length, anchor)


def paged(rows, lengths, page_size, rng):
    """Pages [Ld, pages, P, KV, HD], NaN where nothing was written, and the sequences' tables.

    Every sequence gets its own pages, in random order; its context is the first `length` of rows.
    """
    per_sequence = -(-CONTEXT // page_size)
    table = 1 + rng.permutation(len(lengths) * per_sequence).reshape(len(lengths), per_sequence)
    shape = (rows.shape[0], table.size + 1, page_size, *rows.shape[2:])
    pages = np.full(shape, np.nan, rows.dtype)
    for sequence, length in enumerate(lengths):
        place = np.arange(length)
        ids, offsets = table[sequence, place // page_size], place % page_size
        pages[:, ids, offsets] = rows[:, :length]
        table[sequence, -(-length // page_size) :] = 0  # page 0 is nobody's
    return pages, table


@functools.cache
def logits(lengths, page_size, anchors=None):
    k, v = (np.asarray(rows) for rows in random_context())
    rng = np.random.default_rng(3)
    state = rng.bit_generator.state
    pages_k, table = paged(k, lengths, page_size, rng)
    rng.bit_generator.state = state
    pages_v, _ = paged(v, lengths, page_size, rng)
    anchors = np.arange(len(lengths)) if anchors is None else np.array(anchors)
    result = propose(
        *(random_weights(), pages_k, pages_v, jnp.asarray(table), jnp.array(lengths)),
        jnp.asarray(anchors, jnp.int32),
    )
    return np.asarray(result)


@pytest.mark.parametrize("page_size", [7, 64])
def test_streaming_over_pages_of_any_size_equals_one_page(page_size):
    one_page = logits(LENGTHS, CONTEXT)
    assert one_page.shape == (len(LENGTHS), CONFIG.depth, CONFIG.vocab_size)
    np.testing.assert_allclose(logits(LENGTHS, page_size), one_page, atol=2e-5)


def test_a_sequence_gets_the_same_logits_alone_and_in_a_batch_of_longer_ones():
    together = logits(LENGTHS, 64)
    for i in (0, 4, 8):
        alone = logits(LENGTHS[i : i + 1], 64, anchors=(i,))
        np.testing.assert_allclose(alone[0], together[i], atol=2e-5)


def test_sliding_layers_see_nothing_beyond_their_window():
    sliding = dataclasses.replace(CONFIG, layer_types=("sliding_attention",) * 2)
    k, v = random_context()
    length = 700
    first_seen = length - sliding.sliding_window + 1  # by the anchor
    table = jnp.arange(CONTEXT // 64)[None]

    def run(rows_k, rows_v):
        by_page = (CONFIG.num_hidden_layers, -1, 64, *k.shape[2:])
        pages = rows_k.reshape(by_page), rows_v.reshape(by_page)
        arguments = (random_weights(), *pages, table, jnp.array([length]), jnp.array([3]))
        return np.asarray(propose(*arguments, sliding))

    base = run(k, v)
    outside, edge = slice(0, first_seen), slice(first_seen, first_seen + 1)
    np.testing.assert_array_equal(run(k.at[:, outside].add(9), v.at[:, outside].add(9)), base)
    assert np.abs(run(k, v.at[:, edge].add(9)) - base).max() > 1e-3


def test_context_of_a_part_equals_that_part_of_the_whole():
    whole = random_context()
    shape = (len(CONFIG.target_layer_ids), CONTEXT, CONFIG.hidden_size)
    taps = jax.random.normal(jax.random.key(2), shape)
    part = slice(500, 524)
    for rows, expected in zip(
        project(random_weights(), taps[:, part], jnp.arange(CONTEXT)[part]), whole, strict=True
    ):
        np.testing.assert_allclose(rows, expected[:, part], atol=2e-6)


def test_bfloat16_weights_give_nearly_the_logits_of_float32():
    def run(dtype):
        k, v = random_context(dtype)
        pages = (rows.reshape(2, 16, 64, *rows.shape[2:]) for rows in (k, v))
        arguments = (jnp.arange(16)[None], jnp.array([700]), jnp.array([3]))
        return np.asarray(propose(random_weights(dtype), *pages, *arguments))

    exact, rounded = run(jnp.float32), run(jnp.bfloat16)
    assert rounded.dtype == np.float32
    assert np.linalg.norm(rounded - exact) < 0.05 * np.linalg.norm(exact)
