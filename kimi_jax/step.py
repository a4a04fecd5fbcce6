"""One decoding step as a pure function: commit . accept . forward . propose.

Plain decoding is the step with a tree of the root alone; there is no second path. Everything here
runs on the device: the host decides between calls (`Control`) and reads what came out
(`StepOutput`).

Under a layout of several devices the three compiled functions run as one program on each of them
(`Layout.spmd`): all below is then written for a device's own parts of weights, slots, pages and
vocabulary, and every decision is taken by every device from the same reduced values.

A prompt t_0..t_{n-1} is prefilled up to t_{n-2}; its last token is the first anchor. So the first
generated token comes out of an ordinary step, and at every moment a sequence has length + 1 tokens:
`length` of them in the cache, and the anchor.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from kimi_jax import cache as paged
from kimi_jax import sampling
from kimi_jax.cache import Cache
from kimi_jax.config import DrafterConfig, ModelConfig
from kimi_jax.model import transformer
from kimi_jax.model import weights as target_weights
from kimi_jax.model.kernels import REFERENCE, Kernels, as_read
from kimi_jax.model.rows import Rows
from kimi_jax.model.transformer import Forward
from kimi_jax.model.weights import Weights
from kimi_jax.sharding.layout import SINGLE, Layout
from kimi_jax.speculation import accept as acceptance
from kimi_jax.speculation import drafter as dflash
from kimi_jax.speculation import tree as ddtree
from kimi_jax.speculation import weights as drafter_weights
from kimi_jax.speculation.tree import Tree
from kimi_jax.speculation.weights import DrafterWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a compiled step is specialised to; a new value compiles a new program."""

    model: ModelConfig
    drafter: DrafterConfig | None = None
    budget: int = 0  # N, tree nodes compiled for beside the root; each sequence uses n_live of them
    sampled: bool = True  # False: every sequence is greedy, and noise and truncation are left out
    num_logprobs: int = 0  # how many of the likeliest tokens are reported beside the emitted one
    layout: Layout = SINGLE  # the devices, and what lies where
    kernels: Kernels = REFERENCE  # what the target's operations run on
    report_experts: bool = False  # whether the output says which experts every row was sent to

    def __post_init__(self) -> None:
        if self.budget and self.drafter is None:
            raise ValueError(f"a tree budget of {self.budget} nodes needs a drafter")

    @property
    def depth(self) -> int:
        """DEPTH: the most draft tokens that a step can accept."""
        return min(self.drafter.depth, self.budget) if self.drafter and self.budget else 0

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.target_layer_ids if self.drafter else ()

    def page_size(self, cache: Cache) -> int:
        """P, of a device's part of the cache."""
        return cache.page_size * self.layout.group("page_offset").size

    def own_chunk(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """This group's chunk, from arrays with an axis of groups where there are several."""
        return arrays if self.layout.data_size == 1 else tuple(a[0] for a in arrays)


class Specs:
    """How the arguments of a plan's functions are split: PartitionSpecs, one for all leaves below.

    Raises ValueError, naming a weight, if a size does not divide over its devices.
    """

    def __init__(self, plan: StepPlan):
        layout = plan.layout
        self.slots: Any = layout.spec("slots")
        canonical = target_weights.describe(plan.model, jnp.bfloat16)
        self.weights = layout.specs(as_read(canonical, plan.kernels, layout))
        self.drafter = None
        if plan.drafter:
            self.drafter = layout.specs(drafter_weights.describe(plan.drafter, jnp.bfloat16))
        self.state = State(
            cache=paged.specs(layout, plan.drafter),
            length=self.slots,
            token=self.slots,
            active=self.slots,
        )


@struct.dataclass
class State:
    """What the device carries from step to step; donated. B slots.

    length int32 [B]: committed positions in the cache; token int32 [B]: the anchor, the last token,
    at position `length`, not in the cache; active bool [B]: slots that decode.
    """

    cache: Cache
    length: jax.Array
    token: jax.Array
    active: jax.Array


@struct.dataclass
class Control:
    """What the host decides; small, not donated. B slots.

    page_table int32 [B, MP]; max_length int32 [B]: tokens at which a sequence ends (prompt
    included); min_length int32 [B]: stop ids are forbidden while fewer tokens exist; stop_ids
    int32 [B, S] (-1: none); temperature float32 [B] (0: greedy); top_k int32 [B] (0: off);
    top_p, min_p float32 [B]; seed uint32 [B, 2]; bias_ids int32 [B, NB] (-1: none), bias_values
    float32 [B, NB]; n_live int32 [B]: tree nodes each sequence uses, at most the plan's budget.
    """

    page_table: jax.Array
    max_length: jax.Array
    min_length: jax.Array
    stop_ids: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    n_live: jax.Array


@struct.dataclass
class Accepted:
    """The outcome of a walk down the tree, cut at stops and limits.

    tokens int32 [B, DEPTH + 1]: what the target drew along the path (-1 behind the end); count
    int32 [B]: how many of them are emitted (0 for an inactive slot); finish int32 [B]: 0 runs on, 1
    stop id (the last emitted token), 2 length; rows int32 [B, DEPTH + 1]: flat rows of the path,
    root first: the first `count` are committed.
    """

    tokens: jax.Array
    count: jax.Array
    finish: jax.Array
    rows: jax.Array


@struct.dataclass
class StepOutput:
    """What the host reads. DEPTH is the plan's.

    tokens int32 [B, DEPTH + 1], of which `count` int32 [B] are emitted; finish int32 [B] as in
    `Accepted`; nodes int32 [B]: live tree nodes verified; logprobs float32 [B, DEPTH + 1]: of the
    emitted tokens under the target's own distribution (temperature 1, before bias and truncation);
    top_ids int32, top_logprobs float32 [B, DEPTH + 1, num_logprobs]; experts int32
    [B, N + 1, L_moe, K] of every row of the trees (-1: dead row), or None.
    """

    tokens: jax.Array
    count: jax.Array
    finish: jax.Array
    nodes: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    experts: jax.Array | None = None


def propose(
    weights: Weights,
    drafter: DrafterWeights | None,
    state: State,
    control: Control,
    *,
    plan: StepPlan,
) -> Tree:
    """The best `n_live` prefixes of each active sequence under the drafter."""
    n_live = jnp.where(state.active, control.n_live, -1)
    if not plan.budget:
        return ddtree.root_only(state.token, n_live)
    vocab = plan.layout.group("vocab")
    assert plan.drafter is not None and drafter is not None
    assert state.cache.draft_k is not None and state.cache.draft_v is not None
    # A sequence that drafts nothing is given no context, so that it costs none.
    drafting = state.active & (control.n_live > 0)
    logits = dflash.propose_logits(
        drafter,
        plan.drafter,
        weights.embed,
        weights.lm_head,
        state.cache.draft_k,
        state.cache.draft_v,
        control.page_table,
        jnp.where(drafting, state.length, 0),
        state.token,
        plan.layout,
    )
    candidates = ddtree.top_candidates(
        sampling.log_softmax(logits[:, : plan.depth], vocab),
        plan.budget,
        forbidden=plan.drafter.mask_token_id,
        first_id=vocab.first(logits.shape[-1]),
    )
    if vocab.size > 1:
        # The devices' candidates arrive in order of id, which decides between equals.
        every = ddtree.Candidates(*(vocab.gather(part, axis=2) for part in candidates))
        candidates = ddtree.best_of(every, plan.budget)
    return ddtree.build(candidates, state.token, n_live, budget=plan.budget)


def tree_rows(tree: Tree, length: jax.Array, page_table: jax.Array) -> Rows:
    """Row r of sequence b is flat row b (N + 1) + r, at position length + depth."""
    batch, width = tree.tokens.shape
    return Rows(
        token=tree.tokens.reshape(-1),
        position=(length[:, None] + tree.depths).reshape(-1),
        live=tree.live.reshape(-1),
        ancestors=tree.ancestors.reshape(batch * width, -1),
        row_start=jnp.arange(batch, dtype=jnp.int32) * width,
        row_count=tree.live.sum(axis=1, dtype=jnp.int32),
        length=length,
        page_table=page_table,
        max_rows=width,
    )


def forward(
    weights: Weights, state: State, control: Control, tree: Tree, *, plan: StepPlan
) -> Forward:
    """The target's verdict on every row of the trees; the cache is only read."""
    rows = tree_rows(tree, state.length, control.page_table)
    return transformer.forward(
        weights, plan.model, state.cache.latent, rows, plan.taps, plan.layout, plan.kernels
    )


def accept(
    logits: jax.Array, tree: Tree, state: State, control: Control, *, plan: StepPlan
) -> Accepted:
    """Follows the target's own draws down the tree: logits float32 [M, VOCAB].

    The draw of a row is a function of (request seed, position, vocabulary id): nodes of one depth
    share the noise, the walk visits one node a depth, so every draw it uses is exact and equal to
    plain decoding's. A drawn token that is a child is accepted; one that isn't is the bonus.
    """
    batch, width = tree.tokens.shape
    vocab = plan.layout.group("vocab")
    columns = logits.shape[-1]

    def by_row(values: jax.Array) -> jax.Array:
        """[B, ...] -> [M, ...]"""
        return jnp.repeat(values, width, axis=0)

    tokens_so_far = (state.length[:, None] + tree.depths + 1).reshape(-1)
    flat = sampling.apply_bias(logits, by_row(control.bias_ids), by_row(control.bias_values), vocab)
    flat = sampling.forbid(
        flat, by_row(control.stop_ids), tokens_so_far < by_row(control.min_length), vocab
    )
    if plan.sampled:
        depth_positions = state.length[:, None] + 1 + jnp.arange(plan.depth + 1)
        ids = vocab.first(columns) + jnp.arange(columns, dtype=jnp.int32)
        noise = sampling.gumbel(control.seed[:, None], depth_positions, ids.astype(jnp.uint32))
        drawn = sampling.draw(
            flat,
            temperature=by_row(control.temperature),
            top_k=by_row(control.top_k),
            top_p=by_row(control.top_p),
            min_p=by_row(control.min_p),
            noise=jnp.take_along_axis(noise, tree.depths[..., None], axis=1).reshape(-1, columns),
            vocab=vocab,
        )
    else:
        drawn = sampling.likeliest(flat, vocab)
    walk = acceptance.walk(tree, drawn.reshape(batch, width), depth=plan.depth)
    cut = acceptance.cut(
        walk.tokens,
        state.active,
        length=state.length,
        max_length=control.max_length,
        min_length=control.min_length,
        stop_ids=control.stop_ids,
    )
    rows = jnp.arange(batch)[:, None] * width + jnp.maximum(walk.path, 0)
    return Accepted(tokens=cut.tokens, count=cut.count, finish=cut.finish, rows=rows)


def commit(
    drafter: DrafterWeights | None,
    state: State,
    control: Control,
    outcome: Accepted,
    verdict: Forward,
    *,
    plan: StepPlan,
) -> State:
    """Writes the accepted rows, target latents and drafter context, and moves the anchor on."""
    steps = jnp.arange(plan.depth + 1)
    positions = state.length[:, None] + steps
    valid = (steps < outcome.count[:, None]).reshape(-1)
    pages, offsets = (
        part.reshape(-1)
        for part in paged.locate(control.page_table, positions, plan.page_size(state.cache))
    )
    rows = outcome.rows.reshape(-1)
    cache = _write(
        state.cache,
        drafter,
        verdict.rows[:, rows],
        verdict.taps[:, rows],
        positions.reshape(-1),
        (pages, offsets, valid),
        plan=plan,
    )
    emitted = outcome.count > 0
    last = jnp.take_along_axis(outcome.tokens, jnp.maximum(outcome.count - 1, 0)[:, None], axis=1)[
        :, 0
    ]
    return State(
        cache=cache,
        length=state.length + outcome.count,
        token=jnp.where(emitted, last, state.token),
        active=state.active & (outcome.finish == 0),
    )


def decode_step(
    weights: Weights,
    drafter: DrafterWeights | None,
    state: State,
    control: Control,
    *,
    plan: StepPlan,
) -> tuple[State, StepOutput]:
    """One step: every active sequence emits between 1 and DEPTH + 1 tokens."""
    with jax.named_scope("propose"):
        tree = propose(weights, drafter, state, control, plan=plan)
    with jax.named_scope("forward"):
        verdict = forward(weights, state, control, tree, plan=plan)
    with jax.named_scope("accept"):
        outcome = accept(verdict.logits, tree, state, control, plan=plan)
        output = _report(verdict, tree, outcome, plan=plan)
    with jax.named_scope("commit"):
        state = commit(drafter, state, control, outcome, verdict, plan=plan)
    return state, output


@functools.partial(jax.jit, static_argnames=("plan", "steps"), donate_argnames="state")
def decode_steps(
    weights: Weights,
    drafter: DrafterWeights | None,
    state: State,
    control: Control,
    *,
    plan: StepPlan,
    steps: int,
) -> tuple[State, StepOutput]:
    """`steps` steps in one call; the outputs get a leading axis [steps]. `state` is donated."""

    def run(weights, drafter, state, control):
        def body(carry: State, _: None) -> tuple[State, StepOutput]:
            return decode_step(weights, drafter, carry, control, plan=plan)

        return lax.scan(body, state, length=steps)

    ins = Specs(plan)
    outs = ins.state, plan.layout.spec("any", "slots")
    state, output = plan.layout.spmd(run, (ins.weights, ins.drafter, ins.state, ins.slots), outs)(
        weights, drafter, state, control
    )
    return state, plan.layout.readable(output)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def prefill(
    weights: Weights,
    drafter: DrafterWeights | None,
    state: State,
    page_row: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    plan: StepPlan,
) -> State:
    """Writes positions start..start+count-1 of one sequence into its pages; `state` is donated.

    page_row int32 [MP]; tokens int32 [C], of which `count` are real. Slots are not touched: the
    host sets length, token and active when the prompt is in.

    Under a layout of several groups along `data` each writes a chunk of its own: page_row [groups,
    MP], tokens [groups, C], start and count [groups]; a count of 0 writes nothing.
    """

    def run(weights, drafter, state, page_row, tokens, start, count):
        page_row, tokens, start, count = plan.own_chunk(page_row, tokens, start, count)
        chunk = transformer.forward_chunk(
            *(weights, plan.model, state.cache.latent, page_row, tokens, start, count),
            plan.taps,
            plan.layout,
        )
        positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
        valid = jnp.arange(tokens.shape[0]) < count
        page_size = plan.page_size(state.cache)
        pages, offsets = paged.locate(page_row[None], positions[None], page_size)
        cache = _write(
            dataclasses.replace(state.cache, latent=chunk.latent),
            drafter,
            None,
            chunk.taps,
            positions,
            (pages[0], offsets[0], valid),
            plan=plan,
        )
        return dataclasses.replace(state, cache=cache)

    ins = Specs(plan)
    chunk = (ins.slots,) * 4
    return plan.layout.spmd(run, (ins.weights, ins.drafter, ins.state, *chunk), ins.state)(
        weights, drafter, state, page_row, tokens, start, count
    )


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="latent")
def score(
    weights: Weights,
    latent: jax.Array,
    page_row: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    plan: StepPlan,
) -> tuple[jax.Array, jax.Array]:
    """Teacher-forced logits of a chunk, float32 [C, VOCAB], and the pages, chunk written.

    Groups along `data` take chunks of their own, as in `prefill`: logits [groups, C, VOCAB] then.
    """

    def logits(weights: Weights, chunk: transformer.Chunk) -> jax.Array:
        return transformer.unembed(weights, plan.model, chunk.hidden)

    where = page_row, tokens, start, count
    return _forced(weights, latent, where, logits, ("rows", "vocab"), plan)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="latent")
