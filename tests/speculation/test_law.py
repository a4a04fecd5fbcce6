"""Drawing through trees has exactly the target's law: chi-square on a model whose law is known.

The target is a Markov chain over 8 tokens. Sequences of 4 tokens are generated with the builder,
the keyed draw, the walk and the cut, each sequence under a seed of its own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kimi_jax import sampling
from kimi_jax.speculation import accept
from kimi_jax.speculation import tree as trees

VOCAB, DEPTH, LENGTH = 8, 3, 4
SEQUENCES = 50_000  # x 4 tokens = 200,000 draws
TEMPERATURE = 0.8
START, ANCHOR = 10, 5  # every sequence begins behind position 10, which holds token 5
LOGITS = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5
SHAPES = {"chain": (3, 1), "tree 4": (4, VOCAB), "tree 16": (16, VOCAB)}  # budget, width


def transition() -> np.ndarray:
    """float64 [VOCAB, VOCAB]: probability of the next token, given the last."""
    weights = np.exp(LOGITS.astype(np.float64) / TEMPERATURE)
    return weights / weights.sum(axis=1, keepdims=True)


def drafter(quality: str) -> np.ndarray:
    """float32 [VOCAB, DEPTH, VOCAB]: log-probabilities of each slot, given the anchor."""
    steps = [np.linalg.matrix_power(transition(), slot + 1) for slot in range(DEPTH)]
    good = np.log(np.stack(steps, axis=1))
    table = good if quality == "good" else -good  # the worst tokens first
    return np.asarray(jax.nn.log_softmax(jnp.asarray(table, jnp.float32)))


def exact_draws(tree, length, seed):
    """The keyed draw behind every row, at the position of the token that it draws."""
    position = length[:, None] + tree.depths + 1
    return keyed_draw(tree, position, seed)


def draws_with_one_noise_a_block(tree, length, seed):
    """Wrong: all depths of a block share the noise of its first position."""
    return keyed_draw(tree, jnp.broadcast_to(length[:, None] + 1, tree.depths.shape), seed)


def draws_that_favour_the_draft(tree, length, seed):
    """Wrong: a row whose best child the target finds likely enough accepts it outright."""
    rows = jnp.arange(tree.budget + 1)
    is_child = (tree.parents[:, None, :] == rows[:, None]) & tree.live[:, None, :]
    best = jnp.argmax(is_child, axis=-1)
    token = jnp.take_along_axis(tree.tokens, best, axis=1)
    probability = jnp.asarray(transition(), jnp.float32)[tree.tokens, token]
    likely = is_child.any(axis=-1) & (probability > 0.3)
    return jnp.where(likely, token, exact_draws(tree, length, seed))


def keyed_draw(tree, position, seed):
    noise = sampling.gumbel(seed[:, None], position, jnp.arange(VOCAB, dtype=jnp.uint32))
    rows = tree.tokens.size
    drawn = sampling.draw(
        jnp.asarray(LOGITS)[tree.tokens].reshape(rows, VOCAB),
        temperature=jnp.full(rows, TEMPERATURE),
        top_k=jnp.zeros(rows, jnp.int32),
        top_p=jnp.ones(rows),
        min_p=jnp.zeros(rows),
        noise=noise.reshape(rows, VOCAB),
    )
    return drawn.reshape(tree.tokens.shape)


@functools.partial(jax.jit, static_argnames=("shape", "draws"))
def generate(log_probs, seed, *, shape, draws):
    """(tokens int32 [B, LENGTH], steps of all sequences together)."""
    budget, width = SHAPES[shape]
    batch = seed.shape[0]

    def step(carry):
        length, token, text, steps = carry
        active = length < START + LENGTH
        candidates = trees.top_candidates(log_probs[token], width)
        tree = trees.build(candidates, token, jnp.where(active, budget, -1), budget=budget)
        way = accept.walk(tree, draws(tree, length, seed), depth=DEPTH)
        taken = accept.cut(
            way.tokens,
            active,
            length=length,
            max_length=jnp.full(batch, START + 1 + LENGTH),
            min_length=jnp.zeros(batch, jnp.int32),
            stop_ids=jnp.full((batch, 1), -1),
        )
        place = length[:, None] - START + jnp.arange(DEPTH + 1)
        place = jnp.where(taken.tokens >= 0, place, LENGTH)
        text = text.at[jnp.arange(batch)[:, None], place].set(taken.tokens, mode="drop")
        length = length + taken.count
        token = jnp.where(active, text[jnp.arange(batch), length - START - 1], token)
        return length, token, text, steps + active.sum()

    start = (
        jnp.full(batch, START),
        jnp.full(batch, ANCHOR),
        jnp.full((batch, LENGTH), -1),
        jnp.int32(0),
    )
    carry = lax.while_loop(lambda carry: jnp.any(carry[0] < START + LENGTH), step, start)
    return carry[2], carry[3]


@functools.cache
def texts(quality, shape, draws=exact_draws):
    """(int [SEQUENCES, LENGTH] tokens, tokens a step)."""
    words = np.random.default_rng(1).integers(0, 2**32, size=(SEQUENCES, 2), dtype=np.uint32)
    tokens, steps = generate(drafter(quality), words, shape=shape, draws=draws)
    return np.asarray(tokens), tokens.size / int(steps)


def p_value(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square test of counts against probabilities; cells that expect under 5 are joined."""
    expected = probabilities * observed.sum()
    small = expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(jax.scipy.stats.chi2.sf(statistic, len(expected) - 1))


def smallest_p_value(tokens: np.ndarray) -> float:
    """Over the joint law of tokens 1, 2, 3 and that of tokens 3, 4."""
    step = transition()
    first = step[ANCHOR]
    third = first @ step @ step
    joint_123 = first[:, None, None] * step[:, :, None] * step[None]
    joint_34 = third[:, None] * step

    def count(columns: np.ndarray) -> np.ndarray:
        cells = np.ravel_multi_index(tuple(columns.T), (VOCAB,) * columns.shape[1])
        return np.bincount(cells, minlength=VOCAB ** columns.shape[1])

    return min(
        p_value(count(tokens[:, :3]), joint_123.ravel()),
        p_value(count(tokens[:, 2:]), joint_34.ravel()),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quality", ["good", "bad"])
def test_texts_drawn_through_a_tree_have_the_targets_law(quality, shape):
    tokens, _ = texts(quality, shape)
    assert smallest_p_value(tokens) > 1e-4


def test_every_drafter_and_tree_draws_the_same_text_for_a_seed():
    plain, _ = texts("bad", "chain")
    lengths = {}
    for quality in ("good", "bad"):
        for shape in SHAPES:
            tokens, lengths[quality, shape] = texts(quality, shape)
            np.testing.assert_array_equal(tokens, plain)
    for quality in ("good", "bad"):
        assert lengths[quality, "tree 16"] > lengths[quality, "tree 4"] >= 1
    assert lengths["good", "tree 16"] > lengths["bad", "tree 16"]
    assert lengths["good", "chain"] > 1.5


@pytest.mark.parametrize("wrong", [draws_with_one_noise_a_block, draws_that_favour_the_draft])
@pytest.mark.parametrize("shape", ["chain", "tree 16"])
def test_a_wrong_walk_does_not_have_the_targets_law(shape, wrong):
    tokens, _ = texts("good", shape, draws=wrong)
    assert smallest_p_value(tokens) < 1e-6
