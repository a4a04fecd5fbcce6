"""Clocks an m64 k16 step of the two products of `tree_mla` takes, and what a block can load.

python3 -m bench.wgmma_rates        20 seconds on an H200
"""

import functools
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import profiler
from jax.experimental.pallas import mosaic_gpu as plgpu

LOOPS, REPEATS, GHZ = 1000, 4, 1.755
BLOCKS = 132


def matrix(*shape):
    tiling = plgpu.TilingTransform((8, 64))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tiling, plgpu.SwizzleTransform(128)))


def params():
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
    )


def products(queries, scores, values, wide):
    """Warpgroups that only multiply: one with S = K Q^T, two with O += V^T P, or with P V."""
    ways = (["s"] if scores else []) + ["v"] * values + ["w"] * wide

    def body(loops, out, kv, q, probs, p64):
        me = lax.axis_index("wg")

        def repeat(shape, issue):
            def once(_, acc):
                def issues(ref):
                    for _ in range(REPEATS):
                        issue(ref)

                return pl.run_state(issues)(plgpu.WGMMAAccumulatorRef.init(acc))

            layout = plgpu.Layout._WGMMA_ACC_32BIT
            acc = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
            acc = lax.fori_loop(0, loops[0], once, acc)  # not known: else unrolled
            out.at[me, pl.ds(0, shape[0]), pl.ds(0, shape[1])][...] = acc

        def score(ref):  # 8 steps
            plgpu.wgmma(ref, kv.at[:, pl.ds(0, 128)], q.T)

        def value(ref):  # 2 x 4 steps
            plgpu.wgmma(ref, kv.at[:, pl.ds(0, 128)].T, probs.T)

        def wider(ref):  # 4 steps
            plgpu.wgmma(ref, p64, kv)

        for i, way in enumerate(ways):
            shape, issue = {
                "s": ((64, queries), score),
                "v": ((128, queries), value),
                "w": ((64, 256), wider),
            }[way]

            @pl.when(me == i)
            def _(shape=shape, issue=issue):
                repeat(shape, issue)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(ways), 128, 256), jnp.float32),
        scratch_types=dict(
            kv=matrix(64, 256),
            q=matrix(queries, 128),
            probs=matrix(queries, 64),
            p64=matrix(64, 64),
        ),
        grid=(BLOCKS,),
        grid_names=("b",),
        num_threads=len(ways),
        thread_name="wg",
        kernel_name="rates",
        compiler_params=params(),
    )


def loads(blocks, slots):
    """One warpgroup copies tiles of 64 x 512 in chunks of 128 columns, one gives them back."""

    def body(loops, source, out, kv, full, free):
        me, block = lax.axis_index("wg"), lax.axis_index("b")

        @pl.when(me == 0)
        def _():
            def step(i, _):
                slot = lax.rem(i, slots)

                @pl.when(i >= slots)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                row = lax.rem(block * 37 + i // 4, source.shape[0] // 64) * 64
                columns = pl.ds(lax.rem(i, 4) * 128, 128)
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(row, 64), columns], kv.at[slot], full.at[slot]
                )
                return 0

            lax.fori_loop(0, loops[0], step, 0)

        @pl.when(me == 1)
        def _():
            def step(i, _):
                slot = lax.rem(i, slots)
                plgpu.barrier_wait(full.at[slot])

                @pl.when(i < loops[0] - slots)
                def _():
                    plgpu.barrier_arrive(free.at[slot])

                return 0

            lax.fori_loop(0, loops[0], step, 0)
            out[block] = block

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((blocks,), jnp.int32),
        scratch_types=dict(
            kv=matrix(slots, 64, 128),
            full=plgpu.Barrier(num_barriers=slots),
            free=plgpu.Barrier(num_barriers=slots),
        ),
        grid=(blocks,),
        grid_names=("b",),
        num_threads=2,
        thread_name="wg",
        kernel_name="loads",
        compiler_params=params(),
    )


CASES = [(n, *w) for n in (8, 40, 56) for w in ((1, 0, 0), (0, 1, 0), (0, 2, 0), (1, 2, 0))]
CASES += [(64, 1, 0, 0), (64, 0, 0, 1), (64, 0, 0, 2)]


def ms(call, *operands):
    call(*operands)
    return min(profiler.measure(call)(*operands)[1] for _ in range(2))


def main():
    for queries, scores, values, wide in CASES:
        call = jax.jit(functools.partial(products(queries, scores, values, wide)))
        loops = jnp.full((1,), LOOPS, jnp.int32)
        clocks = ms(call, loops) * 1e6 * GHZ / (LOOPS * REPEATS)
        steps = 8 * scores + 8 * values + 4 * wide
        ideal = 8 * (scores + values) * queries / 2 + 4 * wide * 128
        print(
            f"{queries:3} queries, {scores} scores, {values} values, {wide} wide: "
            f"{clocks / steps:6.1f} clocks a step, {100 * ideal / clocks:5.1f} % of the peak",
            flush=True,
        )
    for rows in (32768, 1 << 20):
        source = jnp.zeros((rows, 576), jnp.bfloat16)
        for blocks in (17, 132):
            for slots in (4, 8, 12):
                time = ms(jax.jit(loads(blocks, slots)), jnp.full((1,), 1024, jnp.int32), source)
                rate = 1024 * 16384 / (time * 1e6 * GHZ)
                print(
                    f"loads from {rows * 1152 >> 20} MB, {blocks:3} blocks, {slots:2} slots: "
                    f"{rate:5.1f} bytes a clock a block, {rate * blocks * GHZ / 1e3:5.2f} TB/s",
                    flush=True,
                )


if __name__ == "__main__":
    sys.exit(main())
