"""The routed experts' kernel as a JAX operation: `program.program` on a GPU."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kimi_jax.pallas.int4_moe import tuning
from kimi_jax.pallas.int4_moe.packed import Packed
from kimi_jax.pallas.int4_moe.program import (
    BOTH,
    MAX_ROWS,
    NUM_WARPS,
    Layout,
    Phase,
    Shape,
    Tiling,
    program,
)
from kimi_jax.pallas.stream.gpu import Gpu
from kimi_jax.pallas.stream.target import Target

WARPGROUPS = NUM_WARPS // 4


def routed_experts(
    x: jax.Array,
    ids: jax.Array,
    shares: jax.Array,
    packed: Packed,
    *,
    target: Target,
    layer: int | jax.Array | None = None,
    routed_over: int | None = None,
    tiling: Tiling | None = None,
    fused: bool = True,
    after: jax.Array | None = None,
) -> jax.Array:
    """float32 [M, D]; see `api.routed_experts`.

    layer: index into a stack, None for arrays of one layer. tiling: None for `tuning.choose`; it
    changes no bit. fused: one launch, or one for each phase. after: an array that has to be there
    first; it is not read, and chains calls without an operation between them. More than MAX_ROWS
    rows take several launches, each of which reads the experts that its rows chose.

    Every multiprocessor takes part and waits for all others: two of these kernels must never run
    at the same time on one GPU. In a model one depends on the other.
    """
    shape = Shape(
        rows=min(x.shape[0], MAX_ROWS),
        choices=ids.shape[1],
        experts=packed.num_experts,
        hidden=packed.hidden,
        width=packed.width,
        routed_over=routed_over,
    )
    x = jnp.pad(x, ((0, 0), (0, shape.padded_hidden - shape.hidden)))
    first = jnp.asarray(0 if layer is None else layer * shape.experts, jnp.int32).reshape(1)
    gate_up = packed.gate_up.reshape(-1, *packed.gate_up.shape[-3:])
    down = packed.down.reshape(-1, *packed.down.shape[-4:])
    out = []
    for start in range(0, x.shape[0], MAX_ROWS):
        rows = slice(start, min(start + MAX_ROWS, x.shape[0]))
        part = shape.with_rows(rows.stop - rows.start)
        layout = Layout(shape=part, tiling=tiling or tuning.choose(part, target))
        if layout.shared_bytes > target.shared_bytes:
            raise ValueError(
                f"int4_moe: {layout.tiling} needs {layout.shared_bytes} bytes of shared memory;"
                f" a block of {target.name} has {target.shared_bytes}"
            )
        out.append(
            _launch(
                layout,
                target.num_cores,
                fused,
                *(x[rows], ids[rows], shares[rows], first, gate_up, down, packed.counter),
                out[-1] if out else after,
            )
        )
    return jnp.concatenate(out)[:, : shape.hidden]


# Under its own jit, equal calls (the layers of a model) are lowered and compiled once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(
    layout: Layout,
    num_blocks: int,
    fused: bool,
    x: jax.Array,
    ids: jax.Array,
    shares: jax.Array,
    first: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    counter: jax.Array,
    after: jax.Array | None,
) -> jax.Array:
    """float32 [M, D padded]; operands as in `program.program`."""
    routing = dict(ids=ids, shares=shares, first=first, counter=counter)
    if after is not None:
        routing["after"] = after
    call = functools.partial(_call, layout, num_blocks)
    if fused:
        return call(BOTH, x=x, gate_up=gate_up, down=down, **routing)["out"]
    hidden = call(("gate_up",), x=x, gate_up=gate_up, **routing)["hidden"]
    return call(("down",), down=down, hidden=hidden, **routing)["out"]


def _call(
    layout: Layout, num_blocks: int, phases: tuple[Phase, ...], **operands: jax.Array
) -> dict[str, jax.Array]:
    shape = layout.shape
    types = {}
    if "gate_up" in phases:
        types["hidden"] = jax.ShapeDtypeStruct(layout.hidden_shape, jnp.bfloat16)
    if "down" in phases:
        types["out"] = jax.ShapeDtypeStruct((shape.rows, shape.padded_hidden), jnp.float32)
    names = (*operands, *types)

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def emit(_, *memory):
            *buffers, shared = memory
            machine = Gpu(shared, dict(zip(names, buffers, strict=True)))
            program(machine, layout, num_blocks, phases)

        emit(*refs)

    results = plgpu.kernel(
        body,
        out_type=tuple(types.values()),
        scratch_types=[plgpu.SMEM((layout.shared_bytes // 4,), jnp.int32)],
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        kernel_name="int4_moe" if phases == BOTH else f"int4_moe_{phases[0]}",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*operands.values())
    return dict(zip(types, results, strict=True))
