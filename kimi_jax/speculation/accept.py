"""Following the target's own draws down a tree, and ending a sequence at the right token.

The target has drawn one token behind every row of the tree (argmax, or at a temperature with noise
that all rows of one position share). The walk starts at the root and moves to the child that holds
the drawn token, until there is none; the draws along the way are the sequence's next tokens,
exactly those that plain decoding would have drawn one by one. The last of them has no node: it is
the bonus token. No exact rule accepts more on the same tree.
"""

import jax
import jax.numpy as jnp
from flax import struct

from kimi_jax.speculation.tree import Tree, words

RUNNING, STOPPED, FULL = 0, 1, 2  # `Cut.finish`


@struct.dataclass
class Walk:
    """The accepted way down each tree.

    path: int32 [B, DEPTH+1] rows of the tree, the root first; -1 behind the end.
    accepted: int32 [B] nodes on it, the root not counted.
    tokens: int32 [B, DEPTH+1] what was drawn at each of these rows; -1 behind the end.
    """

    path: jax.Array
    accepted: jax.Array
    tokens: jax.Array


@struct.dataclass
class Cut:
    """What each sequence takes of a walk's tokens.

    count: int32 [B] tokens that the sequence takes.
    finish: int32 [B] RUNNING, STOPPED (the stop id is the last token taken) or FULL.
    tokens: int32 [B, DEPTH+1] the tokens taken; -1 behind them.
    """

    count: jax.Array
    finish: jax.Array
    tokens: jax.Array


def walk(tree: Tree, drawn: jax.Array, *, depth: int) -> Walk:
    """The longest way from the root on which every node holds what its parent's row drew.

    A row is on it if all its ancestors and itself hold their parents' draws, which the ancestor
    bits answer for all rows at once. A sequence without a live root takes no way at all.

    Args:
        drawn: int32 [B, N+1], the token drawn behind each row; dead rows may hold anything.
        depth: DEPTH, the drafter's number of slots.
    """
    expected = jnp.take_along_axis(drawn, jnp.maximum(tree.parents, 0), axis=1)
    fits = tree.live & ((tree.parents < 0) | (tree.tokens == expected))
    misses = tree.ancestors & ~words(fits)[:, None, :]
    reached = tree.live & ~jnp.any(misses != 0, axis=-1)
    # Siblings hold different tokens, so at most one row of each depth is reached.
    at_depth = tree.depths[:, None, :] == jnp.arange(depth + 1)[:, None]
    rows = jnp.arange(drawn.shape[1])
    path = jnp.max(jnp.where(reached[:, None, :] & at_depth, rows, -1), axis=-1)
    tokens = jnp.take_along_axis(drawn, jnp.maximum(path, 0), axis=1)
    return Walk(
        path=path,
        accepted=jnp.sum(path[:, 1:] >= 0, axis=-1),
        tokens=jnp.where(path >= 0, tokens, -1),
    )


def cut(
    tokens: jax.Array,
    active: jax.Array,
    *,
    length: jax.Array,
    max_length: jax.Array,
    min_length: jax.Array,
    stop_ids: jax.Array,
) -> Cut:
    """How many of a step's tokens each sequence takes: up to a stop id or its full length.

    The result is that of feeding the tokens one at a time: the first stop id ends the sequence, or
    the token that makes it full, whichever comes first; a stop id at the last possible place is
    STOPPED.

    Args:
        tokens: int32 [B, DEPTH+1] from `walk`, -1 behind the end.
        active: bool [B]; the others take nothing and stay RUNNING.
        length: int32 [B] committed positions; the sequence has length + 1 tokens, the anchor
            included.
        max_length: int32 [B] tokens, prompt included, at which the sequence is FULL.
        min_length: int32 [B]: a token drawn while fewer than this exist does not stop.
        stop_ids: int32 [B, S], -1 for none.
    """
    offered = tokens >= 0
    existing = length[:, None] + 1 + jnp.arange(tokens.shape[1])  # before each token
    room = existing < max_length[:, None]
    is_stop = jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1)
    stops = is_stop & offered & (existing >= min_length[:, None])
    # A token is taken if it exists, fits, and no earlier one stopped.
    earlier_stops = jnp.cumsum(stops, axis=-1) - stops
    taken = offered & room & (earlier_stops == 0) & active[:, None]
    count = jnp.sum(taken, axis=-1)
    stopped = jnp.any(taken & stops, axis=-1)
    full = length + 1 + count >= max_length
    finish = jnp.where(stopped, STOPPED, jnp.where(full & active, FULL, RUNNING))
    return Cut(count=count, finish=finish, tokens=jnp.where(taken, tokens, -1))