def routes(
    weights: Weights,
    latent: jax.Array,
    page_row: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    plan: StepPlan,
) -> tuple[jax.Array, jax.Array]:
    """As `score`, with the experts that the rows choose, int32 [C, L_moe, K], for logits."""

    def experts(weights: Weights, chunk: transformer.Chunk) -> jax.Array:
        return chunk.experts.swapaxes(0, 1)

    where = page_row, tokens, start, count
    return _forced(weights, latent, where, experts, ("rows",), plan)


def _forced(
    weights: Weights,
    latent: jax.Array,
    where: tuple[jax.Array, ...],
    of: Callable[[Weights, transformer.Chunk], jax.Array],
    axes: tuple[str, ...],
    plan: StepPlan,
) -> tuple[jax.Array, jax.Array]:
    """Sends a chunk through the model: what `of` makes of it, with these axes, and the pages."""
    layout = plan.layout

    def run(weights, latent, page_row, tokens, start, count):
        page_row, tokens, start, count = plan.own_chunk(page_row, tokens, start, count)
        chunk = transformer.forward_chunk(
            weights, plan.model, latent, page_row, tokens, start, count, (), layout
        )
        rows = of(weights, chunk)
        return (rows if layout.data_size == 1 else rows[None]), chunk.latent

    ins = Specs(plan)
    axes = axes if layout.data_size == 1 else ("slots", *axes)
    outs = layout.spec(*axes), ins.state.cache.latent
    rows, latent = layout.spmd(run, (ins.weights, ins.state.cache.latent, *(ins.slots,) * 4), outs)(
        weights, latent, *where
    )
    return layout.readable(rows), latent


