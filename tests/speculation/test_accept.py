"""Walking down a tree and cutting at stops, against one-token-at-a-time oracles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.speculation import accept
from kimi_jax.speculation import tree as trees

DEPTH, VOCAB, BUDGET = 4, 3, 12


@jax.jit
def build(log_probs, anchor, n_live):
    candidates = trees.top_candidates(log_probs, BUDGET)
    return trees.build(candidates, anchor, n_live, budget=BUDGET)


@jax.jit
def chain(log_probs, anchor, n_live):
    candidates = trees.top_candidates(log_probs, BUDGET)
    return trees.chain(candidates, anchor, n_live, budget=BUDGET)


walk = jax.jit(functools.partial(accept.walk, depth=DEPTH))
cut = jax.jit(accept.cut)


def follow(tree, sequence, drawn, row=0):
    """Rows of the walk, by plain recursion from `row`."""
    if not tree.live[sequence, row]:
        return []
    for child in range(row + 1, tree.budget + 1):
        is_child = tree.live[sequence, child] and tree.parents[sequence, child] == row
        if is_child and tree.tokens[sequence, child] == drawn[sequence, row]:
            return [row, *follow(tree, sequence, drawn, child)]
    return [row]


def to_host(tree):
    return jax.tree.map(np.asarray, tree)


# Scores in quarters make ties and near-certain tokens; -1000 stands for none.
slots = st.lists(
    st.lists(st.sampled_from([0, -1, -2, -5, -1000]), min_size=VOCAB, max_size=VOCAB),
    min_size=DEPTH,
    max_size=DEPTH,
)


@settings(max_examples=150)
@given(
    st.lists(slots, min_size=2, max_size=2),
    st.lists(st.integers(-1, BUDGET), min_size=2, max_size=2),
    st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=BUDGET + 1, max_size=BUDGET + 1),
        min_size=2,
        max_size=2,
    ),
)
def test_walk_equals_a_recursive_descent(scores, n_live, drawn):
    log_probs = np.array(scores, np.float32) / 4
    log_probs[log_probs == -250] = -np.inf
    drawn = np.array(drawn, np.int32)
    tree = build(log_probs, np.zeros(2, np.int32), np.array(n_live, np.int32))
    result, tree = to_host(walk(tree, drawn)), to_host(tree)
    for i in range(2):
        rows = follow(tree, i, drawn)
        end = [-1] * (DEPTH + 1 - len(rows))
        assert result.path[i].tolist() == rows + end
        assert result.tokens[i].tolist() == [drawn[i, row] for row in rows] + end
        assert result.accepted[i] == max(len(rows) - 1, 0)


def test_every_path_of_a_tree_can_be_walked_to_its_end():
    log_probs = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (1, DEPTH, VOCAB)))
    tree = to_host(build(log_probs, np.zeros(1, np.int32), np.full(1, BUDGET, np.int32)))
    for row in range(BUDGET + 1):
        way = [row]
        while way[0] != 0:
            way.insert(0, int(tree.parents[0, way[0]]))
        drawn = np.full((1, BUDGET + 1), VOCAB, np.int32)  # an id of no node
        for parent, child in zip(way, way[1:], strict=False):
            drawn[0, parent] = tree.tokens[0, child]
        result = to_host(walk(tree, drawn))
        assert result.path[0].tolist() == way + [-1] * (DEPTH + 1 - len(way))
        assert result.tokens[0, len(way) - 1] == VOCAB, "the bonus is drawn behind the last row"


def test_draws_behind_dead_rows_do_not_matter():
    log_probs = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (1, DEPTH, VOCAB)))
    tree = build(log_probs, np.zeros(1, np.int32), np.full(1, 3, np.int32))
    drawn = np.zeros((1, BUDGET + 1), np.int32)
    garbage = drawn.copy()
    garbage[:, 4:] = np.iinfo(np.int32).min
    jax.tree.map(np.testing.assert_array_equal, walk(tree, drawn), walk(tree, garbage))


def prefix_of(tree, sequence, row):
    """Tokens from the root, which is left out, to `row`."""
    prefix = []
    while row > 0:
        prefix.insert(0, int(tree.tokens[sequence, row]))
        row = tree.parents[sequence, row]
    return tuple(prefix)


def test_a_tree_accepts_at_least_what_its_own_chain_and_smaller_trees_accept():
    rng = np.random.default_rng(2)
    batch = 60
    log_probs = np.asarray(jax.nn.log_softmax(rng.normal(size=(batch, DEPTH, VOCAB)) * 2))
    draws = [{} for _ in range(batch)]  # the target's draw behind each prefix, whatever the tree

    def accepted(tree):
        tree = to_host(tree)
        drawn = np.zeros(tree.tokens.shape, np.int32)
        for i, row in np.ndindex(drawn.shape):
            prefix = prefix_of(tree, i, row)
            slot = log_probs[i, min(len(prefix), DEPTH - 1)]
            sample = (slot + rng.gumbel(size=VOCAB)).argmax()
            drawn[i, row] = draws[i].setdefault(prefix, sample)
        return np.asarray(walk(tree, drawn).accepted)

    anchor = np.zeros(batch, np.int32)
    smaller = np.zeros(batch, np.int32)
    for budget in (1, 2, 4, 8, BUDGET):
        tree = to_host(build(log_probs, anchor, np.full(batch, budget, np.int32)))
        spine = np.zeros(batch, np.int32)  # how much of the chain the tree holds
        for i, best in enumerate(log_probs.argmax(axis=-1)):
            prefixes = {prefix_of(tree, i, row) for row in range(budget + 1)}
            spine[i] = sum(tuple(best[: n + 1]) in prefixes for n in range(DEPTH))
        by_tree = accepted(tree)
        assert (by_tree >= accepted(chain(log_probs, anchor, spine))).all()
        assert (by_tree >= smaller).all()
        smaller = by_tree
    assert smaller.mean() > 1, "the draws hardly ever meet the tree: the test shows nothing"


def feed_one_by_one(tokens, length, max_length, min_length, stop_ids):
    """(count, finish): what a loop that takes a token at a time does."""
    existing = length + 1
    for taken, token in enumerate(tokens):
        if existing >= max_length:
            return taken, accept.FULL
        stops = token in stop_ids and existing >= min_length
        existing += 1
        if stops:
            return taken + 1, accept.STOPPED
    return len(tokens), accept.FULL if existing >= max_length else accept.RUNNING


sequences = st.tuples(
    st.lists(st.integers(0, 4), min_size=1, max_size=DEPTH + 1),  # tokens
    st.integers(0, 6),  # length
    st.integers(1, 14),  # max_length
    st.integers(0, 10),  # min_length
    st.lists(st.sampled_from([-1, 1, 3]), min_size=2, max_size=2),  # stop_ids
    st.booleans(),  # active
)


@settings(max_examples=300)
@given(st.lists(sequences, min_size=3, max_size=3))
def test_cut_equals_taking_one_token_at_a_time(batch):
    tokens, length, max_length, min_length, stop_ids, active = zip(*batch, strict=True)
    padded = np.array([row + [-1] * (DEPTH + 1 - len(row)) for row in tokens], np.int32)
    result = to_host(
        cut(
            padded,
            np.array(active),
            length=np.array(length, np.int32),
            max_length=np.array(max_length, np.int32),
            min_length=np.array(min_length, np.int32),
            stop_ids=np.array(stop_ids, np.int32),
        )
    )
    for i, row in enumerate(tokens):
        count, finish = 0, accept.RUNNING
        if active[i]:
            count, finish = feed_one_by_one(
                row, length[i], max_length[i], min_length[i], stop_ids[i]
            )
        assert (result.count[i], result.finish[i]) == (count, finish)
        assert result.tokens[i].tolist() == row[:count] + [-1] * (DEPTH + 1 - count)


@pytest.mark.parametrize(
    ("tokens", "max_length", "min_length", "count", "finish"),
    [
        ([7, 2, 8, 2, 9], 99, 0, 2, accept.STOPPED),  # the first of two stops
        ([7, 2, 8, 2, 9], 12, 0, 1, accept.FULL),  # full before the stop
        ([7, 2, 8, 2, 9], 13, 0, 2, accept.STOPPED),  # both at one token: the stop is named
        ([7, 2, 8, 2, 9], 99, 13, 4, accept.STOPPED),  # the first came too early to count
        ([7, 8, 9, 7, 8], 16, 0, 5, accept.FULL),  # full with the last token
        ([7, 8, 9, 7, 8], 17, 0, 5, accept.RUNNING),
        ([7, 8, 9, 7, 8], 11, 0, 0, accept.FULL),  # already full
    ],
)
def test_cut_where_several_ends_meet_in_one_block(tokens, max_length, min_length, count, finish):
    result = cut(
        jnp.array([tokens]),
        jnp.array([True]),
        length=jnp.array([10]),  # 11 tokens exist
        max_length=jnp.array([max_length]),
        min_length=jnp.array([min_length]),
        stop_ids=jnp.array([[2, -1]]),
    )
    assert (int(result.count[0]), int(result.finish[0])) == (count, finish)
