"""The Mosaic implementation: a schedule, the attention kernel, and the kernel that merges."""

from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax.pallas.tree_mla import kernel, merge, schedule
from kimi_jax.pallas.tree_mla.plan import Plan
from kimi_jax.pallas.tree_mla.schedule import ALIGNED


def attend(
    plan: Plan,
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
    scale: float,
    max_rows: int,
    after: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Shapes and results as in `api.attend`.

    Args:
      after: an array that has to exist first; not read. Benchmarks make a chain of calls with it.
      interpret: parameters of Pallas's interpreter, to run on a CPU.
    """
    rows, heads, width = q.shape
    _, pages, page_size, _ = latent.shape
    num_units = schedule.max_units(
        plan,
        batch=row_start.shape[0],
        max_rows=max_rows,
        pool_tokens=pages * page_size,
        max_tokens=page_table.shape[1] * page_size,
    )
    units = schedule.make(
        plan,
        row_start,
        row_count,
        length,
        page_table,
        ancestors,
        max_rows=max_rows,
        num_units=num_units,
    )
    sums = kernel.partials(
        plan,
        units,
        _aligned(q.reshape(rows * heads, width)),
        latent.reshape(-1, width),
        layer,
        _aligned(own),
        ancestors,
        page_table,
        scale=scale,
        pages_a_layer=pages,
        after=after,
        interpret=interpret,
    )
    out, lse = merge.merge(plan, units, sums, dtype=q.dtype, interpret=interpret)
    return out.reshape(rows, heads, plan.rank), lse.reshape(rows, heads)


def _aligned(rows: jax.Array) -> jax.Array:
    """Rows a multiple of ALIGNED, or fewer than that: what can be copied as tiles."""
    missing = -rows.shape[0] % ALIGNED if rows.shape[0] > ALIGNED else 0
    return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows
