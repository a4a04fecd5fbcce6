"""The compiled tree builder against a plain best-first heap, and the trees' structure."""

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.speculation import tree as trees
from kimi_jax.speculation.tree import Candidates, Tree

BUDGETS = (0, 1, 2, 3, 4, 7, 8, 9, 12, 15, 16, 24, 31, 32, 33, 48, 63)
DEPTH = 7


def heap_tree(log_probs: np.ndarray, budget: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The reference: (ranks, tokens) of the best prefixes in pop order, by a heap of Python tuples.

    log_probs [DEPTH, V]. Scores are summed from the first token on, in float32; a smaller rank
    tuple is popped first of equals; prefixes of probability zero are no nodes.
    """
    depth, vocab = log_probs.shape
    order = [sorted(range(vocab), key=lambda v, row=row: (-row[v], v)) for row in log_probs]

    def item(ranks: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        score = np.float32(0.0)
        for slot, rank in enumerate(ranks):
            score = np.float32(score + log_probs[slot][order[slot][rank]])
        return -float(score), ranks

    heap, nodes = [item((0,))], []
    while heap and len(nodes) < budget:
        negated, ranks = heapq.heappop(heap)
        if negated == np.inf:
            break
        nodes.append((ranks, tuple(order[slot][rank] for slot, rank in enumerate(ranks))))
        if ranks[-1] + 1 < vocab:
            heapq.heappush(heap, item((*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < depth:
            heapq.heappush(heap, item((*ranks, 0)))
    return nodes


def expected_rows(log_probs: np.ndarray, anchor: int, n_live: int) -> list[tuple[int, int, int]]:
    """(token, parent row, depth) of every live row of the reference's tree."""
    nodes = heap_tree(log_probs, n_live)
    row_of = {(): 0} | {ranks: row for row, (ranks, _) in enumerate(nodes, start=1)}
    below = [(tokens[-1], row_of[ranks[:-1]], len(ranks)) for ranks, tokens in nodes]
    return [(anchor, -1, 0), *below]


def live_rows(tree: Tree, sequence: int) -> list[tuple[int, int, int]]:
    live = tree.live[sequence]
    assert live[: live.sum()].all(), "live rows come first"
    columns = (tree.tokens, tree.parents, tree.depths)
    return list(zip(*(c[sequence][live].tolist() for c in columns), strict=True))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.float32(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def cases(seed: int, count: int, depth: int, vocab: int) -> np.ndarray:
    """float32 [count, depth, vocab]: smooth, peaked, tied, all equal, certain, with holes."""
    rng = np.random.default_rng(seed)
    shape = (depth, vocab)

    def case(kind: int) -> np.ndarray:
        if kind == 0:
            return log_softmax(rng.normal(size=shape))
        if kind == 1:  # one slot after the other less sure, as a drafter is
            return log_softmax(rng.normal(size=shape) * rng.uniform(1, 12, size=(depth, 1)))
        if kind == 2:  # dyadic values: sums are exact, so different prefixes tie exactly
            return -rng.integers(0, 4, size=shape).astype(np.float32) / 2
        if kind == 3:
            return np.full(shape, -np.log(np.float32(vocab)), np.float32)
        if kind == 4:  # certain tokens: children tie with their parents
            return np.where(rng.random(shape) < 0.1, 0.0, -rng.integers(1, 3, shape)).astype("f4")
        holes = log_softmax(rng.normal(size=shape))
        return np.where(rng.random(shape) < 0.9, -np.inf, holes).astype(np.float32)

    return np.stack([case(i % 6) for i in range(count)])


@functools.partial(jax.jit, static_argnames=("budget", "forbidden"))
def compiled(log_probs, anchor, n_live, *, budget, forbidden=None) -> Tree:
    candidates = trees.top_candidates(log_probs, budget, forbidden=forbidden)
    return trees.build(candidates, anchor, n_live, budget=budget)


def to_host(tree):
    return jax.tree.map(np.asarray, tree)


def build(log_probs, anchor, n_live, **options) -> Tree:
    anchor, n_live = np.asarray(anchor, np.int32), np.asarray(n_live, np.int32)
    return to_host(compiled(log_probs, anchor, n_live, **options))


def build_all(log_probs: np.ndarray, budget: int, **options) -> Tree:
    """Full trees, with the sequence's index as anchor."""
    count = len(log_probs)
    return build(log_probs, np.arange(count), np.full(count, budget), budget=budget, **options)


@functools.partial(jax.jit, static_argnames="budget")
def chain(log_probs, anchor, n_live, *, budget) -> Tree:
    candidates = trees.top_candidates(log_probs, 3)
    return trees.chain(candidates, anchor, n_live, budget=budget)


@pytest.mark.parametrize(("budget", "size"), [(8, 53), (16, 285), (32, 1379), (63, 5788)])
def test_lattice_of_seven_slots_has_the_known_number_of_prefixes(budget, size):
    assert len(trees.lattice(budget, DEPTH, budget).lengths) == size


def test_lattice_is_lexicographic_and_holds_exactly_the_prefixes_whose_dominators_fit():
    budget, depth = 9, 3
    expected = []
    for length in range(1, depth + 1):
        for ranks in itertools.product(range(budget), repeat=length):
            dominators = sum(
                1
                for n in range(1, length + 1)
                for _ in itertools.product(*(range(r + 1) for r in ranks[:n]))
            )
            if dominators <= budget:
                expected.append(ranks)
    table = trees.lattice(budget, depth, budget)
    prefixes = [tuple(r for r in row if r >= 0) for row in table.ranks.tolist()]
    assert prefixes == sorted(expected)
    assert table.lengths.tolist() == [len(prefix) for prefix in prefixes]
    for prefix, way in zip(prefixes, table.ways.tolist(), strict=True):
        assert [prefixes[row] for row in way if row >= 0] == [
            prefix[: n + 1] for n in range(len(prefix))
        ]


@pytest.mark.parametrize("budget", BUDGETS)
def test_builder_equals_the_best_first_heap(budget):
    count = 66  # 17 budgets x 66 = 1122 cases
    log_probs = cases(seed=budget, count=count, depth=DEPTH, vocab=70)
    tree = build_all(log_probs, budget)
    for i in range(count):
        assert live_rows(tree, i) == expected_rows(log_probs[i], i, budget), f"case {i}"


@pytest.mark.parametrize(
    ("depth", "vocab", "budget"),
    [
        *((1, 1, 8), (1, 6, 3), (1, 6, 33), (2, 2, 1), (2, 2, 8)),
        *((5, 1, 33), (5, 6, 16), (15, 1, 8), (15, 2, 33), (15, 6, 33)),
    ],
)
def test_builder_equals_the_heap_for_other_depths_and_vocabularies_below_the_budget(
    depth, vocab, budget
):
    log_probs = cases(seed=depth, count=12, depth=depth, vocab=vocab)
    tree = build_all(log_probs, budget)
    for i in range(12):
        assert live_rows(tree, i) == expected_rows(log_probs[i], i, budget), f"case {i}"


def test_budgets_are_data_in_one_program_and_trees_nest():
    log_probs = cases(seed=1, count=66, depth=DEPTH, vocab=70)
    n_live = np.random.default_rng(2).integers(0, 64, size=66)
    full = build_all(log_probs, 63)
    programs = compiled._cache_size()
    tree = build(log_probs, np.arange(66), n_live, budget=63)
    assert compiled._cache_size() == programs
    for i, n in enumerate(n_live):
        assert live_rows(tree, i) == live_rows(full, i)[: n + 1]
        assert live_rows(tree, i) == expected_rows(log_probs[i], i, n)


@pytest.mark.parametrize("budget", [0, 1, 31, 32, 63])
def test_ancestors_depths_and_order_equal_a_parent_walk(budget):
    log_probs = cases(seed=3, count=66, depth=DEPTH, vocab=70)
    tree = build_all(log_probs, budget)
    rows = budget + 1
    assert tree.budget == budget
    assert tree.ancestors.shape == (66, rows, -(-rows // 32))
    assert tree.ancestors.dtype == np.uint32
    for i in range(0, 66, 2):
        parents = tree.parents[i]
        for row in range(int(tree.live[i].sum())):
            way = [row]
            while way[-1] != 0:
                assert parents[way[-1]] < way[-1], "a parent comes before its children"
                way.append(int(parents[way[-1]]))
            words = [int(word) for word in tree.ancestors[i, row]]
            bits = {j for j in range(32 * len(words)) if words[j // 32] >> (j % 32) & 1}
            assert bits == set(way)
            assert int(tree.depths[i, row]) == len(way) - 1


def test_dead_rows_hold_the_anchor_and_see_nothing():
    log_probs = cases(seed=4, count=3, depth=DEPTH, vocab=30)
    tree = build(log_probs, [5, 6, 7], [2, 0, -1], budget=40)
    assert tree.live.sum(axis=1).tolist() == [3, 1, 0]
    dead = ~tree.live
    assert (tree.tokens == [[5], [6], [7]])[dead].all()
    assert (tree.parents[dead] == -1).all()
    assert (tree.depths[dead] == 0).all()
    assert (tree.ancestors[dead] == 0).all()


def test_root_only_equals_a_tree_of_which_no_node_is_live():
    log_probs = cases(seed=5, count=4, depth=DEPTH, vocab=9)
    anchor, n_live = np.array([3, 1, 4, 1]), np.array([0, 0, -1, 0])
    built = build(log_probs, anchor, n_live, budget=8)
    root_only = jax.jit(trees.root_only, static_argnames="budget")
    jax.tree.map(np.testing.assert_array_equal, built, root_only(anchor, n_live, budget=8))
    assert root_only(anchor, n_live).tokens.shape == (4, 1)


@pytest.mark.parametrize("budget", [1, 7, 40])
def test_chain_holds_the_best_token_of_every_slot(budget):
    log_probs = cases(seed=6, count=5, depth=DEPTH, vocab=20)
    n_live = np.array([budget, budget, budget, 2, 0])
    tree = to_host(chain(log_probs, np.arange(5), n_live, budget=budget))
    assert tree.tokens.shape == (5, budget + 1)
    best = log_probs.argmax(axis=-1)  # the first of equals
    for i in range(5):
        length = min(n_live[i], budget, DEPTH)
        expected = [(best[i, d], d, d + 1) for d in range(length)]
        assert live_rows(tree, i) == [(i, -1, 0), *expected]


def test_tree_of_width_one_equals_the_chain():
    log_probs = cases(seed=7, count=4, depth=DEPTH, vocab=20)
    only_best = np.where(log_probs == log_probs.max(-1, keepdims=True), log_probs, -np.inf)
    only_best[np.arange(20) > only_best.argmax(-1)[..., None]] = -np.inf  # of equals, the first
    tree = build_all(only_best, 12)
    spine = chain(log_probs, np.arange(4), np.full(4, 12), budget=12)
    jax.tree.map(np.testing.assert_array_equal, tree, spine)


def test_equal_log_probs_in_a_slot_rank_by_lower_id():
    log_probs = np.full((1, 1, 3000), -3.0, np.float32)
    log_probs[0, 0, [2999, 17, 1500]] = -1.0
    candidates = trees.top_candidates(jnp.asarray(log_probs), 6)
    assert candidates.ids[0, 0].tolist() == [17, 1500, 2999, 0, 1, 2]


@pytest.mark.parametrize("vocab", [20_480, 20_001])  # a whole number of groups, and not
@pytest.mark.parametrize("k", [1, 8, 31])
def test_candidates_of_a_large_vocabulary_equal_a_stable_sort(k, vocab):
    rng = np.random.default_rng(k)
    smooth = rng.normal(size=vocab)
    slots = [
        log_softmax(smooth),
        log_softmax(np.sort(smooth)),  # all of the best in the last groups
        log_softmax(-np.sort(smooth)),
        -rng.integers(0, 40, size=vocab) / 8,  # hundreds tie at the top
        np.full(vocab, -1.0),
        np.where(rng.random(vocab) < 0.9995, -np.inf, -1.0),  # fewer than k are possible
        np.full(vocab, -np.inf),
    ]
    log_probs = np.stack(slots).astype(np.float32)[None]
    top = jax.jit(trees.top_candidates, static_argnums=1)(log_probs, k)
    order = np.argsort(-log_probs, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(top.ids, order)
    np.testing.assert_array_equal(top.values, np.take_along_axis(log_probs, order, axis=-1))


def test_zeros_of_either_sign_are_one_value():
    log_probs = np.full((1, DEPTH, 5), -np.inf, np.float32)
    log_probs[0, ::2, 1] = -0.0
    log_probs[0, 1::2, 1] = 0.0
    log_probs[0, :, 3] = 0.0
    tree = build_all(log_probs, 20)
    assert live_rows(tree, 0) == expected_rows(log_probs[0] + 0.0, 0, 20)


def test_the_mask_token_is_never_proposed():
    log_probs = cases(seed=8, count=60, depth=DEPTH, vocab=12)
    log_probs[:, :, 5] = 0.0  # the drafter's favourite
    tree = build_all(log_probs, 48, forbidden=5)
    assert not (tree.tokens[:, 1:] == 5)[tree.live[:, 1:]].any()
    log_probs[:, :, 5] = -np.inf
    for i in range(60):
        assert live_rows(tree, i) == expected_rows(log_probs[i], i, 48)


def test_a_vocabulary_of_the_mask_token_alone_leaves_the_root():
    tree = build_all(np.zeros((2, DEPTH, 1), np.float32), 8, forbidden=0)
    assert tree.live.sum(axis=1).tolist() == [1, 1]


def test_nan_log_probs_propose_nothing():
    log_probs = cases(seed=9, count=1, depth=DEPTH, vocab=12)
    log_probs[0, 1, :] = np.nan
    log_probs[0, 0, 3] = np.nan
    tree = build_all(log_probs, 63)
    assert live_rows(tree, 0) == expected_rows(np.nan_to_num(log_probs[0], nan=-np.inf), 0, 63)


@pytest.mark.parametrize("shards", [2, 8])
def test_candidates_of_vocabulary_shards_merge_to_those_of_the_whole(shards):
    log_probs = cases(seed=10, count=30, depth=DEPTH, vocab=40)

    @jax.jit
    def merged(log_probs):
        local = [
            trees.top_candidates(part, 9, forbidden=22, first_id=i * part.shape[-1])
            for i, part in enumerate(jnp.split(log_probs, shards, axis=-1))
        ]
        columns = (jnp.concatenate(column, axis=-1) for column in zip(*local, strict=True))
        return trees.best_of(Candidates(*columns), 9)

    whole = trees.top_candidates(jnp.asarray(log_probs), 9, forbidden=22)
    jax.tree.map(np.testing.assert_array_equal, merged(log_probs), whole)


def test_a_negative_budget_is_refused():
    candidates = Candidates(np.zeros((1, DEPTH, 1), np.float32), np.zeros((1, DEPTH, 1), np.int32))
    with pytest.raises(ValueError, match="budget -1"):
        trees.build(candidates, np.zeros(1, np.int32), np.zeros(1, np.int32), budget=-1)
