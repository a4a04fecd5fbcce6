"""Mosaic GPU kernel: tree-masked MLA over a paged latent cache.

Everything is transposed: scores are [tokens, queries], outputs [latent, queries]. Tokens, and
latent columns, are then the 64 rows that a matrix instruction wants, and the queries its free
dimension, in steps of 8: one row of 8 heads costs what it is, and 9 rows are 72, not 128.

A block is one warpgroup for copies, one for scores, and one or two for the values, each with its
part of the latent columns. A tile of 64 tokens is copied once into shared memory and read twice,
as keys and as values. While the values of a tile are added up, the scores of the next are made. A
tile comes and goes in chunks of columns: two whole tiles do not fit beside many queries.

- Copies: the queries of a unit, then its tiles, into rings of buffers (`slots`).
- Scores: S = K Q^T; masks; P = exp2(S - top), to shared memory in bfloat16. `top` is a whole number
  near a query's largest score so far: 0 if that is near 0 in the first tile, and it rises only when
  a score exceeds it by more than `_SLACK`. Powers of two change no mantissa, so a rescaling costs
  no accuracy, and is rare; so are reductions over the tokens.
- Values: O += V^T P. What the scores' warpgroup rescaled, it rescales too.

A unit ends with its partial sums in memory: O, `top`, and the sum of P. `merge` adds up
the units of a query in their order. Nothing that a unit computes depends on another one, on its
block, or on how many queries it shares its tiles with.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from kimi_jax.pallas.tree_mla import schedule
from kimi_jax.pallas.tree_mla.plan import TILE, Plan
from kimi_jax.pallas.tree_mla.schedule import ALIGNED, Schedule

_SLACK = 32.0  # in powers of two; float32 and bfloat16 hold sums of 2^32 * 2^18 values easily
NOTHING = -1e30  # `top` of a query that has seen no score: finite, so that no NaN arises
_WGMMA = plgpu.Layout.WGMMA  # also the layout of mma.sync accumulators, when 4 warps share the rows
_QUERY = _WGMMA.reduce(0)  # one value a column: a statistic of a query


class Partials(NamedTuple):
    """By unit: out [U, queries, R] in `Plan.sums`, not divided by `total` float32 [U, queries], the
    sum of the probabilities relative to 2^top, top float32 [U, queries]."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


class _Unit(NamedTuple):
    query: jax.Array
    own: jax.Array
    rows: jax.Array
    length: jax.Array
    sequence: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    new_queries: jax.Array
    slot: jax.Array
    seen_low: jax.Array
    seen_high: jax.Array
    pages: tuple[jax.Array, ...]


class _Refs(NamedTuple):
    units: Any
    runs: Any
    layer: Any
    q: Any
    latent: Any
    own: Any
    ancestors: Any
    page_table: Any
    out: Any
    top: Any
    total: Any
    q_latent: Any  # [1, queries, R]
    q_rope: Any  # [1, queries, PE]
    kv: Any  # [slots, TILE, columns]: chunks
    k_rope: Any  # [rope_slots, TILE, PE]
    probs: Any  # [prob_slots, queries, TILE]
    rescale: Any  # [prob_slots, queries + 8]: factors; then 1.0 when there is something to rescale
    q_full: Any
    q_free: Any
    kv_full: Any
    kv_free: Any
    rope_full: Any
    rope_free: Any
    probs_full: Any
    probs_free: Any


