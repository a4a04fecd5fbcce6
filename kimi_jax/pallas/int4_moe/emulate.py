"""The routed experts' kernel on the CPU, for tests with small shapes."""

import numpy as np

from kimi_jax.pallas.int4_moe.packed import Packed
from kimi_jax.pallas.int4_moe.program import BOTH, NUM_WARPS, Layout, Phase, Shape, Tiling, program
from kimi_jax.pallas.stream import emulator


def routed_experts(
    x: np.ndarray,
    ids: np.ndarray,
    shares: np.ndarray,
    packed: Packed,
    *,
    tiling: Tiling,
    num_blocks: int,
    layer: int = 0,
    fused: bool = True,
    seed: int = 0,
) -> np.ndarray:
    """`kernel.routed_experts` by `stream.emulator`, on NumPy arrays (x in bfloat16).

    seed draws the order in which warps run and copies land. `packed.counter` is changed in place.
    """
    shape = Shape(
        rows=x.shape[0],
        choices=ids.shape[1],
        experts=packed.num_experts,
        hidden=packed.hidden,
        width=packed.width,
    )
    layout = Layout(shape=shape, tiling=tiling)
    padding = ((0, 0), (0, shape.padded_hidden - shape.hidden))
    buffers = {
        "x": np.pad(x, padding).view(np.uint16),
        "ids": np.ascontiguousarray(ids, np.int32),
        "shares": np.ascontiguousarray(shares, np.float32),
        "first": np.array([layer * shape.experts], np.int32),
        "gate_up": np.ascontiguousarray(packed.gate_up),
        "down": np.ascontiguousarray(packed.down),
        "counter": np.asarray(packed.counter),
        "hidden": np.full(layout.hidden_shape, 0xFFFF, np.uint16),  # NaN
        "out": np.full((shape.rows, shape.padded_hidden), np.nan, np.float32),
    }
    launches: tuple[tuple[Phase, ...], ...] = (BOTH,) if fused else (("gate_up",), ("down",))
    for phases in launches:
        emulator.run(
            lambda m, phases=phases: program(m, layout, num_blocks, phases),
            buffers,
            shared_bytes=layout.shared_bytes,
            num_blocks=num_blocks,
            num_warps=NUM_WARPS,
            seed=seed,
        )
    return buffers["out"][:, : shape.hidden]
