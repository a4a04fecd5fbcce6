"""How long does a step of the real model take, and where does the time go?

  python3 -m bench.step --output_json step.json            one rank of eight of K2.6, all cells
  python3 -m bench.step --quick --output_json quick.json   three cells and their stages
  python3 -m bench.step --rank_of=ep8 --routing=skewed
  python3 -m bench.step --preset=tiny-k2 --rank_of=tp1     on a CPU

One device holds what one rank of a larger machine holds: all layers, random weights, made in the
order in which the kernels read them. It runs the product's own `decode_steps` under a layout that
stands for one rank, so everything a rank computes is in it, and what ranks say to each other is
not: reductions and gathers are left out, and so is their time.

Timed: wall time of calls enqueued one behind the other, per step, median; `fetched` is with the
outputs read after every call, as the engine does. Bytes are those that a step must read at least:
weights that it touches (of the experts, those that its rows chose, counted in the very steps timed)
and the context. Percent is the floor of these bytes over the time, at the read bandwidth measured
in the same run (a sum over 2 GiB). Stages come from a trace of one call; their kernels' sum is set
against the step's time, what is missing is idle.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import cache as paged
from kimi_jax import profiling, step
from kimi_jax.config import DRAFTER_PRESETS, PRESETS, DrafterConfig, ModelConfig
from kimi_jax.engine.budget import BUCKETS
from kimi_jax.engine.compiling import compile_counter, enable_persistent_cache
from kimi_jax.engine.plan import reserve_gpu_memory
from kimi_jax.engine.programs import EngineOptions
from kimi_jax.engine.slots import SlotTable, abstract_array, pages_for
from kimi_jax.model import param
from kimi_jax.model import weights as target_weights
from kimi_jax.model.kernels import REQUESTS, Kernels, as_read, choose
from kimi_jax.model.param import Normal, Param
from kimi_jax.model.weights import CODE_STD, DenseMLP
from kimi_jax.pallas.int4_moe.packed import Packed
from kimi_jax.pallas.stream import packing
from kimi_jax.sharding import rules
from kimi_jax.sharding.group import Group
from kimi_jax.sharding.layout import Layout
from kimi_jax.speculation import weights as drafter_weights
from kimi_jax.step import State, StepPlan

STEPS = EngineOptions.steps_per_call
CALLS, REPEATS = 5, 4  # calls enqueued together; the first repeat is not counted
PAGE = EngineOptions.page_size
MARGIN = 1024  # tokens that a sequence may grow by while it is timed
CHUNKS = 16  # prefill calls that are timed, spread evenly over the prompt
WIDE = 1 << 18  # elements from which an array counts as a weight matrix
UNIFORM, SKEWED = 0.0, 0.2  # standard deviation of the router's bias; scores vary by about 0.2
HEADROOM = 0.92  # share of a GPU's memory that is taken


# ------------------------------------------------------------------ one rank of a machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(Group):
    """The first of `size` devices, without the others: sums stay partial, gathers bring nothing."""

    def part(self, x: jax.Array, axis: int) -> jax.Array:
        return jax.lax.slice_in_dim(x, 0, x.shape[axis] // self.size, axis=axis)

    def local(self, ids: jax.Array, width: int) -> jax.Array:
        return jnp.where((ids >= 0) & (ids < width), ids, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank(Layout):
    """The first device of a mesh that is not there: its part of everything, and no collectives."""

    expert: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {rules.DATA: 1, rules.EXPERT: self.expert, rules.TENSOR: self.tensor}

    def _along(self, axes: tuple[str, ...]) -> Group:
        size = super()._along(axes).size
        return Part(size=size) if size > 1 else Group()

    def local(self, described: Any) -> Any:
        """A tree of `Param` -> the same, of this rank's parts."""
        self.specs(described)  # raises by name if something does not divide

        def part(whole: Param) -> Param:
            sizes = (
                n // self.group(axis).size for n, axis in zip(whole.shape, whole.axes, strict=True)
            )
            return dataclasses.replace(whole, shape=tuple(sizes))

        return jax.tree.map(part, described)


def rank_of(text: str) -> Rank:
    """'tp8', 'ep8', 'ep4tp2' -> the layout of a rank of such a machine."""
    match = re.fullmatch(r"(?:ep(\d+))?(?:tp(\d+))?", text)
    if not text or not match:
        raise argparse.ArgumentTypeError(f"{text!r}: expected tp8, ep8, ep4tp2 or the like")
    return Rank(expert=int(match[1] or 1), tensor=int(match[2] or 1))