def partials(
    plan: Plan,
    units: Schedule,
    q: jax.Array,
    latent: jax.Array,
    layer: jax.Array | int,
    own: jax.Array,
    ancestors: jax.Array,
    page_table: jax.Array,
    *,
    scale: float,
    pages_a_layer: int,
    after: jax.Array | None = None,
    interpret: Any = None,
) -> Partials:
    """The sums of every unit. q [M H, R + PE], latent [L pages P, R + PE], own [M, R + PE]."""
    num_units = units.units.shape[0]

    def array(shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def matrix(rows: int, columns: int, *leading: int) -> Any:
        tiling = plgpu.TilingTransform((ALIGNED, plan.swizzle // 2))  # type: ignore[abstract]
        return plgpu.SMEM(
            (*leading, rows, columns),
            jnp.bfloat16,
            transforms=(tiling, plgpu.SwizzleTransform(plan.swizzle)),  # type: ignore[abstract]
        )

    barrier = plgpu.Barrier
    waits_for = () if after is None else (after,)

    def body(*refs: Any, **scratch: Any) -> None:
        inputs, outputs = refs[:8], refs[8 + len(waits_for) :]
        _block(_Refs(*inputs, *outputs, **scratch), plan, scale, pages_a_layer, interpret)

    kernel = plgpu.kernel(
        body,
        out_type=Partials(
            out=array((num_units, plan.queries, plan.rank), plan.sums),
            top=array((num_units, plan.queries)),
            total=array((num_units, plan.queries)),
        ),
        scratch_types=dict(
            q_latent=matrix(plan.queries, plan.rank, 1),
            q_rope=matrix(plan.queries, plan.rope, 1),
            kv=matrix(TILE, plan.columns, plan.slots),
            k_rope=matrix(TILE, plan.rope, plan.rope_slots),
            probs=matrix(plan.queries, TILE, plan.prob_slots),
            rescale=plgpu.SMEM((plan.prob_slots, plan.queries + 8), jnp.float32),
            q_full=barrier(num_arrivals=2),
            q_free=barrier(),
            kv_full=barrier(num_arrivals=plan.pieces, num_barriers=plan.slots),
            kv_free=barrier(num_arrivals=plan.parts, num_barriers=plan.slots),
            rope_full=barrier(num_arrivals=plan.pieces, num_barriers=plan.rope_slots),
            rope_free=barrier(num_barriers=plan.rope_slots),
            probs_full=barrier(num_barriers=plan.prob_slots),
            probs_free=barrier(num_arrivals=plan.parts, num_barriers=plan.prob_slots),
        ),
        grid=(plan.num_cores,),
        grid_names=("block",),
        num_threads=plan.num_threads,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name="tree_mla",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=plan.statistics_bytes,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
    )
    return kernel(
        units.units,
        units.runs,
        jnp.asarray(layer, jnp.int32).reshape(1),
        q,
        latent,
        own,
        lax.bitcast_convert_type(ancestors, jnp.int32),
        page_table,
        *waits_for,
    )


def _block(refs: _Refs, plan: Plan, scale: float, pages: int, interpret: Any) -> None:
    if plan.overlap and not interpret:
        wait_for_the_kernel_before()
    warpgroup = lax.axis_index("warpgroup")

    def registers(share: int) -> None:
        even = 65536 // (128 * plan.num_threads)
        if plan.parts == 2 and share != even:
            plgpu.set_max_registers(share, action="increase" if share > even else "decrease")

    # The values hold `queries` / 2 accumulators for each 64 of their columns. All shares together
    # are those of four warpgroups with 128 registers a thread.
    values = 168 if plan.queries <= 56 else 176

    @pl.when(warpgroup < plan.parts)
    def _values():
        registers(values)
        _sum_values(refs, plan, warpgroup, interpret)

    @pl.when(warpgroup == plan.parts)
    def _scores():
        registers(512 - 24 - 2 * values)
        _make_scores(refs, plan, scale, interpret)

    @pl.when(warpgroup == plan.parts + 1)
    def _copies():
        registers(24)
        _copy(refs, plan, pages)


def _read(table: Any, row: jax.Array, column: int = 0) -> _Unit:
    values = [table[row, i] for i in range(column, table.shape[1])]
    return _Unit(*values[: schedule.PAGES], pages=tuple(values[schedule.PAGES :]))


def _each_unit(refs: _Refs, body: Callable[[Any, _Unit, Any, jax.Array], jax.Array]) -> None:
    """step = body(index, unit, queries_end, step) for the units of this block's run, from step 0.

    queries_end: the next unit has other queries, or there is none.
    """
    block = lax.axis_index("block")
    end = refs.runs[block, schedule.END]
    last = refs.units.shape[0] - 1

    def visit(index: jax.Array, carry: tuple[_Unit, jax.Array]) -> tuple[_Unit, jax.Array]:
        unit, step = carry
        following = _read(refs.units, jnp.minimum(index + 1, last))  # early: it takes a while
        queries_end = (following.new_queries == 1) | (index + 1 == end)
        return following, body(index, unit, queries_end, step)

    first_unit = _read(refs.runs, block, schedule.UNIT)
    lax.fori_loop(refs.runs[block, schedule.FIRST], end, visit, (first_unit, jnp.int32(0)))


def _context_tiles(unit: _Unit) -> jax.Array:
    return (unit.length + TILE - 1) // TILE


def _own_start(unit: _Unit, tile: jax.Array) -> jax.Array:
    """Flat row of the first place of a tile of own rows: a multiple of ALIGNED."""
    return lax.div(unit.own, ALIGNED) * ALIGNED + (tile - _context_tiles(unit)) * TILE


def _real(unit: _Unit, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and end of a tile's places that hold a token of the sequence."""
    before = unit.own - _own_start(unit, tile)
    in_context = tile < _context_tiles(unit)
    first = jnp.where(in_context, 0, before)
    return first, jnp.where(in_context, unit.length - tile * TILE, before + unit.rows)


# -- copies


def _copy(refs: _Refs, plan: Plan, pages: int) -> None:
    layer_row = refs.layer[0] * (pages * plan.page_size)
    last_page = refs.page_table.shape[1] - 1

    def token_of(tile: jax.Array, piece: int) -> jax.Array:
        return tile * TILE + piece * plan.piece

    def pages_of(unit: _Unit, tile: jax.Array) -> tuple[jax.Array, ...]:
        tokens = [token_of(tile, piece) for piece in range(plan.pieces)]
        places = [jnp.minimum(lax.div(token, plan.page_size), last_page) for token in tokens]
        return tuple(refs.page_table[unit.sequence, place] for place in places)

    def copy_tile(source: Any, starts: Sequence[jax.Array], step: jax.Array) -> None:
        """Rows of `source` from each of `starts` on, a piece each."""
        for chunk in range(plan.chunks):
            slot = lax.rem(step * plan.chunks + chunk, plan.slots)
            plgpu.barrier_wait(refs.kv_free.at[slot])
            columns = pl.ds(chunk * plan.columns, plan.columns)
            for i, start in enumerate(starts):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(start, plan.piece), columns],
                    refs.kv.at[slot, pl.ds(i * plan.piece, plan.piece)],
                    refs.kv_full.at[slot],
                )
        slot = lax.rem(step, plan.rope_slots)
        plgpu.barrier_wait(refs.rope_free.at[slot])
        for i, start in enumerate(starts):
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(start, plan.piece), pl.ds(plan.rank, plan.rope)],
                refs.k_rope.at[slot, pl.ds(i * plan.piece, plan.piece)],
                refs.rope_full.at[slot],
            )

    def copy_unit(_: Any, unit: _Unit, queries_end: Any, step: jax.Array) -> jax.Array:
        @pl.when(unit.new_queries == 1)
        def _():
            plgpu.barrier_wait(refs.q_free)
            rows = pl.ds(unit.query, plan.queries)
            plgpu.copy_gmem_to_smem(
                refs.q.at[rows, pl.ds(0, plan.rank)], refs.q_latent.at[0], refs.q_full
            )
            plgpu.copy_gmem_to_smem(
                refs.q.at[rows, pl.ds(plan.rank, plan.rope)], refs.q_rope.at[0], refs.q_full
            )

        def copy_one(i: jax.Array, carry: Any) -> Any:
            step, page_ids = carry
            tile = unit.first_tile + i
            in_context = tile < _context_tiles(unit)
            next_pages = pages_of(unit, tile + 1)  # early, as above

            @pl.when(in_context)
            def _():
                starts = [
                    layer_row
                    + page_id * plan.page_size
                    + lax.rem(token_of(tile, piece), plan.page_size)
                    for piece, page_id in enumerate(page_ids)
                ]
                copy_tile(refs.latent, starts, step)

            @pl.when(jnp.logical_not(in_context))
            def _():
                start = _own_start(unit, tile)
                copy_tile(refs.own, [start + i * plan.piece for i in range(plan.pieces)], step)

            return step + 1, next_pages

        step, _ = lax.fori_loop(0, unit.tiles, copy_one, (step, unit.pages))
        return step

    _each_unit(refs, copy_unit)
    # Shared memory stays ours until all that was copied is read.
    plgpu.barrier_wait(refs.q_free)
    for slot in range(plan.slots):
        plgpu.barrier_wait(refs.kv_free.at[slot])
    for slot in range(plan.rope_slots):
        plgpu.barrier_wait(refs.rope_free.at[slot])


