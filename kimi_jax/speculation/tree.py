"""Exact DDTree construction on the device: gather, add, one `top_k`; no heap, no host.

A drafter gives, for each of DEPTH slots, a distribution over the vocabulary. DDTree (arXiv
2604.12989) verifies the N most probable prefixes of the product of these distributions; its
reference implementation finds them with a best-first heap on the host. Here the heap is replaced by
a list that never changes:

* A prefix is written as ranks (r_1..r_d): r_i = 0 is the best token of slot i, 1 the second best.
  Every prefix (s_1..s_e) with e <= d and s_i <= r_i *dominates* it: it is at least as probable.
  There are sum_{i<=d} prod_{j<=i} (r_j + 1) of them, itself included, so a prefix can be among the
  best N only if that number is <= N. This leaves 53 / 285 / 1379 / 5788 prefixes for N = 8 / 16 /
  32 / 63 and 7 slots, whatever the probabilities are (`lattice`).
* Their scores are sums of log-probabilities, one a slot. `top_k(N)` of the scores is the tree, in
  the order in which the heap pops its nodes.

Ties: the list is in lexicographic order of the rank tuples, and `top_k` puts the lower index first.
Dominators come earlier in that order, and floating-point sums taken left to right are monotone, so
a node never comes before its parent, and equal scores rank as in a heap that pops the smaller rank
tuple first. Inside a slot, equal log-probabilities rank by the lower vocabulary id. The tree is
therefore a function of the log-probabilities alone, the same on every device and mesh; and trees
nest: the first n nodes of the tree of N are the tree of n.

A prefix of probability zero (score -inf) is never proposed. Whatever must not be proposed is left
out this way: the mask token, ranks that a small vocabulary does not have, NaN.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

WORD_BITS = 32
GROUP = 160  # divides K2.6's vocabulary, whole and in 2..8 shards; see `_top_k`


class Candidates(NamedTuple):
    """The best tokens of every draft slot, best first.

    values: float32 [B, DEPTH, K] log-probabilities at temperature 1, none above 0, not increasing
        along K; -inf is not proposed.
    ids: int32 [B, DEPTH, K] vocabulary ids.
    """

    values: jax.Array
    ids: jax.Array


@struct.dataclass
class Tree:
    """One token tree a sequence. Row 0 is the root (the anchor); row i + 1 is the i-th best node.

    tokens: int32 [B, N+1].
    parents: int32 [B, N+1] row of the parent, -1 for the root.
    depths: int32 [B, N+1], 0 for the root; a row's position is its sequence's length + depth.
    ancestors: uint32 [B, N+1, W], W = ceil((N+1) / 32): bit j % 32 of word j // 32 is set if the
        row sees row j of its own sequence, that is itself and what lies on its way to the root.
    live: bool [B, N+1]; a sequence's live rows come first. A dead row holds the anchor's token,
        parent -1 and depth 0, and sees nothing.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    ancestors: jax.Array
    live: jax.Array

    @property
    def budget(self) -> int:
        """N: how many nodes fit beside the root."""
        return self.tokens.shape[1] - 1


class Lattice(NamedTuple):
    """The C prefixes that can be among the best N, in lexicographic order (host arrays).

    ranks: int32 [C, DEPTH], -1 behind the prefix's end.
    ways: int32 [C, DEPTH] rows of the prefixes of length 1, 2, .. up to the prefix itself, then -1.
    lengths: int32 [C], at least 1.
    """

    ranks: np.ndarray
    ways: np.ndarray
    lengths: np.ndarray

    @property
    def last_ranks(self) -> np.ndarray:
        """int32 [C]: the rank of each prefix's last token."""
        return self.ranks[np.arange(len(self.lengths)), self.lengths - 1]


@lru_cache(maxsize=64)
def lattice(budget: int, depth: int, width: int) -> Lattice:
    """Prefixes of at most `depth` ranks below `width` whose dominators number at most `budget`."""
    prefixes: list[tuple[int, ...]] = []
    ways: list[tuple[int, ...]] = []

    def extend(prefix: tuple[int, ...], way: tuple[int, ...], fan: int, dominators: int) -> None:
        if len(prefix) == depth:
            return
        for rank in range(width):
            wider = fan * (rank + 1)
            if dominators + wider > budget:
                return
            prefixes.append((*prefix, rank))
            ways.append((*way, len(ways)))
            extend(prefixes[-1], ways[-1], wider, dominators + wider)

    def table(rows: list[tuple[int, ...]]) -> np.ndarray:
        filled = [(*row, *(-1,) * (depth - len(row))) for row in rows]
        return np.array(filled, np.int32).reshape(len(rows), depth)

    extend((), (), 1, 0)
    lengths = np.array([len(prefix) for prefix in prefixes], np.int32)
    return Lattice(ranks=table(prefixes), ways=table(ways), lengths=lengths)