# ------------------------------------------------------------------ what it holds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Configurations, kernels, and descriptions of what the rank holds."""

    config: ModelConfig
    drafter: DrafterConfig
    layout: Rank
    kernels: Kernels
    dtype: Any
    target: Any  # tree of Param, the rank's parts, as the kernels read them
    draft: Any

    def cache(self, num_pages: int) -> Any:
        """The rank's pages as a tree of Param."""
        shapes = paged.abstract(
            self.config, self.drafter, num_pages=num_pages, page_size=PAGE, dtype=self.dtype
        )
        context = "layers", "pages", "page_offset", "draft_kv_heads", "draft_head"
        axes = {
            "latent": ("layers", "pages", "page_offset", "latent"),
            "draft_k": context,
            "draft_v": context,
        }
        described: Any = {
            name: param.leaf(getattr(shapes, name).shape, names, self.dtype, Normal(std=1.0))
            for name, names in axes.items()
        }
        return paged.Cache(**self.layout.local(described))


def describe(arguments: argparse.Namespace) -> Model:
    config, drafter = PRESETS[arguments.preset], DRAFTER_PRESETS[arguments.preset]
    layout = arguments.rank_of
    if arguments.layers:
        taps = tuple(t for t in drafter.target_layer_ids if t < arguments.layers)
        config = dataclasses.replace(config, num_hidden_layers=arguments.layers)
        drafter = dataclasses.replace(drafter, target_layer_ids=taps or (0,))
    # Mask slots must have an embedding on this rank.
    local_vocab = config.vocab_size // layout.group("vocab").size
    drafter = dataclasses.replace(drafter, mask_token_id=local_vocab - 1)
    usual = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    dtype = jnp.dtype(arguments.dtype or usual)
    kernels = choose(
        arguments.kernels,
        config,
        dtype=dtype,
        page_size=PAGE,
        max_rows=max(BUCKETS) + 1,
        layout=layout,
    )
    canonical = target_weights.describe(config, dtype)
    target = layout.local(as_read(canonical, kernels, layout))
    draft = layout.local(drafter_weights.describe(drafter, dtype))
    return Model(
        config=config,
        drafter=drafter,
        layout=layout,
        kernels=kernels,
        dtype=dtype,
        target=_with_bias(target, SKEWED if arguments.routing == "skewed" else UNIFORM),
        draft=_undecided(draft),
    )


def _with_bias(target: Any, std: float) -> Any:
    """Router biases of this spread: none routes uniformly, a large one to favourites."""

    def layer(one: Any) -> Any:
        if isinstance(one.mlp, DenseMLP):
            return one
        bias = dataclasses.replace(one.mlp.router_bias, init=Normal(std=std))
        return one.replace(mlp=one.mlp.replace(router_bias=bias))

    return dataclasses.replace(target, layers=tuple(layer(one) for one in target.layers))


def _undecided(draft: Any) -> Any:
    """A drafter whose logits differ little, so that every node of a tree holds another token.

    A random drafter that is sure of its tokens says the same in all slots, and rows of the same
    token choose the same experts. With flat logits a node at depth 1 beats any behind it.
    """
    return draft.replace(norm=dataclasses.replace(draft.norm, init=Normal(mean=0.1, std=0.01)))


def draw(described: Any, seed: int) -> Any:
    """Random arrays for a tree of Param; packed experts are drawn in their own order."""
    nodes, treedef = jax.tree.flatten(described, is_leaf=_is_packed)
    plain = [node for node in nodes if not _is_packed(node)]
    key, other = jax.random.split(jax.random.key(seed))
    drawn = iter(param.random(plain, key))
    made = [
        _draw_packed(node, jax.random.fold_in(other, number)) if _is_packed(node) else next(drawn)
        for number, node in enumerate(nodes)
    ]
    return jax.tree.unflatten(treedef, made)


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)


def _draw_packed(described: Packed, key: jax.Array) -> Packed:
    up, down = jax.random.split(key)
    return dataclasses.replace(
        described,
        gate_up=_units(up, described.gate_up.shape, described.hidden**-0.5 / CODE_STD),
        down=_units(down, described.down.shape, described.width**-0.5 / CODE_STD),
        counter=jnp.zeros(described.counter.shape, jnp.int32),
    )


