"""Mosaic GPU kernel: adds up the units of each query, in their order.

One block a row of attention. Factors are powers of two (`kernel.Partials.top` is a whole number):
the sum is that of the units as if all had had the same reference, and only additions round.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kimi_jax.pallas.tree_mla import schedule
from kimi_jax.pallas.tree_mla.kernel import NOTHING, Partials, wait_for_the_kernel_before
from kimi_jax.pallas.tree_mla.plan import Plan
from kimi_jax.pallas.tree_mla.schedule import Schedule

_AT_ONCE = 24  # units whose loads are under way together: all of a context of 4k


def merge(
    plan: Plan, units: Schedule, partials: Partials, *, dtype: Any, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Output [M H, R] in `dtype` and log-sum-exp float32 [M H]."""
    queries = units.rows.shape[0] * plan.heads
    kernel = plgpu.kernel(
        functools.partial(_block, plan=plan, overlap=plan.overlap and not interpret),
        out_type=(
            jax.ShapeDtypeStruct((queries, plan.rank), dtype),
            jax.ShapeDtypeStruct((queries,), jnp.float32),
        ),
        grid=(queries,),
        grid_names=("query",),
        interpret=interpret,
        kernel_name="tree_mla_merge",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
    )
    return kernel(units.rows, *partials)


def _block(
    rows: Any,
    out: Any,
    top: Any,
    total: Any,
    merged: Any,
    lse: Any,
    *,
    plan: Plan,
    overlap: bool,
) -> None:
    if overlap:
        wait_for_the_kernel_before()
    # 128 threads share the columns; with fewer columns than threads, several hold the same.
    strided = plan.rank % 128 == 0
    layout = (
        plgpu.Layout.WG_STRIDED((plan.rank,), vec_size=min(plan.rank // 128, 4))
        if strided
        else plgpu.Layout.WGMMA.reduce(1)
    )
    query = lax.axis_index("query")
    row = lax.div(query, plan.heads)
    place = rows[row, schedule.PLACE] + lax.rem(query, plan.heads)
    splits = rows[row, schedule.SPLITS]
    group, column = lax.div(place, plan.queries), lax.rem(place, plan.queries)
    first = rows[row, schedule.BASE] + group * splits

    def add(i: jax.Array, carry: Any) -> Any:
        high, mass, sums = carry
        index = [i * _AT_ONCE + j for j in range(_AT_ONCE)]
        exists = [j < splits for j in index]
        unit = [first + jnp.minimum(j, splits - 1) for j in index]
        tops = [jnp.where(e, top[u, column], NOTHING) for e, u in zip(exists, unit, strict=True)]
        totals = [total[u, column] for u in unit]
        outs = [plgpu.load(out.at[u, column], layout=layout, optimized=False) for u in unit]
        outs = [o.astype(jnp.float32) for o in outs]
        new_high = functools.reduce(jnp.maximum, tops, high)
        kept = jnp.exp2(high - new_high)
        mass, sums = mass * kept, sums * kept
        for e, t, m, o in zip(exists, tops, totals, outs, strict=True):
            factor = jnp.where(e, jnp.exp2(t - new_high), 0.0)
            mass, sums = mass + m * factor, sums + o * factor
        return new_high, mass, sums

    zeros = plgpu.layout_cast(jnp.zeros((plan.rank,), jnp.float32), layout)
    rounds = lax.div(splits + _AT_ONCE - 1, _AT_ONCE)
    high, mass, sums = lax.fori_loop(0, rounds, add, (jnp.float32(NOTHING), jnp.float32(0), zeros))

    seen = mass > 0
    result = jnp.where(seen, sums / jnp.where(seen, mass, 1.0), zeros)
    log = (high + jnp.log2(jnp.where(seen, mass, 1.0))) * 0.6931471805599453
    log = jnp.where(seen, log, -jnp.inf)
    result = jnp.where(splits < 0, jnp.nan, result)
    merged.at[query][...] = result.astype(merged.dtype)
    lse[query] = jnp.where(splits < 0, jnp.nan, log)
