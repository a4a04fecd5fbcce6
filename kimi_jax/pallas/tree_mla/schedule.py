"""Units of work of one call, made on the device from the sequences' rows and lengths.

A sequence's context and own rows are tiles of 64 tokens: those of the context, then one or two of
its own rows. A unit is up to `split_tiles` of them (`long_split_tiles` in a long context), for up
to `queries` rows of attention. It starts at a multiple of the split: what is summed up in one go
depends on the position in the context and on the context's length, and on nothing else. A block
takes a run of units: about the same number of tiles as the others, and mostly the same queries all
along. They are numbered by group of queries, sequence, split: with as many groups everywhere,
blocks that read the same tiles for different groups do so at the same time, and memory is read
once. Their sums are laid down by sequence, group, split.

All of it is a few tiny XLA operations on [units] int32. They are the same for every layer of a
step, and XLA computes them once.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from kimi_jax.pallas.tree_mla.plan import LONG_CONTEXT, TILE, Plan

ALIGNED = 8
"""Rows are copied from multiples of this (rows of a swizzled tile in shared memory).

Queries and own rows that start elsewhere are copied from the multiple before; what came along is
masked, or not looked at.
"""

# Columns of a unit; then come the pages of its first tile, one a piece.
(QUERY, OWN, ROWS, LENGTH, SEQUENCE, FIRST_TILE, TILES, NEW_QUERIES, SLOT, LOW, HIGH, PAGES) = (
    range(12)
)
# Columns of `Schedule.runs`; then come those of the first unit.
FIRST, END, UNIT = range(3)
# Columns of `Schedule.rows`.
PLACE, BASE, SPLITS = range(3)

_FIXED = 1  # what starting and ending a unit costs, in tiles


@struct.dataclass
class Schedule:
    """units int32 [U, PAGES + pieces]: first row of attention (of all M H, aligned), first own row,
    own rows, context length, sequence, first tile, tiles (0: no such unit), whether its queries are
    not those of the unit before, where its sums go, own rows that anybody sees (bits of two words);
    pages.

    runs int32 [blocks, 2 + PAGES + pieces]: a block's first unit and its end; that first unit
    again, so that it can start after one read.

    rows int32 [M, 3]: for a flat row, the place of its first row of attention among those that its
    sequence's units handle, the sequence's first unit and its splits (0: the row belongs to no
    sequence, -1: there is no room for all the sequence's units).
    """

    units: jax.Array
    runs: jax.Array
    rows: jax.Array


def max_units(plan: Plan, *, batch: int, max_rows: int, pool_tokens: int, max_tokens: int) -> int:
    """The most units of a call whose sequences share no page: this much is set aside for them.

    pool_tokens: tokens of all pages; max_tokens: of the longest context. Sequences that share pages
    could need more: `Schedule.rows` marks those for which there is no room.
    """
    short = min(max_tokens, LONG_CONTEXT)
    splits = max(
        -(-(tokens // TILE + 3) // tiles)
        for tokens, tiles in ((short, plan.split_tiles), (max_tokens, plan.long_split_tiles))
    )
    in_pool = (pool_tokens // TILE + 3 * batch) // plan.split_tiles + batch
    return min(batch * splits, in_pool) * max_groups(plan, max_rows)


def max_groups(plan: Plan, max_rows: int) -> int:
    """The most groups of `plan.queries` that a sequence's rows of attention take."""
    return -(-(max_rows * plan.heads + plan.slack) // plan.queries)


def make(
    plan: Plan,
    row_start: jax.Array,
    row_count: jax.Array,
    length: jax.Array,
    page_table: jax.Array,
    ancestors: jax.Array,
    *,
    max_rows: int,
    num_units: int,
) -> Schedule:
    """The schedule of sequences with row_start, row_count, length [B], page_table [B, pages] and
    ancestors [M, words]."""
    num_rows = ancestors.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    mine = (row[:, None] >= row_start) & (row[:, None] < row_start + row_count)
    own_tiles = (row_start % ALIGNED + row_count + TILE - 1) // TILE
    tiles = jnp.where(row_count > 0, (length + TILE - 1) // TILE + own_tiles, 0)
    split_tiles = jnp.where(length > LONG_CONTEXT, plan.long_split_tiles, plan.split_tiles)
    splits = (tiles + split_tiles - 1) // split_tiles
    first_query = row_start * plan.heads
    ahead = first_query % ALIGNED
    groups = (ahead + row_count * plan.heads + plan.queries - 1) // plan.queries
    ends = jnp.cumsum(splits * groups)
    base = ends - splits * groups
    there_is_room = ends <= num_units

    # [group, sequence]: units, and their end in the order of the work.
    group_of = jnp.arange(max_groups(plan, max_rows), dtype=jnp.int32)[:, None]
    counts = jnp.where((group_of < groups) & there_is_room, splits, 0).reshape(-1)
    work_ends = jnp.cumsum(counts)
    unit = jnp.arange(num_units, dtype=jnp.int32)
    item = jnp.sum(work_ends <= unit[:, None], axis=1, dtype=jnp.int32)
    exists = item < counts.shape[0]
    item = jnp.where(exists, item, 0)
    split = unit - (work_ends - counts)[item]
    group, sequence = item // row_start.shape[0], item % row_start.shape[0]
    first_tile = split * split_tiles[sequence]
    left = tiles[sequence] - first_tile
    count = jnp.where(exists, jnp.minimum(left, split_tiles[sequence]), 0)
    token = first_tile[:, None] * TILE + jnp.arange(plan.pieces, dtype=jnp.int32) * plan.piece
    page = jnp.minimum(token // plan.page_size, page_table.shape[1] - 1)
    words = lax.bitcast_convert_type(ancestors, jnp.int32)
    seen = lax.reduce(
        jnp.where(mine[:, :, None], words[:, None], 0), np.int32(0), lax.bitwise_or, (0,)
    )
    columns = [
        (first_query - ahead)[sequence] + group * plan.queries,
        row_start[sequence],
        row_count[sequence],
        length[sequence],
        sequence,
        first_tile,
        count,
        split == 0,
        base[sequence] + group * splits[sequence] + split,
        seen[sequence, 0],
        seen[sequence, -1],
        *page_table[sequence[:, None], page].T,
    ]
    units = jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)

    cost = jnp.where(exists, count + _FIXED, 0)
    before = jnp.cumsum(cost) - cost
    total = jnp.sum(cost)
    block = jnp.arange(plan.num_cores + 1, dtype=jnp.int32)
    share = block * (total // plan.num_cores) + jnp.minimum(block, total % plan.num_cores)
    starts = jnp.sum((before < share[:, None]) & exists, axis=1, dtype=jnp.int32)
    first, end = starts[:-1], starts[1:]
    first_unit = units[jnp.minimum(first, num_units - 1)].at[:, NEW_QUERIES].set(1)
    runs = jnp.concatenate([first[:, None], end[:, None], first_unit], axis=1)

    owner = jnp.argmax(mine, axis=1)
    known = jnp.where(there_is_room, splits, -1)
    rows = jnp.stack(
        [
            (row - row_start[owner]) * plan.heads + ahead[owner],
            base[owner],
            jnp.where(mine.any(axis=1), known[owner], 0),
        ],
        axis=1,
    ).astype(jnp.int32)
    return Schedule(units=units, runs=runs, rows=rows)