@functools.partial(jax.jit, static_argnames=("shape", "scale"))
def _units(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    """int32 [..., 288]: random codes, and scales within a factor sqrt(2) of `scale`."""
    bits = jax.random.bits(key, shape, jnp.uint32)

    def one(half: jax.Array) -> jax.Array:
        value = scale * jnp.exp2(half.astype(jnp.float32) / (1 << 16) - 0.5)
        return jax.lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16)

    low, high = (one(half).astype(jnp.uint32) for half in (bits & 0xFFFF, bits >> 16))
    word = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    words = jnp.where(word < packing.CODE_WORDS, bits, low | high << 16)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


# ------------------------------------------------------------------ what is measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    batch: int  # sequences
    budget: int  # tree nodes of each
    context: int  # tokens behind each

    @property
    def bucket(self) -> int:
        """Nodes that the program is compiled for."""
        return next(bucket for bucket in BUCKETS if bucket >= self.budget)

    @property
    def program(self) -> tuple[int, int]:
        return self.batch, self.bucket

    @property
    def rows(self) -> int:
        """That are alive."""
        return self.batch * (self.budget + 1)

    @property
    def pages(self) -> int:
        """Of each sequence."""
        return pages_for(self.context + MARGIN, PAGE)

    def __str__(self) -> str:
        return f"{self.batch:3} x {self.budget:2} nodes, {self.context:6} tokens"


def stage_bytes(model: Model, cell: Cell, touched: float) -> dict[str, float]:
    """Bytes that a step must read, by stage; touched: different experts that a layer needs."""
    size, target, draft = model.dtype.itemsize, model.target, model.draft
    attention = experts = 0.0
    for layer in target.layers:
        attention += param.num_bytes((layer.input_norm, layer.attention))
        experts += param.num_bytes(layer.post_attention_norm)
        if isinstance(layer.mlp, DenseMLP):
            experts += param.num_bytes(layer.mlp)
        else:
            mlp = layer.mlp
            experts += param.num_bytes((mlp.router, mlp.router_bias, mlp.shared))
            experts += touched / num_experts(model) * param.num_bytes(mlp.experts)
    tokens = cell.batch * cell.context
    attention += tokens * model.config.num_hidden_layers * model.config.cache_row * size
    head = param.num_bytes((target.norm, target.lm_head))
    found = {
        "forward": cell.rows * model.config.hidden_size * size,
        "attention": attention,
        "experts": experts,
        "unembed": head,
        "accept": cell.rows * target.lm_head.shape[0] * 4,
    }
    if cell.budget:
        keys_values = [(layer.k, layer.v) for layer in draft.layers]
        found["commit"] = param.num_bytes((draft.fc, draft.hidden_norm, keys_values))
        window = model.drafter.sliding_window or cell.context
        seen = sum(
            min(window, cell.context) if kind == "sliding_attention" else cell.context
            for kind in model.drafter.layer_types
        )
        a_token = 2 * draft.layers[0].k.shape[0] * model.drafter.head_dim * size
        found["propose"] = param.num_bytes(draft.layers) + head + cell.batch * seen * a_token
    return found


def num_experts(model: Model) -> int:
    """Of a layer, on this rank."""
    return model.config.n_routed_experts // model.layout.group("expert").size


def uniform_experts(model: Model, rows: int) -> float:
    """Different experts of a layer on this rank, if rows choose uniformly."""
    c = model.config
    return num_experts(model) * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** rows)


def counted_experts(model: Model, ids: np.ndarray) -> float:
    """The same, counted: ids [steps, B, N + 1, L_moe, K]; the mean over steps and layers."""
    here, counts = num_experts(model), []
    for one in ids:
        for layer in one.reshape(-1, *one.shape[2:]).swapaxes(0, 1):
            counts.append(len(np.unique(layer[(layer >= 0) & (layer < here)])))
    return float(np.mean(counts))


def read_bandwidth() -> float:
    """Bytes per second of a sum over 2 GiB (16 MiB on a CPU)."""
    count = 1 << (29 if jax.default_backend() == "gpu" else 22)
    block = jax.jit(lambda: jnp.ones(count, jnp.float32))()
    total = jax.jit(jnp.sum)
    total(block).block_until_ready()
    times = []
    for _ in range(10):
        began = time.perf_counter()
        jax.block_until_ready([total(block) for _ in range(4)])
        times.append((time.perf_counter() - began) / 4)
    return block.nbytes / statistics.median(times)


# ------------------------------------------------------------------ compiling


@dataclasses.dataclass(kw_only=True)
class Built:
    """A compiled program, and what its text and its thunks say."""

    program: Any
    lowering: float  # seconds, tracing included; one program at a time, whatever the threads
    seconds: float  # of XLA
    temporary: int  # bytes
    text: str = dataclasses.field(repr=False)
    outside_graphs: dict[str, int] | None  # what no CUDA graph holds, and how often; None: unknown
    weight_copies: list[str]  # instructions that write something of a weight's size