# -- scores


def _make_scores(refs: _Refs, plan: Plan, scale: float, interpret: Any) -> None:
    shape = (TILE, plan.queries)
    to_log2 = scale * 1.4426950408889634
    for slot in range(plan.rope_slots):
        plgpu.barrier_arrive(refs.rope_free.at[slot])
    plgpu.barrier_arrive(refs.q_free)

    def unit_scores(
        index: jax.Array, unit: _Unit, queries_end: jax.Array, step: jax.Array
    ) -> jax.Array:
        @pl.when(unit.new_queries == 1)
        def _():
            plgpu.barrier_wait(refs.q_full)

        def tile_scores(i: jax.Array, carry: Any) -> Any:
            step, top, total = carry
            rope_slot, slot = lax.rem(step, plan.rope_slots), lax.rem(step, plan.prob_slots)
            raw = _score_product(refs, plan, step, interpret)
            plgpu.barrier_arrive(refs.rope_free.at[rope_slot])

            @pl.when((i == unit.tiles - 1) & queries_end)
            def _():
                plgpu.barrier_arrive(refs.q_free)

            tile = unit.first_tile + i
            scores = raw * to_log2
            start, stop = _real(unit, tile)
            in_context = tile < _context_tiles(unit)
            kind = jnp.where(in_context, jnp.where(stop < TILE, 1, 0), 2)
            scores = lax.switch(
                kind,
                [
                    lambda s: s,
                    lambda s: jnp.where(_iota(shape, 0) < stop, s, -jnp.inf),
                    lambda s: _hide(s, *_ancestor_words(refs, plan, unit), start, stop),
                ],
                scores,
            )

            plgpu.barrier_wait(refs.probs_free.at[slot])
            first = i == 0
            rises = lax.cond(
                first,
                lambda: _any_exceeds(jnp.abs(scores), _none(shape), interpret),
                lambda: _any_exceeds(scores, _spread(top, shape), interpret),
            )

            def rise() -> tuple[jax.Array, jax.Array]:
                largest = jnp.max(scores, axis=0)
                near = jnp.where(first & (jnp.abs(largest) <= _SLACK), 0.0, _round(largest))
                new_top = jnp.where(largest - top > _SLACK, near, top)
                factor = jnp.exp2(top - new_top)
                refs.rescale.at[slot, pl.ds(0, plan.queries)][...] = factor
                return new_top, total * _spread(factor, shape)

            def keep() -> tuple[jax.Array, jax.Array]:
                return jnp.where(first, 0.0, top), total

            top, total = lax.cond(rises, rise, keep)
            refs.rescale[slot, plan.queries] = jnp.where(rises, 1.0, 0.0)
            probs = jnp.exp2(scores - _spread(top, shape))
            refs.probs.at[slot].T[...] = probs.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.probs_full.at[slot])
            return step + 1, top, total + probs

        top = plgpu.layout_cast(jnp.full((plan.queries,), NOTHING, jnp.float32), _QUERY)
        total = _none(shape)
        step, top, total = lax.fori_loop(0, unit.tiles, tile_scores, (step, top, total))
        refs.top.at[unit.slot][...] = top
        refs.total.at[unit.slot][...] = jnp.sum(total, axis=0)
        return step

    _each_unit(refs, unit_scores)
    for slot in range(plan.prob_slots):
        plgpu.barrier_wait(refs.probs_free.at[slot])


