"""What fits: weights, cache and workspace against a device's memory, before anything is loaded."""

import dataclasses
import os

import jax
from jax.typing import DTypeLike

from kimi_jax import cache
from kimi_jax.config import DrafterConfig, ModelConfig
from kimi_jax.engine.programs import EngineOptions
from kimi_jax.engine.slots import SCRATCH_PAGE, pages_for
from kimi_jax.model import weights as target_weights
from kimi_jax.model.kernels import REFERENCE, Kernels, as_read
from kimi_jax.sharding.layout import SINGLE, Layout
from kimi_jax.speculation import weights as drafter_weights

GIB = 1 << 30
CPU_CACHE_BYTES = GIB
"""Most memory that the cache takes on a CPU, where the rest of the machine wants some too."""

DEFAULT_SEQS = {"cpu": 4, "gpu": 16}
"""max_num_seqs where nobody says: every slot costs time in every step on a CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """What the plan may use of one device."""

    device: str  # its kind, e.g. "NVIDIA H200"
    platform: str  # "cpu" or "gpu"
    total: int  # bytes
    usable: int  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on each device, and the sizes that follow from them."""

    memory: Memory
    target_bytes: int
    drafter_bytes: int
    workspace_bytes: int  # estimate of a step's temporary arrays
    token_bytes: int  # cache of one token in the target
    drafter_token_bytes: int  # and in the drafter's context
    page_size: int
    num_pages: int  # of all groups, each with its scratch page
    max_num_seqs: int
    max_model_len: int
    largest_context: int  # tokens of one sequence, were it alone
    devices: int = 1
    groups: int = 1  # of devices, along data, that have pages of their own

    @property
    def cache_bytes(self) -> int:
        pages = self.num_pages // self.groups
        return pages * self.page_size * (self.token_bytes + self.drafter_token_bytes)

    @property
    def total_bytes(self) -> int:
        return self.target_bytes + self.drafter_bytes + self.cache_bytes + self.workspace_bytes

    def lines(self) -> list[str]:
        """The plan as a table for people."""
        cached = self.token_bytes + self.drafter_token_bytes
        rows = [
            (
                "device",
                f"{self.memory.device}, {size(self.memory.total)}"
                + (f"; {self.devices} of them, bytes are each one's" if self.devices > 1 else ""),
            ),
            ("usable", size(self.memory.usable)),
            ("target", size(self.target_bytes)),
            ("drafter", size(self.drafter_bytes) if self.drafter_bytes else "none"),
            ("workspace", f"{size(self.workspace_bytes)} (estimate)"),
            (
                "cache",
                f"{size(self.cache_bytes)}: {self.num_pages} pages of {self.page_size} tokens, "
                f"{cached} bytes a token (target {self.token_bytes}, "
                f"drafter {self.drafter_token_bytes})",
            ),
            ("total", size(self.total_bytes)),
            ("sequences", f"{self.max_num_seqs} at a time (max_num_seqs)"),
            ("context", f"{self.max_model_len} tokens each (max_model_len)"),
            ("largest", f"{self.largest_context} tokens: the largest context that fits"),
        ]
        return [f"{name:<10} {value}" for name, value in rows]


class DoesNotFit(ValueError):
    """The machine lacks the memory; the message has the numbers and what would fit."""


def size(count: int) -> str:
    """Bytes for people: 12.3 MiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def reserve_gpu_memory(utilization: float) -> None:
    """Has XLA's allocator take this share of each GPU; to be called before JAX touches a device.

    XLA would take 0.75 otherwise. A share that the user has set is left alone.
    """
    if not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization={utilization} must lie in (0, 1]")
    if not os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{utilization:.3f}")


def local_memory(utilization: float) -> Memory:
    """The first local device's memory and what a plan may use of it.

    A GPU: XLA's own limit, set by `reserve_gpu_memory`. A CPU: the share `utilization` of what the
    machine has free now.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        limit = stats["bytes_limit"]
        return Memory(
            device=device.device_kind,
            platform=device.platform,
            total=stats.get("bytes_reservable_limit") or limit,
            usable=limit,
        )
    page = os.sysconf("SC_PAGE_SIZE")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    return Memory(
        device=f"{device.device_kind} ({os.cpu_count()} cores)",
        platform=device.platform,
        total=page * os.sysconf("SC_PHYS_PAGES"),
        usable=int(utilization * (_available() or free)),
    )