def abstract_state(model: Model, batch: int, pages: int, *, drafting: bool) -> State:
    cache = param.abstract(model.cache(pages))
    if not drafting:
        cache = dataclasses.replace(cache, draft_k=None, draft_v=None)
    slots = abstract_array((batch,), jnp.int32)
    active = abstract_array((batch,), jnp.bool_)
    return State(cache=cache, length=slots, token=slots, active=active)


def plan_of(model: Model, bucket: int, *, sampled: bool) -> StepPlan:
    """As the engine has it for this bucket: without a tree there is no drafter."""
    return StepPlan(
        model=model.config,
        drafter=model.drafter if bucket else None,
        budget=bucket,
        sampled=sampled,
        layout=model.layout,
        kernels=model.kernels,
        report_experts=True,
    )


def build_decode(
    model: Model,
    program: tuple[int, int],
    pages: int,
    table_pages: int,
    *,
    sampled: bool,
    thunks: bool,
) -> Built:
    """thunks: whether to look into what CUDA graphs hold; XLA then writes 350 MB of text."""
    batch, bucket = program

    def lower() -> Any:
        return step.decode_steps.lower(
            param.abstract(model.target),
            param.abstract(model.draft) if bucket else None,
            abstract_state(model, batch, pages, drafting=bucket > 0),
            slot_table(batch, table_pages).abstract_control(),
            plan=plan_of(model, bucket, sampled=sampled),
            steps=STEPS,
        )

    return build(model, lower, thunks=thunks)


def build_prefill(model: Model, pages: int, table_pages: int) -> Built:
    def lower() -> Any:
        return step.prefill.lower(
            param.abstract(model.target),
            param.abstract(model.draft),
            abstract_state(model, 1, pages, drafting=True),
            jax.ShapeDtypeStruct((table_pages,), jnp.int32),
            jax.ShapeDtypeStruct((EngineOptions.prefill_chunk,), jnp.int32),
            *(jax.ShapeDtypeStruct((), jnp.int32),) * 2,
            plan=plan_of(model, max(BUCKETS), sampled=False),
        )

    return build(model, lower)


def build(model: Model, lower: Callable[[], Any], *, thunks: bool = False) -> Built:
    began = time.perf_counter()
    lowered = lower()
    traced = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kimi_jax_dump") as dump:
        compiled = lowered.compile(compiler_options={"xla_dump_to": dump} if thunks else {})
        compiling = time.perf_counter() - traced
        lists = sorted(Path(dump).glob("*thunk_sequence*.txt"), key=lambda path: len(path.name))
        outside = outside_graphs(lists[-1].read_text("utf-8")) if lists else None
    text = profiling.brief(compiled.as_text())
    memory = compiled.memory_analysis()
    weights = jax.tree.leaves((model.target, model.draft))
    return Built(
        program=compiled,
        lowering=traced - began,
        seconds=compiling,
        temporary=memory.temp_size_in_bytes if memory else 0,
        text=text,
        outside_graphs=outside,
        weight_copies=weight_copies(text, {math.prod(leaf.shape) for leaf in weights}),
    )


_THUNK = re.compile(r"^(\s*)\d+: (k\w+)\s*\[[^\]]*\]\s*(\S*)")


def outside_graphs(thunks: str) -> dict[str, int]:
    """From XLA's list of a program's thunks: those that no command buffer holds."""
    found: dict[str, int] = {}
    inside: int | None = None  # indent of the command buffer that we are in
    for line in thunks.splitlines():
        match = _THUNK.match(line)
        if not match:
            continue
        indent, kind, name = len(match[1]), match[2], match[3]
        if inside is not None and indent > inside:
            continue
        inside = indent if kind == "kCommandBuffer" else None
        if inside is None:
            what = f"{kind} {re.sub(r'[_.0-9]+$', '', name)}".strip() if name != kind else kind
            found[what] = found.get(what, 0) + 1
    return found


_RESULT = re.compile(r"^\s+(?:ROOT )?%?(\S+) = \(?\w+\[([\d,]+)\]\S* ([\w-]+)\(")
_MOVES = ("copy", "copy-start", "transpose", "convert", "concatenate", "pad", "slice")