def _write(
    cache: Cache,
    drafter: DrafterWeights | None,
    rows: jax.Array | None,
    taps: jax.Array,
    positions: jax.Array,
    where: tuple[jax.Array, jax.Array, jax.Array],
    *,
    plan: StepPlan,
) -> Cache:
    """Target latents rows [L, T, R + PE] (None: written already) and the drafter's context.

    taps [n_taps, T, D], positions int32 [T], where = (pages, offsets, valid) each [T].
    """
    if rows is not None:
        pages, offsets, valid = where
        context = plan.layout.group("page_offset")
        own = paged.part_places(offsets, valid, cache.page_size, context)
        cache = dataclasses.replace(cache, latent=paged.write_rows(cache.latent, rows, pages, *own))
    if plan.drafter is None:
        return cache
    assert drafter is not None and cache.draft_k is not None and cache.draft_v is not None
    keys, values = dflash.project_context(drafter, plan.drafter, taps, positions, plan.layout)
    return dataclasses.replace(
        cache,
        draft_k=paged.write_rows(cache.draft_k, keys, *where),
        draft_v=paged.write_rows(cache.draft_v, values, *where),
    )


def _report(verdict: Forward, tree: Tree, outcome: Accepted, *, plan: StepPlan) -> StepOutput:
    vocab = plan.layout.group("vocab")
    log_probs = sampling.log_softmax(verdict.logits[outcome.rows], vocab)  # [B, DEPTH + 1, VOCAB]
    top_logprobs, top_ids = sampling.top(log_probs, plan.num_logprobs, vocab)
    return StepOutput(
        tokens=outcome.tokens,
        count=outcome.count,
        finish=outcome.finish,
        nodes=jnp.maximum(tree.live.sum(axis=1, dtype=jnp.int32) - 1, 0),
        logprobs=sampling.pick(log_probs, jnp.maximum(outcome.tokens, 0), vocab),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        experts=_by_row(verdict.experts, tree) if plan.report_experts else None,
    )


def _by_row(experts: jax.Array, tree: Tree) -> jax.Array:
    """[L_moe, M, K] -> [B, N + 1, L_moe, K]."""
    return experts.swapaxes(0, 1).reshape(*tree.tokens.shape, -1, experts.shape[-1])