def top_candidates(
    log_probs: jax.Array,
    k: int,
    *,
    forbidden: int | None = None,
    first_id: jax.Array | int = 0,
) -> Candidates:
    """The `k` best tokens of each slot of float32 [B, DEPTH, V]; equal ones rank by lower id.

    NaN counts as -inf: a broken drafter proposes nothing, and breaks nothing.

    Args:
        log_probs: log-softmax of the drafter's logits at temperature 1.
        k: how many; the tree's budget is enough. (A node with rank r in slot i has at least i + r
            other dominators, so slot i needs budget - i only; but one `top_k` of all slots at the
            widest k costs less than one for each slot.)
        forbidden: vocabulary id that is never proposed: the drafter's mask token, which is in the
            target's vocabulary but is never text. It keeps its share of the probability.
        first_id: id of the first column, if `log_probs` is a shard of the vocabulary. Candidates
            of shards, put together along K in ascending order of id, go through `best_of`.
    """
    # Zero has one sign here: top_k would put 0.0 before -0.0, which are equally probable.
    values = jnp.where(log_probs < 0, log_probs, jnp.where(log_probs >= 0, 0.0, -jnp.inf))
    column = lax.broadcasted_iota(jnp.int32, values.shape, 2)
    if forbidden is not None:
        values = jnp.where(column == forbidden - first_id, -jnp.inf, values)
    values, columns = _top_k(values, min(k, values.shape[-1]))
    return Candidates(values, columns + first_id)


def best_of(candidates: Candidates, k: int) -> Candidates:
    """The `k` best of [B, DEPTH, K] candidates in any order; equal ones keep their order."""
    values, columns = lax.top_k(candidates.values, min(k, candidates.values.shape[-1]))
    return Candidates(values, jnp.take_along_axis(candidates.ids, columns, axis=-1))


def build(candidates: Candidates, anchor: jax.Array, n_live: jax.Array, *, budget: int) -> Tree:
    """The `budget` most probable prefixes of each sequence, the first `n_live` of them live.

    Args:
        candidates: from `top_candidates(log_probs, budget)`. With fewer a slot, the tree is as
            narrow: one candidate a slot gives the chain.
        anchor: int32 [B], the last token of each sequence; it becomes the root.
        n_live: int32 [B], how many nodes each sequence uses, 0..budget: 0 leaves the root, and -1
            (no sequence) not even that. Data: it changes without compiling.
        budget: N, the compiled size.

    Raises:
        ValueError: `budget` is negative.
    """
    if budget < 0:
        raise ValueError(f"tree budget {budget} is negative; 0 is the root alone")
    batch, depth, width = candidates.values.shape
    table = lattice(budget, depth, min(width, budget))
    count = len(table.lengths)
    if count == 0:
        return root_only(anchor, n_live, budget=budget)

    best_score, best = lax.top_k(_scores(candidates.values, table), min(budget, count))
    depths = jnp.asarray(table.lengths)[best]
    token_at = (depths - 1) * width + jnp.asarray(table.last_ranks)[best]
    flat_ids = candidates.ids.reshape(batch, depth * width)
    tokens = jnp.take_along_axis(flat_ids, token_at, axis=1)
    live = (best_score > -jnp.inf) & (jnp.arange(best.shape[1]) < n_live[:, None])
    way = jnp.asarray(table.ways)[best]
    sees = jnp.any(way[:, :, None, :] == best[:, None, :, None], axis=-1)
    return _with_root(anchor, n_live, tokens, depths, live, sees, budget)


def chain(candidates: Candidates, anchor: jax.Array, n_live: jax.Array, *, budget: int) -> Tree:
    """The tree of width 1: every slot's best token, one after the other. Arguments as `build`."""
    best = Candidates(candidates.values[..., :1], candidates.ids[..., :1])
    return build(best, anchor, n_live, budget=budget)