def weight_copies(text: str, sizes: set[int]) -> list[str]:
    """Instructions that write as many elements as a weight has, or a sum of several has.

    sizes: elements of the weights. Looked at: copies, transposes, conversions and concatenations,
    alone or as what a fusion is named after, that lie outside of fusions.
    """
    large = {size for size in sizes if size >= WIDE}
    fusions = set(re.findall(r" fusion\(.*calls=%?([\w.-]+)", text))
    found, fused = [], False
    for line in text.splitlines():
        if line and not line[0].isspace():  # the head of a computation
            fused = line.split()[0].lstrip("%") in fusions
        match = _RESULT.match(line)
        if fused or not match:
            continue
        name, dims, opcode = match.groups()
        count = math.prod(map(int, dims.split(",")))
        moves = opcode in _MOVES or (
            opcode == "fusion"
            and any(f"{move}_fusion" in name or f"_{move}" in name for move in _MOVES)
        )
        several = "concatenate" in name and count >= WIDE
        if moves and (count in large or several):
            found.append(f"{name} [{dims}]")
    return found


# ------------------------------------------------------------------ running


def slot_table(batch: int, table_pages: int) -> SlotTable:
    return SlotTable(
        batch,
        pages=table_pages,
        stop_ids=EngineOptions.max_stop_ids,
        biases=EngineOptions.max_logit_bias,
    )


