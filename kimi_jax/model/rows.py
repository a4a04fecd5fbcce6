"""Flat rows: what one step sends through the model."""

import jax
from flax import struct


@struct.dataclass
class Rows:
    """M rows of B sequences, in any mix; a tree is a sequence with more rows than one.

    token, position int32 [M]; live bool [M]: a dead row reaches no expert and changes nothing;
    ancestors uint32 [M, W]: bit j = row j of the same sequence is visible, self included (0 for a
    dead row). row_start, row_count, length int32 [B]: a sequence's rows and its cached positions;
    page_table int32 [B, pages]. max_rows: the most rows of a sequence (static).
    """

    token: jax.Array
    position: jax.Array
    live: jax.Array
    ancestors: jax.Array
    row_start: jax.Array
    row_count: jax.Array
    length: jax.Array
    page_table: jax.Array
    max_rows: int = struct.field(pytree_node=False)