def _score_product(refs: _Refs, plan: Plan, step: jax.Array, interpret: Any) -> jax.Array:
    """K Q^T of the tile `step`: float32 [TILE, queries]."""
    # Zero, which the compiler does not know: else it would compute the addresses of all the
    # queries' parts once, before the loop, and run out of registers for them.
    only = lax.optimization_barrier(jnp.int32(0))

    def operands():
        for chunk in range(plan.chunks):
            slot = lax.rem(step * plan.chunks + chunk, plan.slots)
            plgpu.barrier_wait(refs.kv_full.at[slot])
            yield (
                refs.kv.at[slot],
                refs.q_latent.at[only, :, pl.ds(chunk * plan.columns, plan.columns)],
            )
        slot = lax.rem(step, plan.rope_slots)
        plgpu.barrier_wait(refs.rope_full.at[slot])
        yield refs.k_rope.at[slot], refs.q_rope.at[only]

    shape = (TILE, plan.queries)
    if plan.tensor_core == "wgmma" and not interpret:

        def product(acc: Any) -> jax.Array:
            for keys, queries in operands():
                plgpu.wgmma(acc, keys, queries.T)
            return acc[...]

        return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    acc = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)
    for keys, queries in operands():
        acc = _mma(acc, keys, queries.T, interpret)
    return acc


