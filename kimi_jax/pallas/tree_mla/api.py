"""Tree-masked attention of MLA (absorbed form) over a paged latent cache."""

from typing import Literal

import jax

from kimi_jax.pallas.tree_mla import reference

Implementation = Literal["auto", "reference", "mosaic"]


def choose(implementation: Implementation = "auto") -> str:
    """The implementation that will run: "reference".

    Raises NotImplementedError for a named one that does not exist: nothing falls back in silence.
    """
    if implementation in ("auto", "reference"):
        return "reference"
    raise NotImplementedError(
        f"tree_mla: implementation={implementation!r} does not exist; use 'auto' or 'reference'"
    )


def attend(
    q: jax.Array,
    latent: jax.Array,
    layer: jax.Array | int,
    own: jax.Array,
    ancestors: jax.Array,
    row_start: jax.Array,
    row_count: jax.Array,
    length: jax.Array,
    page_table: jax.Array,
    *,
    rank: int,
    scale: float,
    max_rows: int,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """One softmax over a sequence's cached positions and a row's ancestors among its own rows.

    Args:
      q: absorbed queries [M, H, R + PE] (latent part, then rotary part).
      latent: pages of all layers [L, pages, P, R + PE]; layer: the one to read.
      own: the rows' own latents [M, R + PE], not in the pages yet.
      ancestors: uint32 [M, W]: bit j = row j of the same sequence is visible, self included.
      row_start, row_count, length: int32 [B]: first row, rows and cached positions of a sequence.
      page_table: int32 [B, pages of the longest context].
      rank: R, the part of a row that is the value; scale: of the scores; max_rows: the most rows
        that a sequence has.

    Returns:
      output in latent space [M, H, R] in q's dtype, and log-sum-exp float32 [M, H]. A row with
      nothing to see gives 0 and -inf.
    """
    choose(implementation)
    return reference.attend(
        q,
        latent,
        layer,
        own,
        ancestors,
        row_start,
        row_count,
        length,
        page_table,
        rank=rank,
        scale=scale,
        max_rows=max_rows,
    )