class Bench:
    """The rank, its programs, and what has been found so far."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.began = time.monotonic()
        self.model = describe(arguments)
        device = jax.local_devices()[0]
        self.bandwidth = read_bandwidth()
        self.report: dict[str, Any] = {
            "command": " ".join(["python3 -m bench.step", *sys.argv[1:]]),
            "device": f"{device.device_kind} ({device.platform})",
            "versions": {"python": sys.version.split()[0], "jax": jax.__version__},
            "platform_version": device.client.platform_version,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "kernels": str(self.model.kernels),
            "collectives": "left out",
            "read_bandwidth": self.bandwidth,
            "compile": {},
            "matrix": [],
        }
        self.say(
            f"{self.report['device']}, read bandwidth {self.bandwidth / 1e12:.2f} TB/s, "
            f"{self.report['kernels']}"
        )
        cells, too_large = self.fitting(arguments.cells)
        for cell in too_large:
            self.say(f"{cell}: its context does not fit this device beside the weights; left out")
        self.report["does_not_fit"] = [dataclasses.asdict(cell) for cell in too_large]
        self.cells = cells
        self.pages = 1 + max(cell.batch * cell.pages for cell in cells)
        self.table_pages = max(cell.pages for cell in cells)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def save(self) -> None:
        self.report["seconds"] = round(time.monotonic() - self.began, 1)
        stats = jax.local_devices()[0].memory_stats() or {}
        self.report["peak_bytes"] = stats.get("peak_bytes_in_use")
        if self.arguments.output_json:
            path = Path(self.arguments.output_json)
            temporary = path.with_suffix(".part")
            temporary.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)

    def fitting(self, cells: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
        """Cells whose pages fit beside the weights, and the others."""
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        weights = param.num_bytes((self.model.target, self.model.draft))
        self.report["weight_bytes"] = weights

        def fits(cell: Cell) -> bool:
            cache = param.num_bytes(self.model.cache(1 + cell.batch * cell.pages))
            return limit is None or weights + cache < 0.95 * limit

        return [c for c in cells if fits(c)], [c for c in cells if not fits(c)]

    def compile(self) -> dict[Any, Built]:
        """All programs, in threads; a new program throws other programs' graphs away, so nothing
        is timed before the last one is there."""
        sampled = self.arguments.temperature > 0
        programs = list(dict.fromkeys(cell.program for cell in self.cells))
        looked_into = min(programs, key=lambda program: (program[1] != 8, program[0]))
        jobs: dict[Any, Callable[[], Built]] = {
            program: functools.partial(
                *(build_decode, self.model, program, self.pages, self.table_pages),
                sampled=sampled,
                thunks=program == looked_into,
            )
            for program in programs
        }
        if self.arguments.prefill:
            jobs["prefill"] = functools.partial(
                build_prefill, self.model, self.pages, self.table_pages
            )
        began = time.monotonic()
        built: dict[Any, Built] = {}
        with concurrent.futures.ThreadPoolExecutor(self.arguments.threads) as pool:
            futures = {pool.submit(job): key for key, job in jobs.items()}
            self.weights = self.draw()
            for future in concurrent.futures.as_completed(futures):
                key, one = futures[future], future.result()
                built[key] = one
                name = key if isinstance(key, str) else f"{key[0]} x {key[1]} nodes"
                self.say(
                    f"compiled {name} in {one.lowering:.1f} + {one.seconds:.1f} s"
                    f"{self.remarks(one)}"
                )
                self.report["compile"][name] = {
                    "lowering_seconds": round(one.lowering, 2),
                    "seconds": round(one.seconds, 2),
                    "temporary_bytes": one.temporary,
                    "outside_graphs": one.outside_graphs,
                    "weight_copies": one.weight_copies,
                }
                self.save()
        self.report["compile_seconds"] = round(time.monotonic() - began, 1)
        self.report["compiled_programs"] = compile_counter().compiled
        return built

    def remarks(self, one: Built) -> str:
        text = f", temporary {one.temporary / 1e6:.1f} MB"
        if one.outside_graphs is not None:
            out = ", ".join(f"{n} {what}" for what, n in one.outside_graphs.items())
            text += f"; outside of graphs: {out or 'nothing'}"
        if one.weight_copies:
            text += f"; WEIGHT COPIES: {', '.join(one.weight_copies[:6])}"
        return text

    def draw(self) -> tuple[Any, Any, Any]:
        began = time.monotonic()
        made = (
            draw(self.model.target, 0),
            draw(self.model.draft, 1),
            draw(self.model.cache(self.pages), 2),
        )
        jax.block_until_ready(made)
        self.say(
            f"drew {param.num_bytes(self.model.target) / 1e9:.1f} GB of target, "
            f"{param.num_bytes(self.model.draft) / 1e9:.2f} GB of drafter, "
            f"{param.num_bytes(self.model.cache(self.pages)) / 1e9:.1f} GB of cache "
            f"in {time.monotonic() - began:.1f} s"
        )
        return made

    def run(self) -> None:
        built = self.compile()
        target, draft, cache = self.weights
        del self.weights
        for cell in self.cells:
            row, cache = self.measure(cell, built[cell.program], target, draft, cache)
            self.report["matrix"].append(row)
            self.save()
        if "prefill" in built:
            for context in sorted({cell.context for cell in self.cells} - {1024}):
                row, cache = self.prefill(context, built["prefill"], target, draft, cache)
                self.report.setdefault("prefill", []).append(row)
                self.save()

    def measure(
        self, cell: Cell, built: Built, target: Any, draft: Any, cache: paged.Cache
    ) -> tuple[dict[str, Any], paged.Cache]:
        """Times a cell and takes it apart; returns the pages, which the steps write into."""
        drafting = cell.bucket > 0
        table = slot_table(cell.batch, self.table_pages)
        vocab = target.embed.shape[0]
        tokens = np.random.default_rng(cell.batch).choice(vocab - 1, cell.batch, replace=False)
        for slot in range(cell.batch):
            table.set(
                slot,
                page_table=np.arange(cell.pages) + 1 + slot * cell.pages,
                max_length=cell.pages * PAGE,
                temperature=self.arguments.temperature,
                seed=(1, slot),
                n_live=cell.budget,
                length=cell.context,
                token=int(tokens[slot]),
                active=True,
            )
        control = table.control()
        own = cache if drafting else dataclasses.replace(cache, draft_k=None, draft_v=None)
        zeros = np.zeros(cell.batch, np.int32)
        state = table.place(State(cache=own, length=zeros, token=zeros, active=zeros))  # type: ignore[arg-type]
        drafter = draft if drafting else None
        call = functools.partial(built.program, target, drafter)

        def calls(state: State, *, fetch: bool) -> tuple[State, Any, float]:
            jax.block_until_ready(state)
            output: Any = None
            began = time.perf_counter()
            for _ in range(CALLS):
                output = None  # its memory is free again: a graph is made anew for new addresses
                state, output = call(state, control)
                if fetch:
                    jax.device_get(output)
            jax.block_until_ready((state, output))
            return state, output, 1e3 * (time.perf_counter() - began) / (CALLS * STEPS)

        times, fetched = [], []
        output: Any = None
        for _ in range(REPEATS):
            state, output, ms = calls(state, fetch=False)
            times.append(ms)
        for _ in range(2):
            state, output, ms = calls(state, fetch=True)
            fetched.append(ms)
        seen = jax.device_get(output)
        if not (seen.count > 0).all() or not np.isfinite(seen.logprobs).all():
            raise RuntimeError(f"{cell}: a sequence ended or its logits are not finite: {seen}")
        ms = statistics.median(times[1:])
        touched = counted_experts(self.model, seen.experts)
        parts = stage_bytes(self.model, cell, touched)
        uniform = uniform_experts(self.model, cell.rows)
        floor = 1e3 * sum(parts.values()) / self.bandwidth
        emitted = float(seen.count.mean())
        row: dict[str, Any] = {
            "ctx_tokens_target": cell.context,
            "concurrency": cell.batch,
            "tree_budget": cell.budget,
            "bucket": cell.bucket,
            "rows": cell.rows,
            "ms_per_step": ms,
            "ms_per_step_all": times[1:],
            "ms_per_step_fetched": min(fetched),
            "tokens_per_step": emitted,  # of random weights: no measure of a drafter
            "agg_tok_s": 1e3 / ms * emitted * cell.batch,
            "per_req_tok_s": 1e3 / ms * emitted,
            "unique_experts": touched,
            "unique_experts_uniform": uniform,
            "bytes": sum(parts.values()),
            "bytes_uniform": sum(stage_bytes(self.model, cell, uniform).values()),
            "floor_ms": floor,
            "percent": 100 * floor / ms,
        }
        self.say(
            f"{cell}: {ms:7.3f} ms, fetched {min(fetched):7.3f}; floor {floor:6.3f} = "
            f"{100 * floor / ms:4.1f} %; {touched:.1f} experts (uniform {uniform:.1f}), "
            f"{sum(parts.values()) / 1e9:.2f} GB"
        )
        if self.arguments.stages:
            state = self.stages(row, built, call, state, control, parts)
        left = state.cache
        return row, left if drafting else dataclasses.replace(cache, latent=left.latent)

    def stages(
        self,
        row: dict[str, Any],
        built: Built,
        call: Callable[..., Any],
        state: State,
        control: Any,
        parts: dict[str, float],
    ) -> State:
        """Traces one call, and adds what each stage took to `row`."""
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level, options.python_tracer_level = 1, 0
        name = f"{row['concurrency']}x{row['tree_budget']}-{row['ctx_tokens_target']}"
        with tempfile.TemporaryDirectory(prefix="kimi_jax_trace") as scratch:
            folder = Path(self.arguments.profile_dir or scratch) / name
            with jax.profiler.trace(str(folder), profiler_options=options):
                state, _ = jax.block_until_ready(call(state, control))
            if self.arguments.profile_dir:
                profiling.keep_programs(folder, [built.text])
            try:
                profile = profiling.read(folder, "jit_decode_steps", [built.text])
            except profiling.NoEvents as error:
                self.say(f"no stages: {error}")
                return state
        layers, ms = self.model.config.num_hidden_layers, row["ms_per_step"]
        stages: dict[str, Any] = {}
        for stage, (count, seconds) in profile.by_stage().items():
            taken, floor = 1e3 * seconds / STEPS, 1e3 * parts.get(stage, 0.0) / self.bandwidth
            stages[stage] = {
                "ms": taken,
                "bytes": parts.get(stage, 0.0),
                "floor_ms": floor,
                "percent": 100 * floor / taken,
                "kernels": count / STEPS,
                "kernels_per_layer": count / STEPS / layers,
            }
        row["stages"] = stages
        row["kernel_ms"] = 1e3 * profile.seconds / STEPS
        row["kernels_per_step"] = sum(kernel.calls for kernel in profile.kernels) / STEPS
        row["idle_share"] = 1 - row["kernel_ms"] / ms
        row["largest_kernels"] = [
            {
                "stage": kernel.stage,
                "kernel": kernel.name,
                "calls_per_step": kernel.calls / STEPS,
                "ms_per_step": 1e3 * kernel.seconds / STEPS,
                "us_each": 1e6 * kernel.seconds / kernel.calls,
            }
            for kernel in profile.kernels[:40]
        ]
        print(
            f"{'':10}{'stage':<10} {'ms':>8} {'floor':>7} {'%':>5} {'MB':>8} {'kernels':>8} a layer"
        )
        for stage, one in stages.items():
            print(
                f"{'':10}{stage:<10} {one['ms']:8.3f} {one['floor_ms']:7.3f} {one['percent']:5.1f} "
                f"{one['bytes'] / 1e6:8.1f} {one['kernels']:8.0f} {one['kernels_per_layer']:7.1f}"
            )
        print(
            f"{'':10}{'all':<10} {row['kernel_ms']:8.3f} of {ms:.3f} ms: idle or hidden "
            f"{100 * row['idle_share']:.1f} %"
        )
        for kernel in row["largest_kernels"][: self.arguments.kernels_listed]:
            print(
                f"{'':14}{kernel['ms_per_step']:7.3f} ms = {kernel['calls_per_step']:6.1f} x "
                f"{kernel['us_each']:7.2f} us  {kernel['stage']}, {kernel['kernel'][:70]}"
            )
        sys.stdout.flush()
        return state

    def prefill(
        self, context: int, built: Built, target: Any, draft: Any, cache: paged.Cache
    ) -> tuple[dict[str, Any], paged.Cache]:
        """A prompt of `context` tokens, from calls spread evenly over it."""
        chunk = EngineOptions.prefill_chunk
        slots = jnp.zeros(1, jnp.int32)
        state = State(cache=cache, length=slots, token=slots + 0, active=jnp.zeros(1, jnp.bool_))
        table = np.zeros(self.table_pages, np.int32)
        table[: pages_for(context, PAGE)] = np.arange(pages_for(context, PAGE)) + 1
        tokens = jnp.asarray(np.arange(chunk) % target.embed.shape[0], jnp.int32)
        page_row, times = jnp.asarray(table), []
        starts = [int((i + 0.5) * context / CHUNKS) // chunk * chunk for i in range(CHUNKS)]
        for start in [starts[0], *starts]:
            where = jnp.int32(start), jnp.int32(chunk)
            jax.block_until_ready((state, where))
            began = time.perf_counter()
            state = jax.block_until_ready(
                built.program(target, draft, state, page_row, tokens, *where)
            )
            times.append(time.perf_counter() - began)
        seconds = statistics.mean(times[1:]) * context / chunk
        row = {
            "prompt_tokens": context,
            "chunk": chunk,
            "input_tok_s": context / seconds,
            "seconds": seconds,
            "ms_per_call": [1e3 * one for one in times[1:]],
        }
        self.say(
            f"prefill of {context} tokens: {row['input_tok_s']:.0f} tok/s, {seconds:.2f} s "
            f"({1e3 * times[1]:.1f} to {1e3 * times[-1]:.1f} ms a call of {chunk})"
        )
        return row, state.cache


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    pairs = arguments.cells
    if pairs is None and arguments.quick:
        pairs = [(1, 0), (1, 8), (1, 16)]
    elif pairs is None:
        pairs = [(1, n) for n in (0, 4, 8, 16, 32, 63)]
        pairs += [(b, n) for b in (4, 8, 32) for n in (0, 8)]
    contexts = arguments.contexts or ([1024] if arguments.quick else [1024, 8192, 32768])
    return [Cell(batch=b, budget=n, context=c) for b, n in pairs for c in contexts]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def pairs(text: str) -> list[tuple[int, int]]:
    return [(int(b), int(n)) for b, n in (part.split("x") for part in text.split(","))]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--preset", default="kimi-k2.6", choices=sorted(PRESETS))
    add("--rank_of", type=rank_of, default=rank_of("tp8"), help="tp8, ep8, ep4tp2, tp1, ...")
    add("--routing", default="uniform", choices=("uniform", "skewed"))
    add("--kernels", default="auto", choices=REQUESTS)
    add("--dtype", choices=("bfloat16", "float32"), help="float32 on a CPU, else bfloat16")
    add("--temperature", type=float, default=0.0, help="above 0 the step draws with noise")
    add("--quick", action="store_true", help="budgets 0, 8, 16 at batch 1 and one context")
    add("--cells", type=pairs, help="batches and budgets: 1x0,1x8,32x8")
    add("--contexts", type=numbers, help="tokens behind every sequence: 1024,8192")
    add("--layers", type=int, help="fewer than the model has, to try something out")
    add("--no_stages", dest="stages", action="store_false", help="times only, no traces")
    add("--no_prefill", dest="prefill", action="store_false")
    add("--profile_dir", help="keep the traces there")
    add("--kernels_listed", type=int, default=12, help="of each cell's kernels, the largest")
    add("--threads", type=int, default=12, help="that compile")
    add("--xla_flags", default="", help="added to XLA_FLAGS")
    add("--compilation_cache", help="folder of compiled programs; used twice, the second is warm")
    add("--output_json", help="written after every cell")
    arguments = parser.parse_args()
    arguments.prefill &= not arguments.quick
    arguments.cells = cells_of(arguments)
    return arguments


def main() -> None:
    arguments = parse()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {arguments.xla_flags}".strip()
    reserve_gpu_memory(HEADROOM)
    if arguments.compilation_cache:
        enable_persistent_cache(arguments.compilation_cache)
    compile_counter()
    bench = Bench(arguments)
    bench.run()
    bench.save()
    bench.say("done")


if __name__ == "__main__":
    main()