def _any_exceeds(scores: jax.Array, top: jax.Array, interpret: Any) -> jax.Array:
    """Whether a score exceeds its `top` by more than _SLACK, anywhere in the tile."""
    if interpret:
        return jnp.any(scores - top > _SLACK)  # false for NaN

    # A vote of the warpgroup at its own barrier, where a reduction would take two of them and more.
    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _WGMMA),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_: Any, scores: Any, top: Any) -> Any:
        over = [
            arith.subf(s, t) for s, t in zip(scores.registers.flat, top.registers.flat, strict=True)
        ]
        most = functools.reduce(arith.maxnumf, over)  # which ignores NaN
        first, second = (vector.extract(most, [], [i]) for i in range(2))
        most = arith.maxnumf(first, second)
        exceeds = arith.cmpf(
            arith.CmpFPredicate.OGT, most, arith.constant(ir.F32Type.get(), _SLACK)
        )
        word = ir.IntegerType.get_signless(32)
        text = (
            "{.reg .pred vote; setp.ne.b32 vote, $1, 0; bar.red.or.pred vote, $2, 128, vote;"
            " selp.b32 $0, 1, 0, vote;}"
        )
        found = mosaic.inline_ptx(
            text,
            arith.extui(word, exceeds),
            mosaic.warpgroup_barrier_idx(sync=False),
            result_types=word,
            has_side_effects=True,
            convergent=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return vote(scores, top) > 0  # type: ignore[call-arg]


def _ancestor_words(refs: _Refs, plan: Plan, unit: _Unit) -> tuple[jax.Array, jax.Array]:
    """Both ancestor words of every query's row, int32 [queries] each."""
    column = _iota((plan.queries,), 0, _QUERY)
    first = unit.own * plan.heads - unit.query  # column of the sequence's first query, or before
    begin = jnp.maximum(lax.div(-first, plan.heads), 0)
    end = jnp.minimum(lax.div(plan.queries - 1 - first, plan.heads) + 1, unit.rows)
    words = refs.ancestors.shape[1]

    def add(row: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = first + row * plan.heads
        mine = (column >= start) & (column < start + plan.heads)
        return tuple(
            jnp.where(jnp.logical_not(mine), old, refs.ancestors[unit.own + row, word])
            for word, old in enumerate(found)
        )

    none = plgpu.layout_cast(jnp.zeros((plan.queries,), jnp.int32), _QUERY)
    found = (none,) * words
    most = -(-plan.queries // plan.heads) + 1
    if most <= 6:  # all loads under way together, while registers last
        for k in range(most):
            row = jnp.minimum(begin + k, end - 1)  # the last one again: it does no harm
            found = add(row, found)
    else:
        found = lax.fori_loop(begin, end, add, found)
    return found[0], found[1] if words > 1 else none


def _hide(
    scores: jax.Array, low: jax.Array, high: jax.Array, start: jax.Array, stop: jax.Array
) -> jax.Array:
    """-inf where a query's row does not see the own row at a place; places from start to stop."""
    row = _iota(scores.shape, 0) - start
    word = jnp.where(row < 32, _spread(low, scores.shape), _spread(high, scores.shape))
    bit = lax.shift_right_logical(word, row & 31) & 1
    seen = jnp.where((row >= 0) & (row < stop - start), bit, 0)
    return jnp.where(seen == 1, scores, -jnp.inf)


# -- values


def _sum_values(refs: _Refs, plan: Plan, part: jax.Array, interpret: Any) -> None:
    for slot in range(plan.slots):
        plgpu.barrier_arrive(refs.kv_free.at[slot])
    for slot in range(plan.prob_slots):
        plgpu.barrier_arrive(refs.probs_free.at[slot])
    # wgmma takes all columns of a chunk in one go; mma.sync 64 at a time, to hold fewer operands.
    at_once = plan.columns if plan.tensor_core == "wgmma" else TILE
    layout = plgpu.Layout._WGMMA_ACC_32BIT if plan.tensor_core == "wgmma" else _WGMMA
    blocks = plan.columns // at_once
    chunks = [part + c for c in range(0, plan.chunks, plan.parts)]  # mine

    def unit_values(index: jax.Array, unit: _Unit, _: Any, step: jax.Array) -> jax.Array:
        def tile_values(i: jax.Array, carry: Any) -> Any:
            step, *sums = carry
            slot = lax.rem(step, plan.prob_slots)
            plgpu.barrier_wait(refs.probs_full.at[slot])

            def rescaled() -> list[jax.Array]:
                factor = plgpu.load(
                    refs.rescale.at[slot, pl.ds(0, plan.queries)],
                    layout=layout.reduce(0),
                    optimized=False,
                )
                return [x * _spread(factor, x.shape, layout) for x in sums]

            sums = lax.cond(refs.rescale[slot, plan.queries] > 0, rescaled, lambda: sums)
            start, stop = _real(unit, unit.first_tile + i)
            in_context = unit.first_tile + i < _context_tiles(unit)
            last = i == unit.tiles - 1
            held = []
            for c, chunk in enumerate(chunks):
                mine = lax.rem(step * plan.chunks + chunk, plan.slots)
                plgpu.barrier_wait(refs.kv_full.at[mine])
                for other in range(1, plan.parts):
                    # A barrier's phases are counted: none may be left out.
                    theirs = c * plan.parts + lax.rem(part + other, plan.parts)
                    theirs = lax.rem(step * plan.chunks + theirs, plan.slots)
                    plgpu.barrier_wait(refs.kv_full.at[theirs])
                    plgpu.barrier_arrive(refs.kv_free.at[theirs])

                @pl.when((stop < TILE) | jnp.logical_not(in_context))
                def _(mine: jax.Array = mine) -> None:
                    _clear(refs.kv.at[mine], unit, in_context, start, stop)
                    plgpu.commit_smem()

                for b in range(blocks):
                    sums[c * blocks + b] = _add_product(
                        plan,
                        sums[c * blocks + b],
                        refs.kv.at[mine, :, pl.ds(b * at_once, at_once)].T,
                        refs.probs.at[slot].T,
                        interpret,
                    )
                if not plan.through_slots:
                    plgpu.barrier_arrive(refs.kv_free.at[mine])
                    continue

                @pl.when(last)
                def _(
                    mine: jax.Array = mine,
                    chunk: jax.Array = chunk,
                    done: list[jax.Array] = sums[c * blocks : (c + 1) * blocks],
                ) -> None:
                    _lay_down(refs, plan, unit, mine, chunk, done)

                @pl.when(jnp.logical_not(last))
                def _(mine: jax.Array = mine) -> None:
                    plgpu.barrier_arrive(refs.kv_free.at[mine])

                held.append(mine)
            plgpu.barrier_arrive(refs.probs_free.at[slot])

            @pl.when(last)
            def _() -> None:
                if plan.through_slots:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for mine in held:
                    plgpu.barrier_arrive(refs.kv_free.at[mine])

            return step + 1, *sums

        zero = plgpu.layout_cast(jnp.zeros((at_once, plan.queries), jnp.float32), layout)
        zeros = [zero] * (len(chunks) * blocks)
        step, *sums = lax.fori_loop(0, unit.tiles, tile_values, (step, *zeros))
        for c, chunk in enumerate(() if plan.through_slots else chunks):
            for b in range(blocks):
                columns = pl.ds(chunk * plan.columns + b * at_once, at_once)
                block = plgpu.layout_cast(sums[c * blocks + b], plgpu.Layout._WGMMA_ACC_32BIT)
                refs.out.at[unit.slot, :, columns].T[...] = block.astype(refs.out.dtype)
        return step

    _each_unit(refs, unit_values)


def _lay_down(
    refs: _Refs, plan: Plan, unit: _Unit, slot: jax.Array, chunk: jax.Array, sums: list[jax.Array]
) -> None:
    """Begins to copy a chunk's sums to memory, through the slot of the unit's last tile.

    Nobody else reads that chunk any more, and it is not given back before the copy has read it.
    """
    width = plan.columns // len(sums)
    for b, block in enumerate(sums):
        block = plgpu.layout_cast(block, _WGMMA).astype(refs.out.dtype)
        refs.kv.at[slot, pl.ds(0, plan.queries), pl.ds(b * width, width)].T[...] = block
    plgpu.commit_smem()
    columns = pl.ds(chunk * plan.columns, plan.columns)
    plgpu.copy_smem_to_gmem(
        refs.kv.at[slot, pl.ds(0, plan.queries)], refs.out.at[unit.slot, :, columns]
    )


def _add_product(plan: Plan, acc: jax.Array, values: Any, probs: Any, interpret: Any) -> Any:
    """acc + V^T P: values [columns, TILE], probs [TILE, queries]."""
    if plan.tensor_core == "wgmma" and not interpret:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, values, probs))(
            plgpu.WGMMAAccumulatorRef.init(acc)
        )
    return _mma(acc, values, probs, interpret)


def _clear(
    tile: Any, unit: _Unit, in_context: jax.Array, start: jax.Array, stop: jax.Array
) -> None:
    """Zeroes what nobody sees: it may hold NaN, and 0 * NaN is NaN."""
    place = _iota((TILE, 64), 0)
    row = place - start
    word = jnp.where(row < 32, unit.seen_low, unit.seen_high)
    bit = lax.shift_right_logical(word, row & 31) & 1
    bit = jnp.where(in_context, 1, bit)
    real = (place >= start) & (place < stop) & (bit == 1)
    for column in range(0, tile.shape[1], 64):
        part = tile.at[:, pl.ds(column, 64)]
        values = plgpu.load(part, layout=_WGMMA)
        part[...] = jnp.where(real, values, jnp.zeros_like(values))


# -- helpers


def wait_for_the_kernel_before() -> None:
    """Until it has ended and its results are there; the next one may start, and wait for us."""
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()


def _mma(acc: jax.Array, a: Any, b: Any, interpret: Any) -> jax.Array:
    """acc + a b by mma.sync, 64 of the summed-up dimension at a time."""
    for start in range(0, a.shape[1], 64):
        width = min(64, a.shape[1] - start)
        left, right = a.at[:, pl.ds(start, width)], b.at[pl.ds(start, width)]
        if interpret:  # which has no rule for mma
            acc += lax.dot(left[...], right[...], preferred_element_type=jnp.float32)
            continue
        acc = plgpu.mma(
            acc,
            plgpu.load(left, layout=plgpu.Layout.MMA_LHS(jnp.bfloat16)),
            plgpu.load(right, layout=plgpu.Layout.MMA_RHS(jnp.bfloat16)),
        )
    return acc


def _iota(shape: tuple[int, ...], axis: int, layout: Any = _WGMMA) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def _spread(values: jax.Array, shape: tuple[int, ...], layout: Any = _WGMMA) -> jax.Array:
    """[queries] -> shape [..., queries]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, (1,)), layout)


def _none(shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)


def _round(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
