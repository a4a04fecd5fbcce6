"""Tokens a step of exact best-first trees, replayed over a known path.

Greedy or sampled text does not depend on the tree, so it is generated once; the drafter proposes at
every anchor; the rounds are then replayed here. Pure numpy and heapq.
"""

import heapq

import numpy as np

CHAIN = "chain"


def tree(logp: np.ndarray, ids: np.ndarray, budget: int) -> dict[tuple[int, ...], None]:
    """The `budget` most probable prefixes, as rank tuples in pop order. logp, ids [slots, K]."""
    slots, width = logp.shape
    nodes: dict[tuple[int, ...], None] = {}
    heap = [(-float(logp[0, 0]), (0,))]
    while heap and len(nodes) < budget:
        cost, ranks = heapq.heappop(heap)
        nodes[ranks] = None
        depth, rank = len(ranks), ranks[-1]
        if rank + 1 < width:
            change = float(logp[depth - 1, rank]) - float(logp[depth - 1, rank + 1])
            heapq.heappush(heap, (cost + change, (*ranks[:-1], rank + 1)))
        if depth < slots:
            heapq.heappush(heap, (cost - float(logp[depth, 0]), (*ranks, 0)))
    return nodes


def accepted(logp, ids, following: np.ndarray, budget) -> int:
    """How many tokens of `following` lie on a path of the tree (or of the chain)."""
    slots = logp.shape[0]
    if budget == CHAIN:
        hits = ids[:, 0] == following[:slots]
        return slots if hits.all() else int(hits.argmin())
    nodes, prefix = tree(logp, ids, budget), ()
    for k in range(slots):
        rank = np.flatnonzero(ids[k] == following[k])
        if not len(rank) or (*prefix, int(rank[0])) not in nodes:
            return k
        prefix = (*prefix, int(rank[0]))
    return slots


def replay(logp, ids, tokens, first: int, budget) -> list[int]:
    """Accepted counts of each round over one sequence.

    logp, ids [anchors, slots, K], row s for anchor position s; tokens [L]; the first anchor is at
    `first`. Stops when fewer than slots + 1 tokens remain, so that no round is cut short.
    """
    slots, s, counts = logp.shape[1], first, []
    while s + slots + 1 <= len(tokens) and s < len(logp):
        a = accepted(logp[s], ids[s], tokens[s + 1 :], budget)
        counts.append(a)
        s += a + 1
    return counts


def loop_share(continuation, n: int = 8) -> float:
    """Share of the n-grams that repeat an earlier n-gram of the continuation."""
    grams = [tuple(continuation[i : i + n]) for i in range(len(continuation) - n + 1)]
    seen, repeats = set(), 0
    for gram in grams:
        repeats += gram in seen
        seen.add(gram)
    return repeats / max(len(grams), 1)
