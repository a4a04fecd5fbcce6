"""Which tiling a shape gets: measured where it was measured, by rule elsewhere.

A tiling changes the time of a call, never a bit of its result (see `program`).
"""

import math

from kimi_jax.pallas.int4_moe.program import Layout, Shape, Tiling
from kimi_jax.pallas.stream.packing import padded
from kimi_jax.pallas.stream.target import SHARED_GRANULE, Target

MAX_SLOTS = 24
ENOUGH_BYTES = 128 * 1024
CHUNKS = 1.8
DOWN_UNITS = 4

MEASURED: dict[str, dict[tuple[int, int, int, int, int], Tiling]] = {}
"""Per target name: (rows, experts, routed over, hidden, width) -> tiling, where
`python3 -m bench.int4_moe --tune` finds one that beats the rule's. On an H200 none of those tried
for 4 and 128 rows did by more than 1.5 % (bench/results/int4_moe_h200_tune.json)."""


def choose(shape: Shape, target: Target) -> Tiling:
    """The tiling for `shape` on `target`; NotImplementedError if none fits its shared memory."""
    over = shape.routed_over or shape.experts
    key = shape.rows, shape.experts, over, shape.hidden, shape.width
    return MEASURED.get(target.name, {}).get(key) or by_rule(shape, target)


def by_rule(shape: Shape, target: Target) -> Tiling:
    """Sized for choices that fall evenly on the experts.

    tile_rows: so that few experts have more rows, and their weights are read once. warp_blocks:
    such that a multiprocessor still has CHUNKS chunks, for one to load while another is summed; at
    most 4 (32 sums a lane with 8 rows). A slot of down: DOWN_UNITS units, then what keeps most
    bytes of weights in flight. Smaller tiles where shared memory does not hold two slots a ring.
    """
    experts = expected_experts(shape)
    mean = expected_pairs(shape) / experts
    likely = mean + 1.5 * math.sqrt(mean)
    tile_rows = next((n for n in (8, 16) if min(likely, shape.rows) <= n), 32)
    share = experts * shape.gate_blocks / target.num_cores
    m_warps = 8 // shape.k_slices
    warp_blocks = next((n for n in (4, 2) if share >= CHUNKS * n * m_warps), 1)
    for rows in (n for n in (32, 16, 8) if n <= tile_rows):
        for blocks in (n for n in (4, 2, 1) if n <= warp_blocks):
            fitting = candidates(shape, target, tile_rows=rows, warp_blocks=blocks)
            if fitting:
                most = max(_units_in_slot(tiling) for tiling in fitting)
                fullest = [tiling for tiling in fitting if _units_in_slot(tiling) == most]
                return min(fullest, key=lambda tiling: _slowness(shape, tiling))
    raise NotImplementedError(
        f"int4_moe: no tiling of {shape} fits {target.shared_bytes} bytes of shared memory"
    )


def expected_experts(shape: Shape) -> float:
    """Experts that at least one pair chose, for even choices."""
    return shape.experts * (1 - (1 - 1 / (shape.routed_over or shape.experts)) ** shape.pairs)


def expected_pairs(shape: Shape) -> float:
    """Pairs whose expert is here."""
    return shape.pairs * shape.experts / (shape.routed_over or shape.experts)


def candidates(
    shape: Shape, target: Target, *, tile_rows: int, warp_blocks: int, stream: bool = False
) -> list[Tiling]:
    """All contents of a slot of down, each with as many slots as fit `target`, if two do."""
    out = []
    for units in (n for n in (1, 2, 4, 8) if shape.width_units % n == 0):
        tiles = (1, 2, 4) if units == shape.width_units else (1,)
        for down_tiles in (n for n in tiles if n * tile_rows <= 32):
            for slots in range(MAX_SLOTS, 1, -1):
                tiling = Tiling(
                    tile_rows=tile_rows,
                    warp_blocks=warp_blocks,
                    down_units=units,
                    down_tiles=down_tiles,
                    slots=slots,
                    stream=stream,
                )
                used = Layout(shape=shape, tiling=tiling).shared_bytes
                if padded(used, SHARED_GRANULE) <= target.shared_bytes:
                    out.append(tiling)
                    break
    return out


def _units_in_slot(tiling: Tiling) -> int:
    return min(tiling.down_units * tiling.down_tiles, DOWN_UNITS)


def _slowness(shape: Shape, tiling: Tiling) -> float:
    """Falls with the bytes that the rings can have in flight, weighed by what each phase reads;
    beyond ENOUGH_BYTES there is nothing to win."""
    layout = Layout(shape=shape, tiling=tiling)
    slots = 2 * tiling.slots
    gate = min(slots * layout.gate_weight_bytes, ENOUGH_BYTES)
    down = min(slots * layout.down_weight_bytes * tiling.down_tiles, ENOUGH_BYTES)
    return 2 / gate + 1 / down