def root_only(anchor: jax.Array, n_live: jax.Array, *, budget: int = 0) -> Tree:
    """Trees of the root alone, for plain decoding; `budget` dead rows fill a compiled size up."""
    none = jnp.zeros((anchor.shape[0], 0), jnp.int32)
    sees = jnp.zeros((anchor.shape[0], 0, 0), bool)
    return _with_root(anchor, n_live, none, none, none.astype(bool), sees, budget)


def words(flags: jax.Array) -> jax.Array:
    """bool [..., rows] -> uint32 [..., W]: flag j is bit j % 32 of word j // 32."""
    *batch, rows = flags.shape
    count = -(-rows // WORD_BITS)
    padded = jnp.pad(flags, (*((0, 0),) * len(batch), (0, count * WORD_BITS - rows)))
    bits = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD_BITS, dtype=jnp.uint32))
    by_word = padded.reshape(*batch, count, WORD_BITS)
    return jnp.sum(jnp.where(by_word, bits, 0), axis=-1, dtype=jnp.uint32)


def _top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` of [..., V], ties included, in two stages where V is a real vocabulary.

    The k best lie in the k groups with the highest maxima: any group ahead of an element's own
    holds something ahead of that element. Measured on an H200, us of the 8 / 16 / 63 best of
    7 x 163,840, ten calls in one program: 31 / 52 / 58 in one stage, 17 / 24 / 23 in two; and of
    56 x 163,840: 31 / 51 / 168 and 14 / 29 / 29.
    """
    *rows, vocab = values.shape
    if 4 * k * GROUP > vocab:
        return lax.top_k(values, k)
    lengthen = (*((0, 0),) * len(rows), (0, -vocab % GROUP))
    groups = jnp.pad(values, lengthen, constant_values=-jnp.inf).reshape(*rows, -1, GROUP)
    _, best = lax.top_k(jnp.max(groups, axis=-1), k)
    best = jnp.sort(best, axis=-1)  # so that the lower place is the lower id
    finalists = jnp.take_along_axis(groups, best[..., None], axis=-2).reshape(*rows, k * GROUP)
    top, place = lax.top_k(finalists, k)
    group = jnp.take_along_axis(best, place // GROUP, axis=-1)
    return top, group * GROUP + place % GROUP


def _scores(values: jax.Array, table: Lattice) -> jax.Array:
    """float32 [B, C]: the log-probability of each prefix, summed from its first token on."""
    batch, depth, width = values.shape
    beyond = depth * width  # one entry more, 0.0: the slots behind a prefix's end
    flat = jnp.pad(values.reshape(batch, beyond), ((0, 0), (0, 1)))
    index = np.where(table.ranks < 0, beyond, np.arange(depth) * width + table.ranks)
    parts = flat.at[:, index].get(mode="promise_in_bounds")  # one gather [B, C, DEPTH]
    score = parts[..., 0]
    for slot in range(1, depth):
        score = score + parts[..., slot]
    return score


def _with_root(
    anchor: jax.Array,
    n_live: jax.Array,
    tokens: jax.Array,
    depths: jax.Array,
    live: jax.Array,
    sees: jax.Array,
    budget: int,
) -> Tree:
    """Joins root, nodes [B, n] and dead rows up to `budget`.

    sees: bool [B, n, n], whether node j is on node i's way, itself included.
    """
    n = tokens.shape[1]

    def join(root: jax.Array, nodes: jax.Array) -> jax.Array:
        return jnp.concatenate([root[:, None], jnp.pad(nodes, ((0, 0), (0, budget - n)))], axis=1)

    anchor = anchor.astype(jnp.int32)
    zero = jnp.zeros_like(anchor)
    live = join(n_live >= 0, live)
    sees = jnp.pad(sees, ((0, 0), (1, budget - n), (1, budget - n)))
    rows = jnp.arange(budget + 1)
    sees = (sees | (rows == 0)) & live[:, :, None]
    # The parent is the last row on the way, short of the row itself: parents come first.
    parents = jnp.max(jnp.where(sees & (rows < rows[:, None]), rows, -1), axis=-1)
    return Tree(
        tokens=jnp.where(live, join(anchor, tokens), anchor[:, None]),
        parents=parents,
        depths=jnp.where(live, join(zero, depths), 0),
        ancestors=words(sees),
        live=live,
    )
