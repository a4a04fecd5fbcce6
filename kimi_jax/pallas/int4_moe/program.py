"""The routed experts as one persistent kernel: dispatch, gate and up, SwiGLU, down, weighted sum.

One block per multiprocessor: two consumer warpgroups and one for producers, two rings (one a
consumer warpgroup) of shared memory filled by bulk copies.

1. Dispatch: every block sorts the routed pairs (row, expert) by expert, in shared memory: experts
   in id order, each expert's rows in tiles of at most `tile_rows`. Dead pairs (id outside [0, E))
   are in no tile, and cost nothing from here on.
2. Gate and up. The work of a tile is its F / 8 blocks of 16 outputs x all of D; the blocks of all
   tiles, one after another, are cut into one equal range a multiprocessor, and a range into chunks
   of at most `chunk_blocks` blocks of one tile. Over K a chunk is split among `k_slices` warps,
   128 columns in turn; the slices' sums are added in order through shared memory, and SwiGLU leaves
   bfloat16 rows in global memory.
3. A barrier over the grid (a counter in global memory). Meanwhile the rings fill with the first
   weights of down.
4. Down. A block owns 64 outputs and walks all tiles in order, its warpgroups taking turns at items
   of `down_tiles` tiles; each adds share * value to the output in memory. So the experts of a row
   add up in id order.

Which block does what depends on the routing; the order in which any one output is summed does not:
slices of K and their order follow from D and F alone, tile and chunk sizes do not enter. A row's
result is bit-equal whatever else is in the batch.

Inside, a weight is code - 8 as bfloat16, exactly; the scale of a group of 32 inputs multiplies the
float32 sum that the tensor cores make of it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from kimi_jax.pallas.stream.machine import WARP, Machine, Value
from kimi_jax.pallas.stream.packing import (
    BLOCK,
    CODE_WORDS,
    GROUP,
    PAD_HIDDEN,
    PAD_WIDTH,
    UNIT_BYTES,
    UNIT_INPUTS,
    padded,
)
from kimi_jax.pallas.stream.ring import Rings

RINGS = 2  # one a consumer warpgroup
GROUP_WARPS = 4  # warps of a warpgroup
CONSUMERS = RINGS * GROUP_WARPS
NUM_WARPS = CONSUMERS + GROUP_WARPS

DOWN_BLOCKS = 4  # blocks of 16 outputs that a block of the grid owns in down
DOWN_ROWS = DOWN_BLOCKS * BLOCK
GATE_ROWS = BLOCK // 2  # gate outputs of a block; as many of up beside them

MAX_ROWS = 256  # M that one launch takes: bounds what dispatch keeps in shared memory
ROW_GAP = 64  # bytes between rows in shared memory: 8 lanes x 16 bytes then meet no bank twice
COLUMNS = 8  # rows of x that one tensor-core instruction takes

# Named barriers (0 to 3 belong to Pallas).
DISPATCH, CONSUME, TURN = 4, 5, 6  # TURN + warpgroup

LAUNCH_UNIT = 1 << 16  # what a launch adds to the counter in all

Phase = Literal["gate_up", "down"]
BOTH: tuple[Phase, ...] = ("gate_up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is computed. rows M, choices K of each, experts E in the arrays, hidden D, width F.

    routed_over: experts that the choices fall on, of which E are here (None: all); tells a tiling
    what to expect, and changes no bit.
    """

    rows: int
    choices: int
    experts: int
    hidden: int
    width: int
    routed_over: int | None = None

    def with_rows(self, rows: int) -> "Shape":
        return dataclasses.replace(self, rows=rows)

    @property
    def padded_hidden(self) -> int:
        return padded(self.hidden, PAD_HIDDEN)

    @property
    def padded_width(self) -> int:
        return padded(self.width, PAD_WIDTH)

    @property
    def pairs(self) -> int:
        return self.rows * self.choices

    @property
    def k_slices(self) -> int:
        """Warps that share the sum over D. By shape alone: it decides how a result is rounded.

        Narrow experts give each multiprocessor few outputs when one row is decoded, and need more
        warps on each.
        """
        return 4 if self.padded_width <= 512 and self.hidden_units % 4 == 0 else 2

    @property
    def hidden_units(self) -> int:
        return self.padded_hidden // UNIT_INPUTS

    @property
    def width_units(self) -> int:
        return self.padded_width // UNIT_INPUTS

    @property
    def gate_blocks(self) -> int:
        return self.padded_width // GATE_ROWS

    @property
    def down_tiles(self) -> int:
        return self.padded_hidden // DOWN_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How it is cut. Changes time, never a bit of the result.

    tile_rows: rows of one expert multiplied together, 8, 16 or 32;
    warp_blocks: blocks of 16 outputs that a warp sums side by side in gate and up, a power of two;
    down_units: units of 128 inputs of down in a slot; divides F / 128;
    down_tiles: tiles in a slot of down; more than 1 only with all of F, and as many rows as lanes;
    slots: slots of each ring;
    stream: weights leave L2 first (they are read once).
    """

    tile_rows: int
    warp_blocks: int
    down_units: int
    slots: int
    down_tiles: int = 1
    stream: bool = False

    def __post_init__(self) -> None:
        if self.tile_rows not in (8, 16, 32):
            raise ValueError(f"tile_rows={self.tile_rows}: expected 8, 16 or 32")
        if self.warp_blocks not in (1, 2, 4, 8):
            raise ValueError(f"warp_blocks={self.warp_blocks}: expected 1, 2, 4 or 8")
        if self.slots < 2:
            raise ValueError(f"slots={self.slots}: a ring needs at least 2")
        if not 1 <= self.down_tiles <= WARP // self.tile_rows:
            raise ValueError(
                f"down_tiles={self.down_tiles}: expected 1 to {WARP // self.tile_rows} with"
                f" tile_rows={self.tile_rows}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything static that follows from a shape and a tiling; addresses in bytes."""

    shape: Shape
    tiling: Tiling

    def __post_init__(self) -> None:
        if self.shape.width_units % self.tiling.down_units:
            raise ValueError(
                f"down_units={self.tiling.down_units} does not divide the"
                f" {self.shape.width_units} units of width {self.shape.width}"
            )
        if self.tiling.down_tiles > 1 and self.down_rounds > 1:
            raise ValueError(
                f"down_tiles={self.tiling.down_tiles} needs all {self.shape.width_units} units in a"
                f" slot, got down_units={self.tiling.down_units}"
            )
        if self.shape.rows > MAX_ROWS:
            raise ValueError(f"rows={self.shape.rows}: one launch takes at most {MAX_ROWS}")

    @property
    def tile_rows(self) -> int:
        return self.tiling.tile_rows

    @property
    def held_rows(self) -> int:
        """Rows that a slot has room for."""
        return min(self.tile_rows, self.shape.rows)

    @property
    def k_warps(self) -> int:
        """Warps of a warpgroup that share a sum."""
        return self.shape.k_slices // RINGS

    @property
    def m_warps(self) -> int:
        """Warps of a warpgroup with different outputs."""
        return GROUP_WARPS // self.k_warps

    @property
    def chunk_blocks(self) -> int:
        return self.m_warps * self.tiling.warp_blocks

    @property
    def gate_rounds(self) -> int:
        return self.shape.hidden_units // self.shape.k_slices

    @property
    def gate_weight_bytes(self) -> int:
        return self.k_warps * self.chunk_blocks * UNIT_BYTES

    @property
    def gate_row_stride(self) -> int:
        return self.k_warps * UNIT_INPUTS * 2 + ROW_GAP

    @property
    def down_rounds(self) -> int:
        return self.shape.width_units // self.tiling.down_units

    @property
    def down_weight_bytes(self) -> int:
        """Of one tile."""
        return self.tiling.down_units * DOWN_BLOCKS * UNIT_BYTES

    @property
    def down_row_stride(self) -> int:
        return self.tiling.down_units * UNIT_INPUTS * 2 + ROW_GAP

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """Of the hidden rows in global memory, in the order in which slots of down take them: part
        of F, pair sorted by expert, columns and a gap; so one copy fetches the rows of a tile."""
        return self.down_rounds, self.shape.pairs, self.down_row_stride // 2

    @property
    def gate_slot_bytes(self) -> int:
        return self.gate_weight_bytes + self.held_rows * self.gate_row_stride

    @property
    def down_slot_bytes(self) -> int:
        tile = self.down_weight_bytes + self.held_rows * self.down_row_stride
        return self.tiling.down_tiles * tile

    @property
    def slot_bytes(self) -> int:
        return padded(max(self.gate_slot_bytes, self.down_slot_bytes), 128)

    @property
    def max_tiles(self) -> int:
        full = self.shape.pairs // self.tile_rows
        return min(self.shape.pairs, self.shape.experts + full)

    # The rings come first; before any copy, dispatch uses their memory for its masks.
    @property
    def mask_words(self) -> int:
        return -(-self.shape.rows // 32)

    @property
    def starts(self) -> int:
        """Behind the masks: [E + 1] words, first pair (low half) and first tile of each expert."""
        return 4 * self.shape.experts * self.mask_words

    @property
    def totals(self) -> int:
        return self.starts + 4 * (self.shape.experts + 1)

    @property
    def pairs(self) -> int:
        """[pairs] x (row, share), sorted by expert."""
        rings = RINGS * self.tiling.slots * self.slot_bytes
        return padded(max(rings, self.totals + 4 * GROUP_WARPS), 128)

    @property
    def tiles(self) -> int:
        """[max_tiles] x (expert | rows << 16, first pair)."""
        return self.pairs + 8 * self.shape.pairs

    @property
    def scalars(self) -> int:
        """Number of tiles, index of expert 0, value of the counter to wait for."""
        return padded(self.tiles + 8 * self.max_tiles, 16)

    @property
    def barriers(self) -> int:
        return self.scalars + 16

    @property
    def shared_bytes(self) -> int:
        return self.barriers + self.rings.barrier_bytes

    @property
    def rings(self) -> Rings:
        return Rings(
            base=0,
            slot_bytes=self.slot_bytes,
            slots=self.tiling.slots,
            rings=RINGS,
            consumers=GROUP_WARPS,
            barriers=self.barriers,
        )


def program(m: Machine, layout: Layout, num_blocks: int, phases: tuple[Phase, ...] = BOTH) -> None:
    """The kernel. Buffers:

    x bfloat16 [M, D], ids int32 [M, K], shares float32 [M, K], first int32 [1] (expert 0's index in
    the weights), gate_up and down (`stream.packing`), counter int32 (its first word a multiple of
    `LAUNCH_UNIT`; so it is again when the kernel ends), hidden bfloat16 `Layout.hidden_shape`, out
    float32 [M, D]. D and F padded. `phases`: one alone, as a launch of its own, reads or leaves
    `hidden`.
    """
    _Kernel(m, layout, num_blocks, phases).run()


class _Chunk(NamedTuple):
    """Successive blocks of gate and up of one tile; see `_Kernel.tile` and `_Kernel.chunk`."""

    expert: Value
    rows: Value
    first: Value
    inside: Value
    blocks: Value


class _Kernel:
    def __init__(
        self, m: Machine, layout: Layout, num_blocks: int, phases: tuple[Phase, ...]
    ) -> None:
        self.m, self.layout, self.num_blocks, self.phases = m, layout, num_blocks, phases
        self.shape, self.rings = layout.shape, layout.rings
        self.g, self.t = m.lane // 4, m.lane % 4

    def run(self) -> None:
        m = self.m
        m.if_(m.warp == 0, self.set_up)
        if "down" in self.phases:
            m.if_(m.warp < CONSUMERS, self.clear_output)
        m.if_(m.warp >= CONSUMERS, self.dispatch)
        m.sync_block()
        scalars = m.load_shared(self.layout.scalars, 0, 4)
        self.num_tiles, self.first_expert, self.goal = (m.uniform(v) for v in scalars[:3])
        total = self.num_tiles * self.shape.gate_blocks
        self.first_block = m.cta * total // self.num_blocks
        self.end_block = (m.cta + 1) * total // self.num_blocks
        self.my_down_tiles = (
            self.shape.down_tiles - m.cta + self.num_blocks - 1
        ) // self.num_blocks
        m.if_(m.warp < CONSUMERS, self.consume)
        m.if_(m.warp >= CONSUMERS, self.produce)

    # Before the weights.

    def set_up(self) -> None:
        m = self.m
        self.rings.init(m)
        # Read before this block can have arrived, so it is still what the launch began with.
        goal = (m.load_acquire("counter", 0) & -LAUNCH_UNIT) + LAUNCH_UNIT
        scalars = self.layout.scalars
        m.store_shared(scalars + 4, [m.load("first", 0)], m.lane == 0)
        m.store_shared(scalars + 8, [goal], m.lane == 0)

    def clear_output(self) -> None:
        """Zeros this block's outputs."""
        m, shape = self.m, self.shape
        thread, vectors = m.warp * WARP + m.lane, DOWN_ROWS // 4
        zeros = [m.zero()] * 4

        def clear(tile: Value) -> None:
            def step(i: Value) -> Sequence[Value]:
                index = i * (CONSUMERS * WARP) + thread
                row, column = index // vectors, tile * DOWN_ROWS + index % vectors * 4
                offset = (row * shape.padded_hidden + column) * 4
                m.store("out", offset, zeros, row < shape.rows)
                return ()

            m.for_(0, -(-shape.rows * vectors // (CONSUMERS * WARP)), step)

        self.own_down_tiles(clear)

    def own_down_tiles(self, body: Callable[[Value], None]) -> None:
        def step(i: Value) -> Sequence[Value]:
            body(self.m.cta + i * self.num_blocks)
            return ()

        count = (self.shape.down_tiles - self.m.cta + self.num_blocks - 1) // self.num_blocks
        self.m.for_(0, count, step)

    def dispatch(self) -> None:
        """Sorts the pairs by expert: bit masks of rows, counts, a scan, ranks."""
        m, shape, layout = self.m, self.shape, self.layout
        threads, words = GROUP_WARPS * WARP, layout.mask_words
        warp = m.warp - CONSUMERS
        thread = warp * WARP + m.lane

        def mask(expert: Value, word: Value) -> Value:
            return (expert * words + word) * 4

        pairs = []
        for chunk in range(-(-shape.pairs // threads)):
            pair = chunk * threads + thread
            present = pair < shape.pairs
            offset = m.select(present, pair, 0) * 4
            expert, share = m.load("ids", offset), m.load("shares", offset)
            valid = present & (expert >= 0) & (expert < shape.experts)
            row = pair // shape.choices
            pairs.append((m.select(valid, expert, 0), row, share, valid))
        for chunk in range(-(-shape.experts * words // threads)):
            index = chunk * threads + thread
            m.store_shared(index * 4, [0], index < shape.experts * words)
        m.sync(DISPATCH, threads)
        for expert, row, _, valid in pairs:
            m.or_shared(mask(expert, row >> 5), m.shl(1, row & 31), valid)
        m.sync(DISPATCH, threads)

        # A thread counts successive experts; pairs in the low, tiles in the high half of a word.
        each = -(-shape.experts // threads)
        counts = []
        for i in range(each):
            expert = thread * each + i
            present = expert < shape.experts
            count = 0
            for word in range(words):
                bits = m.load_shared(mask(m.select(present, expert, 0), word))[0]
                count = count + m.popcount(bits)
            tiles = (count + (layout.tile_rows - 1)) // layout.tile_rows
            counts.append(m.select(present, count + m.shl(tiles, 16), 0))
        mine = sum(counts[1:], counts[0])
        scan = mine
        for distance in (1, 2, 4, 8, 16):
            scan = scan + m.select(m.lane >= distance, m.shuffle_up(scan, distance), 0)
        m.store_shared(layout.totals + warp * 4, [scan], m.lane == WARP - 1)
        m.sync(DISPATCH, threads)
        start = scan - mine
        for other in range(GROUP_WARPS - 1):
            total = m.load_shared(layout.totals + other * 4)[0]
            start = start + m.select(warp > other, total, 0)
        for i, count in enumerate(counts):
            expert = thread * each + i
            m.store_shared(layout.starts + expert * 4, [start], expert < shape.experts)
            start = start + count
        last = thread == threads - 1
        m.store_shared(layout.starts + shape.experts * 4, [start], last)
        m.store_shared(layout.scalars, [m.shr(start, 16)], last)
        m.sync(DISPATCH, threads)

        for expert, row, share, valid in pairs:
            start = m.load_shared(layout.starts + expert * 4)[0]
            end = m.load_shared(layout.starts + expert * 4, 4)[0]
            rank = 0
            for word in range(words):
                bits = m.load_shared(mask(expert, word))[0]
                below = m.select((row >> 5) == word, m.shl(1, row & 31) - 1, -1)
                rank = rank + m.select((row >> 5) >= word, m.popcount(bits & below), 0)
            first, count = start & 0xFFFF, (end & 0xFFFF) - (start & 0xFFFF)
            position = first + rank
            m.store_shared(layout.pairs + position * 8, [row, share], valid)
            tile = m.shr(start, 16) + rank // layout.tile_rows
            held = m.minimum(count - rank, layout.tile_rows)
            leads = valid & (rank % layout.tile_rows == 0)
            entry = [expert | m.shl(held, 16), position]
            m.store_shared(layout.tiles + tile * 8, entry, leads)
        m.fence_async("shared")  # copies follow where the masks were

    def tile(self, index: Value) -> tuple[Value, Value, Value]:
        """(expert, rows, first pair) of a tile."""
        m = self.m
        word, first = m.load_shared(self.layout.tiles + index * 8, 0, 2)
        word = m.uniform(word)
        return word & 0xFFFF, word >> 16, m.uniform(first)

    def chunk(self, block: Value) -> tuple[Value, Value, Value]:
        """(tile, first block in it, blocks) of the chunk that starts at `block` of all."""
        per_tile = self.shape.gate_blocks
        tile, inside = block // per_tile, block % per_tile
        left = self.m.minimum(per_tile - inside, self.end_block - block)
        return tile, inside, self.m.minimum(left, self.layout.chunk_blocks)

    def before_end(self, block: Value, q: Value) -> Value:
        return block < self.end_block

    # Producers: for each ring a warp that fetches weights, and one that fetches what they multiply.

    def produce(self) -> None:
        m = self.m
        producer = m.warp - CONSUMERS
        self.ring = producer % RINGS
        m.if_(producer < RINGS, lambda: self.walk(self.gate_up_weights, self.down_weights))
        m.if_(producer >= RINGS, lambda: self.walk(self.gate_up_rows, self.down_rows))

    def walk(self, gate_up: Callable[..., None], down: Callable[..., None]) -> None:
        """Every round of the ring in turn, as soon as its slot is empty."""
        m, layout = self.m, self.layout
        q = 0
        if "gate_up" in self.phases:

            def chunk(block: Value, q: Value) -> Sequence[Value]:
                tile, inside, blocks = self.chunk(block)
                fetched = _Chunk(*self.tile(tile), inside, blocks)
                self.rounds(functools.partial(gate_up, fetched), q, layout.gate_rounds)
                return [block + blocks, q + layout.gate_rounds]

            _, q = m.while_(self.before_end, chunk, [self.first_block, 0])
        if "down" in self.phases:
            _, each = self.down_items()
            down(q, self.my_down_tiles * each * layout.down_rounds)

    def rounds(self, fetch: Callable[[Value, Value], None], q: Value, count: Value) -> None:
        """fetch(i, q + i) for i < count."""
        m = self.m

        def round_(i: Value) -> Sequence[Value]:
            self.rings.wait_empty(m, self.ring, q + i)
            fetch(i, q + i)
            return ()

        m.for_(0, count, round_)

    def gate_up_unit(self, i: Value) -> Value:
        """First of the k_warps units of 128 inputs of the ring's i-th round."""
        return i * self.shape.k_slices + self.ring * self.layout.k_warps

    def gate_up_weights(self, chunk: _Chunk, i: Value, q: Value) -> None:
        m, shape, layout = self.m, self.shape, self.layout
        slot, full = self.rings.slot(self.ring, q), self.rings.full(self.ring, q)
        unit_bytes = chunk.blocks * UNIT_BYTES
        num_bytes = layout.k_warps * (unit_bytes + chunk.rows * (UNIT_INPUTS * 2))
        m.mbarrier_expect(full, num_bytes, m.lane == 0)
        line = (self.first_expert + chunk.expert) * shape.hidden_units + self.gate_up_unit(i)
        line = m.wide(line) * shape.gate_blocks + chunk.inside
        for j in range(layout.k_warps):
            m.copy(
                slot + j * (layout.chunk_blocks * UNIT_BYTES),
                "gate_up",
                (line + j * shape.gate_blocks) * UNIT_BYTES,
                unit_bytes,
                full,
                m.lane == 0,
                stream=layout.tiling.stream,
            )

    def gate_up_rows(self, chunk: _Chunk, i: Value, q: Value) -> None:
        """A lane copies its row of x."""
        m, shape, layout = self.m, self.shape, self.layout
        slot, full = self.rings.slot(self.ring, q), self.rings.full(self.ring, q)
        column = self.gate_up_unit(i) * UNIT_INPUTS
        m.copy(
            slot + layout.gate_weight_bytes + m.lane * layout.gate_row_stride,
            "x",
            (self.pair_row(chunk.first, chunk.rows) * shape.padded_hidden + column) * 2,
            layout.k_warps * UNIT_INPUTS * 2,
            full,
            m.lane < chunk.rows,
        )

    def pair_row(self, first: Value, rows: Value) -> Value:
        """Row of x of the lane's pair of a tile."""
        m = self.m
        pair = first + m.select(m.lane < rows, m.lane, 0)
        return m.load_shared(self.layout.pairs + pair * 8)[0]

    def down_items(self) -> tuple[Value, Value]:
        """(items of all tiles, items of this ring)."""
        per_item = self.layout.tiling.down_tiles
        items = (self.num_tiles + (per_item - 1)) // per_item
        return items, (items - self.ring + (RINGS - 1)) // RINGS

    def down_tile(self, tile: Value) -> tuple[Value, Value, Value]:
        """`tile`, for an index that may lie behind the last one: it has 0 rows."""
        m = self.m
        exists = tile < self.num_tiles
        expert, rows, first = self.tile(m.select(exists, tile, 0))
        return expert, m.select(exists, rows, 0), first

    def down_position(self, i: Value) -> tuple[Value, Value, Value]:
        """(which 64 outputs, first tile, which part of F) of the ring's i-th slot."""
        layout = self.layout
        _, each = self.down_items()
        item, part = i // layout.down_rounds, i % layout.down_rounds
        outputs = self.m.cta + item // each * self.num_blocks
        return outputs, (item % each * RINGS + self.ring) * layout.tiling.down_tiles, part

    def down_weights(self, q: Value, count: Value) -> None:
        m, shape, layout = self.m, self.shape, self.layout
        per_item = layout.tiling.down_tiles

        def fetch(i: Value, q: Value) -> None:
            outputs, first_tile, part = self.down_position(i)
            tiles = [self.down_tile(first_tile + b) for b in range(per_item)]
            slot, full = self.rings.slot(self.ring, q), self.rings.full(self.ring, q)
            num_bytes = sum(
                m.select(rows > 0, layout.down_weight_bytes + rows * layout.down_row_stride, 0)
                for _, rows, _ in tiles
            )
            m.mbarrier_expect(full, num_bytes, m.lane == 0)
            for b, (expert, rows, _) in enumerate(tiles):
                line = (self.first_expert + expert) * shape.down_tiles + outputs
                line = m.wide(line) * shape.width_units + part * layout.tiling.down_units
                m.copy(
                    slot + b * layout.down_weight_bytes,
                    "down",
                    line * (DOWN_BLOCKS * UNIT_BYTES),
                    layout.down_weight_bytes,
                    full,
                    (m.lane == 0) & (rows > 0),
                    stream=layout.tiling.stream,
                )

        # The ring fills with weights before the hidden rows exist.
        self.rounds(fetch, q, count)

    def down_rows(self, q: Value, count: Value) -> None:
        m, shape, layout = self.m, self.shape, self.layout
        per_item = layout.tiling.down_tiles

        def fetch(i: Value, q: Value) -> None:
            _, first_tile, part = self.down_position(i)
            slot, full = self.rings.slot(self.ring, q), self.rings.full(self.ring, q)
            for b in range(per_item):
                _, rows, first = self.down_tile(first_tile + b)
                rows_base = per_item * layout.down_weight_bytes
                m.copy(
                    slot + rows_base + b * layout.held_rows * layout.down_row_stride,
                    "hidden",
                    (part * shape.pairs + first) * layout.down_row_stride,
                    rows * layout.down_row_stride,
                    full,
                    (m.lane == 0) & (rows > 0),
                )

        if "gate_up" in self.phases:
            m.wait_reached("counter", 0, self.goal)
            m.fence_async("global")  # the rows were written as ordinary stores
        self.rounds(fetch, q, count)

    # Consumers: two warpgroups.

    def consume(self) -> None:
        m = self.m
        self.ring, self.group_warp = m.warp // GROUP_WARPS, m.warp % GROUP_WARPS
        q = 0
        if "gate_up" in self.phases:

            def chunk(block: Value, q: Value) -> Sequence[Value]:
                blocks, q = self.consume_chunk(block, q)
                return [block + blocks, q]

            _, q = m.while_(self.before_end, chunk, [self.first_block, 0])
            if "down" in self.phases:
                self.announce()
        if "down" in self.phases:
            self.consume_down(q)

    def announce(self) -> None:
        """Tells the grid that this block's hidden rows are in memory."""
        m = self.m
        m.fence_async("global")  # others fetch them by copies
        m.sync(CONSUME, CONSUMERS * WARP)
        arrival = m.select(m.cta == 0, LAUNCH_UNIT - (self.num_blocks - 1), 1)
        m.add_int_release("counter", 0, arrival, (m.warp == 0) & (m.lane == 0))

    def columns(self, stride: int) -> tuple[list[Value], list[int]]:
        """Byte offsets of the lane's x rows in a slot, one per instruction, and the numbers of
        instructions that are compiled for. Rows beyond what a slot holds repeat its last one."""
        layout = self.layout
        count = layout.tile_rows // COLUMNS
        last = layout.held_rows - 1
        offsets = [
            self.m.minimum(self.g + COLUMNS * i, last) * stride + self.t * 16 for i in range(count)
        ]
        return offsets, list(range(1, count + 1))

    def choose(self, need: Value, options: Sequence[int], body: Callable[[int], None]) -> None:
        """Runs body(the smallest option that is at least `need`)."""
        below = 0
        for option in options:
            fits = (need > below) & (need <= option) if option != options[-1] else need > below
            self.m.if_(fits, lambda option=option: body(option))
            below = option

    def multiply(
        self, sums: list[list[list[Value]]], units: Sequence[Value], x: Sequence[Value]
    ) -> None:
        """Adds one unit of 128 inputs: sums[block][instruction][4] += weights x.

        units: address of each block's unit; x: address of the lane's 16 bytes of group 0, one for
        each instruction. Group after group: two steps of 16 inputs, times the scale.
        """
        m = self.m
        scales = [m.load_shared(unit + self.g * 16, CODE_WORDS * 4, 4) for unit in units]
        for half in range(2):
            codes = [m.load_shared(unit + m.lane * 16, half * 512, 4) for unit in units]
            for group in range(2):
                index = half * 2 + group
                rows = [m.load_shared(address, index * GROUP * 2, 4) for address in x]
                for block, words in enumerate(codes):
                    steps = [m.unpack(words[2 * group + step]) for step in range(2)]
                    scale = scales[block][index]
                    low, high = m.as_float(m.shl(scale, 16)), m.as_float(scale & -65536)
                    for i, row in enumerate(rows):
                        partial = m.mma(None, steps[0], row[:2])
                        partial = m.mma(partial, steps[1], row[2:])
                        sums[block][i] = [
                            m.fma(value, (low, low, high, high)[k], sums[block][i][k])
                            for k, value in enumerate(partial)
                        ]

    def consume_chunk(self, block: Value, q: Value) -> tuple[Value, Value]:
        layout = self.layout
        tile, inside, blocks = self.chunk(block)
        _, rows, first = self.tile(tile)
        offsets, instructions = self.columns(layout.gate_row_stride)
        warp_blocks = [n for n in (1, 2, 4, 8) if n <= layout.tiling.warp_blocks]

        def with_blocks(count: int) -> None:
            self.choose(
                (rows + (COLUMNS - 1)) // COLUMNS,
                instructions,
                lambda n: self.gate_up(count, offsets[:n], q, inside, blocks, rows, first),
            )

        self.choose((blocks + (layout.m_warps - 1)) // layout.m_warps, warp_blocks, with_blocks)
        return blocks, q + layout.gate_rounds

    def gate_up(
        self,
        count: int,
        offsets: Sequence[Value],
        q: Value,
        inside: Value,
        blocks: Value,
        rows: Value,
        first: Value,
    ) -> None:
        """One chunk with `count` blocks a warp: sums over all of D, SwiGLU, hidden rows."""
        m, layout = self.m, self.layout
        k_warp, m_warp = self.group_warp % layout.k_warps, self.group_warp // layout.k_warps
        local = [i * layout.m_warps + m_warp for i in range(count)]  # blocks of this warp

        def round_(i: Value, *flat: Value) -> Sequence[Value]:
            sums = _nested(flat, count, len(offsets))
            slot = self.rings.slot(self.ring, q + i)
            self.rings.wait_full(m, self.ring, q + i)
            units = [slot + (k_warp * layout.chunk_blocks + b) * UNIT_BYTES for b in local]
            x = slot + layout.gate_weight_bytes + k_warp * (UNIT_INPUTS * 2)
            self.multiply(sums, units, [x + offset for offset in offsets])
            last = layout.gate_rounds - 1
            m.if_(i < last, lambda: self.rings.release(m, self.ring, q + i))
            return _flat(sums)

        zeros = [m.zero()] * (4 * count * len(offsets))
        sums = _nested(m.for_(0, layout.gate_rounds, round_, zeros), count, len(offsets))

        # The slot of the last round is not released yet: its memory now takes the partial sums,
        # [warp over K][block of the chunk][lane][4].
        q_last = q + (layout.gate_rounds - 1)
        own = self.rings.slot(self.ring, q_last)
        slots = [self.rings.slot(ring, q_last) for ring in range(RINGS)]
        for i in range(len(offsets)):
            m.sync(CONSUME, CONSUMERS * WARP)  # all have read what lies there
            for b, block in enumerate(local):
                place = (k_warp * layout.chunk_blocks + block) * (WARP * 16) + m.lane * 16
                m.store_shared(own + place, sums[b][i])
            m.sync(CONSUME, CONSUMERS * WARP)
            self.finish(count, slots, i, inside, blocks, rows, first)
        m.fence_async("shared")  # copies follow
        m.sync(CONSUME, CONSUMERS * WARP)
        self.rings.release(m, self.ring, q_last)

    def finish(
        self,
        count: int,
        slots: Sequence[Value],
        instruction: int,
        inside: Value,
        blocks: Value,
        rows: Value,
        first: Value,
    ) -> None:
        """Adds the slices of K in order and writes silu(gate) * up of 8 rows; all warps share."""
        m, shape, layout = self.m, self.shape, self.layout
        columns = layout.tiling.down_units * UNIT_INPUTS

        def block_(block: Value) -> None:
            total: list[Value] = []
            for slot in slots:
                for k_warp in range(layout.k_warps):
                    place = (k_warp * layout.chunk_blocks + block) * (WARP * 16) + m.lane * 16
                    part = [m.as_float(v) for v in m.load_shared(slot + place, 0, 4)]
                    total = (
                        [m.add(a, b) for a, b in zip(total, part, strict=True)] if total else part
                    )
            output = (inside + block) * GATE_ROWS + self.g
            part, inner = output // columns, output % columns
            for column in range(2):
                row = instruction * COLUMNS + self.t * 2 + column
                value = m.mul(m.silu(total[column]), total[column + 2])
                pair = part * shape.pairs + first + row
                offset = pair * layout.down_row_stride + inner * 2
                m.store_bf16("hidden", offset, value, row < rows)

        for i in range(-(-count * layout.m_warps // CONSUMERS)):
            block = i * CONSUMERS + m.warp
            m.if_(block < blocks, lambda block=block: block_(block))

    def consume_down(self, q: Value) -> None:
        m, layout = self.m, self.layout
        items, each = self.down_items()
        per_item = layout.tiling.down_tiles

        def item(i: Value) -> Sequence[Value]:
            mine, index = i // each, i % each * RINGS + self.ring
            outputs = m.cta + mine * self.num_blocks
            # Items in order, and with an even number of them one set of outputs after another;
            # with an odd number this warpgroup has both the last item and the next first one.
            even = items % 2 == 0
            waits = (index > 0) | ((mine > 0) & even)
            passes = (index + 1 < items) | ((mine + 1 < self.my_down_tiles) & even)
            tiles = [self.down_tile(index * per_item + b)[1:] for b in range(per_item)]
            most = tiles[0][0]
            for rows, _ in tiles[1:]:
                most = m.select(rows > most, rows, most)
            offsets, instructions = self.columns(layout.down_row_stride)
            self.choose(
                (most + (COLUMNS - 1)) // COLUMNS,
                instructions,
                lambda n: self.down(
                    offsets[:n], q + i * layout.down_rounds, outputs, tiles, waits, passes
                ),
            )
            return ()

        m.for_(0, self.my_down_tiles * each, item)

    def down(
        self,
        offsets: Sequence[Value],
        q: Value,
        outputs: Value,
        tiles: Sequence[tuple[Value, Value]],
        waits: Value,
        passes: Value,
    ) -> None:
        """An item's 64 outputs: sums over all of F, added to the output when it is its turn.

        tiles: (rows, first pair) of each; one without rows is summed over whatever lies in the
        slot, and adds nothing.
        """
        m, layout = self.m, self.layout
        rows_base = len(tiles) * layout.down_weight_bytes
        tile_rows_bytes = layout.held_rows * layout.down_row_stride

        def round_(i: Value, *flat: Value) -> Sequence[Value]:
            sums = _nested(flat, len(tiles), len(offsets))
            slot = self.rings.slot(self.ring, q + i)
            self.rings.wait_full(m, self.ring, q + i)
            for b in range(len(tiles)):
                for unit in range(layout.tiling.down_units):
                    place = unit * DOWN_BLOCKS + self.group_warp
                    units = [slot + b * layout.down_weight_bytes + place * UNIT_BYTES]
                    x = slot + rows_base + b * tile_rows_bytes + unit * (UNIT_INPUTS * 2)
                    self.multiply(sums[b : b + 1], units, [x + offset for offset in offsets])
            self.rings.release(m, self.ring, q + i)
            return _flat(sums)

        zeros = [m.zero()] * (4 * len(tiles) * len(offsets))
        flat = m.for_(0, layout.down_rounds, round_, zeros)
        output = outputs * DOWN_ROWS + self.group_warp * BLOCK + self.g
        terms = [
            self.terms(sums, *tile, output)
            for tile, sums in zip(tiles, _nested(flat, len(tiles), len(offsets)), strict=True)
        ]
        threads = CONSUMERS * WARP
        m.if_(waits, lambda: m.sync(TURN + self.ring, threads))
        for of_tile in terms:
            for address, offset, value, held in of_tile:
                m.add_float("out", address, value, held, offset)
            m.sync_warp()  # the next tile's experts come after this one's
        m.if_(passes, lambda: m.arrive(TURN + 1 - self.ring, threads))

    def terms(
        self, sums: Sequence[Sequence[Value]], rows: Value, first: Value, output: Value
    ) -> list[tuple[Value, int, Value, Value]]:
        """What a tile adds to the output: (address, offset, share * value, whether) of each."""
        m, shape, layout = self.m, self.shape, self.layout
        out = []
        for i, values in enumerate(sums):
            for column in range(2):
                place = i * COLUMNS + self.t * 2 + column
                held = place < rows
                pair = layout.pairs + (first + m.select(held, place, 0)) * 8
                row, share = m.load_shared(pair, 0, 2)
                address = (row * shape.padded_hidden + output) * 4
                for half in range(2):
                    value = m.mul(values[column + 2 * half], m.as_float(share))
                    out.append((address, half * (GATE_ROWS * 4), value, held))
        return out


def _flat(sums: Sequence[Sequence[Sequence[Value]]]) -> list[Value]:
    return [value for block in sums for quad in block for value in quad]


def _nested(flat: Sequence[Value], blocks: int, instructions: int) -> list[list[list[Value]]]:
    """[block][instruction][4]"""
    quads = [list(flat[i : i + 4]) for i in range(0, len(flat), 4)]
    return [quads[b * instructions : (b + 1) * instructions] for b in range(blocks)]