def _available() -> int | None:
    """Linux's estimate of memory that can be had without swapping; None elsewhere."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def workspace_bytes(
    config: ModelConfig, *, max_num_seqs: int, tree_budget: int, prefill_chunk: int
) -> int:
    """Temporary arrays of a step, estimated: a few float32 rows of logits and of activations each.

    The vocabulary decides: logits, noise, truncated logits and their exponentials live at once.
    """
    rows = max_num_seqs * (tree_budget + 1)
    heads = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    activations = max(rows, prefill_chunk) * 4 * (8 * config.hidden_size + 4 * heads)
    one_expert = 3 * config.hidden_size * config.moe_intermediate_size * 4
    return rows * config.vocab_size * 4 * 5 + activations + one_expert


def make_plan(
    config: ModelConfig,
    drafter: DrafterConfig | None,
    *,
    dtype: DTypeLike,
    memory: Memory,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    page_size: int = EngineOptions.page_size,
    prefill_chunk: int = EngineOptions.prefill_chunk,
    tree_budget: int = 0,
    layout: Layout = SINGLE,
    kernels: Kernels = REFERENCE,
) -> MemoryPlan:
    """The sizes that fit, per device of the layout.

    max_num_seqs is rounded up to a multiple of the layout's groups along data.

    max_model_len None: the model's own context, or as much of it as one sequence finds room for.
    The cache gets pages for max_num_seqs sequences of that length, or as many as fit.

    Raises:
      DoesNotFit: the weights alone are too large, or the context that was asked for.
      ValueError: a size out of range.
    """
    if max_num_seqs is None:
        max_num_seqs = DEFAULT_SEQS.get(memory.platform, DEFAULT_SEQS["gpu"])
    for name, value in (
        ("max_num_seqs", max_num_seqs),
        ("page_size", page_size),
        ("max_model_len", max_model_len),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    longest = config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the model's context of {longest} tokens "
            "(max_position_embeddings)"
        )
    if max_model_len == 1:
        raise ValueError("max_model_len=1 leaves no room for an answer; use at least 2")

    groups = layout.data_size
    own_seqs = -(-max_num_seqs // groups)
    max_num_seqs = own_seqs * groups
    canonical = target_weights.describe(config, dtype)
    target = layout.device_bytes(as_read(canonical, kernels, layout))
    draft = layout.device_bytes(drafter_weights.describe(drafter, dtype)) if drafter else 0
    # As of one device with all heads and the whole vocabulary: an upper bound.
    work = workspace_bytes(
        config, max_num_seqs=own_seqs, tree_budget=tree_budget, prefill_chunk=prefill_chunk
    )
    one = cache.abstract(config, drafter, num_pages=1, page_size=1, dtype=dtype)
    context = layout.group("page_offset").size
    if page_size % context:
        raise ValueError(f"page_size={page_size} does not divide over {context} devices")
    token = target_weights.num_bytes(one.latent) // context
    draft_token = target_weights.num_bytes((one.draft_k, one.draft_v))
    draft_token //= layout.group("draft_kv_heads").size

    left = memory.usable - target - draft - work
    if memory.platform == "cpu":
        left = min(left, CPU_CACHE_BYTES)
    fitting = left // (page_size * (token + draft_token)) - 1  # the scratch page
    weights = f"weights {size(target + draft)}, workspace {size(work)}"
    where = f"{memory.device} has {size(memory.usable)} to use"
    if fitting < 1:
        raise DoesNotFit(
            f"the model does not fit: {weights} and a page of cache, but {where}; use a machine "
            "with more memory, or more devices"
        )
    largest = min(longest, fitting * page_size)
    if max_model_len is None:
        max_model_len = largest
    elif max_model_len > largest:
        raise DoesNotFit(
            f"max_model_len={max_model_len} does not fit: it needs "
            f"{size(max_model_len * (token + draft_token))} of cache beside {weights}, but "
            f"{where}; "
            f"the largest context that fits is {largest}"
        )
    pages = min(fitting, own_seqs * pages_for(max_model_len, page_size))
    return MemoryPlan(
        memory=memory,
        target_bytes=target,
        drafter_bytes=draft,
        workspace_bytes=work,
        token_bytes=token,
        drafter_token_bytes=draft_token,
        page_size=page_size,
        num_pages=(pages + SCRATCH_PAGE + 1) * groups,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        largest_context=largest,
        devices=layout.num_devices,
        groups=groups,
    )
