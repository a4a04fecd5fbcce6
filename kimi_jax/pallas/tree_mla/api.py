"""Tree-masked attention of MLA (absorbed form) over a paged latent cache."""

from typing import Literal

import jax
from jax.typing import DTypeLike

from kimi_jax.pallas.stream import target as targets
from kimi_jax.pallas.tree_mla import mosaic, plan, reference

Implementation = Literal["auto", "reference", "mosaic"]

MOSAIC_BY_DEFAULT = True
"""Whether 'auto' takes the Mosaic kernel on a GPU. To be set once it has been run and timed there:
until then it is taken when it is asked for by name."""

_attend = jax.jit(mosaic.attend, static_argnames=("plan", "scale", "max_rows"))


def choose(
    implementation: Implementation = "auto",
    *,
    rank: int | None = None,
    rope: int | None = None,
    heads: int | None = None,
    page_size: int | None = None,
    max_rows: int | None = None,
    dtype: DTypeLike | None = None,
) -> Literal["reference", "mosaic"]:
    """The implementation that will run on the default device: "reference" or "mosaic".

    'auto' is the reference on a CPU. On a GPU it is the kernel, if MOSAIC_BY_DEFAULT, for whatever
    the kernel can serve, and the reference for the rest (a float32 cache, say). Sizes are those of
    `attend`; what is not given is not checked.

    Raises NotImplementedError for an implementation that does not exist, and for 'mosaic' where it
    cannot run, naming the device or the value: nothing falls back in silence.
    """
    if implementation == "reference":
        return "reference"
    if implementation not in ("auto", "mosaic"):
        raise NotImplementedError(
            f"tree_mla: implementation={implementation!r} does not exist; use 'auto', 'reference' "
            "or 'mosaic'"
        )
    if implementation == "auto" and not (MOSAIC_BY_DEFAULT and jax.default_backend() == "gpu"):
        return "reference"
    try:
        _target()
        plan.check(
            rank=rank,
            rope=rope,
            heads=heads,
            page_size=page_size,
            max_rows=max_rows,
            dtype=dtype,
        )
    except NotImplementedError:
        if implementation == "mosaic":
            raise
        return "reference"
    return "mosaic"


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
      implementation: as in `choose`. The kernel sets memory aside for contexts that share no page;
        a sequence for which it does not suffice comes out as NaN.

    Returns:
      output in latent space [M, H, R] in q's dtype, and log-sum-exp float32 [M, H]. A row with
      nothing to see gives 0 and -inf.
    """
    chosen = choose(
        implementation,
        rank=rank,
        rope=latent.shape[3] - rank,
        heads=q.shape[1],
        page_size=latent.shape[2],
        max_rows=max_rows,
        dtype=latent.dtype,
    )
    operands = (q, latent, layer, own, ancestors, row_start, row_count, length, page_table)
    if chosen == "reference":
        return reference.attend(*operands, rank=rank, scale=scale, max_rows=max_rows)
    made = plan.of_shapes(_target(), q, latent, rank=rank, max_rows=max_rows)
    return _attend(made, *operands, scale=scale, max_rows=max_rows)


def _target() -> targets.Target:
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        raise NotImplementedError(
            f"tree_mla: implementation='mosaic' needs a GPU, the default device is "
            f"{device.platform}; use implementation='reference'"
        )
    return targets.of(device)
