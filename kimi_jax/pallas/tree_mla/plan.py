"""What a compiled kernel is specialised to, and what fits into a block's shared memory."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.pallas.stream.target import SHARED_GRANULE, Target

TILE = 64  # tokens of one matrix product: the row count of wgmma, and of four warps of mma.sync

SPLIT, LONG_SPLIT = 256, 512
"""Context tokens summed up in one go, in contexts of up to LONG_CONTEXT tokens and in longer ones;
later sums are merged in order.

They depend on nothing but a sequence's own length, so that a row's result is the same bits in any
company. Shorter splits fill the card at small batches, longer ones leave less to merge.
"""

LONG_CONTEXT = 8192

FEW_QUERIES = 640  # rows of attention of a call that a GPU shares out in small units

OVERLAP = False  # see Plan.overlap

MAX_ROWS = 64  # rows of a sequence: one tile, two ancestor words

_BARRIER_BYTES = 1024  # all barriers of a block together take less


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static choices. Only `tensor_core`, both splits and `sums` change a row's result.

    rank, rope: R and PE, the latent and the rotary columns of a cached row. heads, page_size: H
    and P. queries: rows of attention (tree row x head) that a unit of work handles; context read
    once serves all of them. split, long_split: see SPLIT. parts: warpgroups that share the latent
    columns between them, for the values. slots: chunks of tiles that are in shared memory or on
    their way; rope_slots, prob_slots: the same for the rotary columns and for the probabilities.
    tensor_core:
    wgmma (sm_90 only) or mma.sync. sums: the type in which a unit's sums are laid down; they are
    added up in float32. num_cores: blocks.
    overlap: a kernel starts while the one before ends, and then waits for it (programmatic
    dependent launch).
    """

    rank: int
    rope: int
    heads: int
    page_size: int
    queries: int
    split: int
    long_split: int
    parts: int
    slots: int
    rope_slots: int
    prob_slots: int
    tensor_core: Literal["wgmma", "mma"]
    sums: Literal["float32", "bfloat16"]
    num_cores: int
    overlap: bool

    @property
    def slack(self) -> int:
        """Queries of a unit that may belong to the sequence before, see `schedule.ALIGNED`."""
        return 0 if self.heads % 8 == 0 else 7

    @property
    def columns(self) -> int:
        """Latent columns of a chunk: what is copied, and given back, together."""
        return min(self.rank // self.parts, 128)

    @property
    def chunks(self) -> int:
        """Chunks of a tile; those of a warpgroup are every `parts`-th."""
        return self.rank // self.columns

    @property
    def swizzle(self) -> int:
        """Bytes of a row of a tile in shared memory: latent and rotary columns are multiples."""
        return min(self.rope * 2, 128)

    @property
    def piece(self) -> int:
        """Tokens that lie in one page, and are copied together."""
        return min(self.page_size, TILE)

    @property
    def pieces(self) -> int:
        return TILE // self.piece

    @property
    def split_tiles(self) -> int:
        return self.split // TILE

    @property
    def long_split_tiles(self) -> int:
        return self.long_split // TILE

    @property
    def through_slots(self) -> bool:
        """Whether sums leave through a tile's place in shared memory, see `kernel._lay_down`."""
        return self.sums == "bfloat16" and self.queries <= TILE

    @property
    def statistics_bytes(self) -> int:
        """Scratch of a maximum or a sum over the tokens; with 128 bytes a query it is one round,
        two queries' worth of registers of a thread at a time otherwise."""
        return max(2048, self.queries * 128) if self.queries <= 40 else 2048

    @property
    def num_threads(self) -> int:
        """Warpgroups: `parts` for the values, one for the scores, one for the copies."""
        return self.parts + 2

    @property
    def shared_bytes(self) -> int:
        buffers = (
            self.queries * self.rank * 2,
            self.queries * self.rope * 2,
            self.slots * TILE * self.columns * 2,
            self.rope_slots * TILE * self.rope * 2,
            self.prob_slots * self.queries * TILE * 2,
            self.prob_slots * (self.queries + 8) * 4,
            self.statistics_bytes,
            _BARRIER_BYTES,
        )
        return sum(-(-n // SHARED_GRANULE) * SHARED_GRANULE for n in buffers)


def make(
    target: Target,
    *,
    rank: int,
    rope: int,
    heads: int,
    page_size: int,
    max_rows: int,
    num_rows: int | None = None,
    split: int | None = None,
    tensor_core: Literal["wgmma", "mma"] | None = None,
    max_queries: int | None = None,
    sums: Literal["float32", "bfloat16"] = "bfloat16",
    overlap: bool = OVERLAP,
) -> Plan:
    """The plan for a GPU and a model; raises NotImplementedError as `check` does.

    num_rows: flat rows of a call; None: many. split (for all lengths), tensor_core, max_queries,
    sums, overlap: for measurements; None takes what `make` would choose.
    """
    parts = 2 if rank % 128 == 0 else 1
    core = tensor_core or ("wgmma" if target.capability == (9, 0) else "mma")
    # Two whole tiles have to fit beside the queries: while the values of one are added up, the
    # next one's scores are made. Fewer queries a unit make more units, for a call that has few.
    few = num_rows is not None and num_rows * heads <= FEW_QUERIES
    limit = max_queries or (TILE if core == "mma" else 40 if few else 56)
    while limit >= 8:
        queries = _even(max_rows * heads + (0 if heads % 8 == 0 else 7), limit)
        plan = _fill(
            target,
            Plan(
                rank=rank,
                rope=rope,
                heads=heads,
                page_size=page_size,
                queries=queries,
                split=split or SPLIT,
                long_split=split or LONG_SPLIT,
                parts=parts,
                slots=1,
                rope_slots=1,
                prob_slots=1,
                tensor_core=core,
                sums=sums,
                num_cores=target.num_cores,
                overlap=overlap,
            ),
        )
        if plan is not None:
            return plan
        limit -= 8
    raise NotImplementedError(
        f"tree_mla: kv_lora_rank {rank} and qk_rope_head_dim {rope} do not fit into the "
        f"{target.shared_bytes} bytes of shared memory of {target.name}; use 'reference'"
    )


def _even(rows: int, limit: int) -> int:
    """Rows of attention a unit: as few units as `limit` allows, all of about the same size."""
    units = -(-rows // limit)
    return -(-rows // units // 8) * 8


def _fill(target: Target, plan: Plan) -> Plan | None:
    """`plan` with as many buffers as shared memory holds; None when not even one of each fits."""
    plan = dataclasses.replace(plan, slots=plan.chunks)
    if plan.shared_bytes > target.shared_bytes:
        return None
    # In the order of what they hide: the copies' latency, then a turn between the warpgroups.
    wishes = [("slots", plan.chunks * 3 // 2), ("rope_slots", 2), ("prob_slots", 2)]
    wishes += [("slots", plan.chunks * 2), ("slots", plan.chunks * 3), ("rope_slots", 3)]
    for name, most in wishes:
        while getattr(plan, name) < most:
            larger = dataclasses.replace(plan, **{name: getattr(plan, name) + 1})
            if larger.shared_bytes > target.shared_bytes:
                break
            plan = larger
    return plan


def check(
    *,
    rank: int | None,
    rope: int | None,
    heads: int | None,
    page_size: int | None,
    max_rows: int | None,
    dtype: DTypeLike | None,
) -> None:
    """Raises NotImplementedError naming the value that the kernel cannot serve; None: unknown."""

    def refuse(name: str, value: object, expected: str) -> None:
        raise NotImplementedError(
            f"tree_mla: implementation='mosaic' cannot serve {name} = {value}, expected "
            f"{expected}; use implementation='reference'"
        )

    if dtype is not None and jnp.dtype(dtype) != jnp.bfloat16:
        refuse("the cache's dtype", jnp.dtype(dtype).name, "bfloat16")
    if rank is not None and rank not in (64, 128, 256, 512):
        refuse("kv_lora_rank", rank, "64, 128, 256 or 512")
    if rope is not None and rope not in (32, 64):
        refuse("qk_rope_head_dim", rope, "32 or 64")
    if heads is not None and not 1 <= heads <= 64:
        refuse("num_attention_heads", heads, "1 to 64 on a device")
    if page_size is not None and page_size not in (16, 32, 64, 128):
        refuse("page_size", page_size, "16, 32, 64 or 128")
    if max_rows is not None and not 1 <= max_rows <= MAX_ROWS:
        refuse("max_rows", max_rows, f"1 to {MAX_ROWS} rows a sequence")


def of_shapes(
    target: Target,
    q: jax.Array,
    latent: jax.Array,
    *,
    rank: int,
    max_rows: int,
    split: int | None = None,
    tensor_core: Literal["wgmma", "mma"] | None = None,
    max_queries: int | None = None,
    sums: Literal["float32", "bfloat16"] = "bfloat16",
    overlap: bool = OVERLAP,
) -> Plan:
    """`make` for the operands of `api.attend`, checked."""
    sizes = {
        "rank": rank,
        "rope": latent.shape[3] - rank,
        "heads": q.shape[1],
        "page_size": latent.shape[2],
        "max_rows": max_rows,
    }
    check(**sizes, dtype=latent.dtype)
    return make(
        target,
        **sizes,
        num_rows=q.shape[0],
        split=split,
        tensor_core=tensor_core,
        max_queries=max_queries,
        sums=sums,
        overlap=overlap,
    )
