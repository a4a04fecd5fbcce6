"""What a step reads on each device, computed from shapes: the floor of its time under a layout.

`python3 -m kimi_jax.sharding.traffic` prints the README's table.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from kimi_jax.config import DRAFTER_PRESETS, PRESETS, DrafterConfig, ModelConfig
from kimi_jax.model import weights as target_weights
from kimi_jax.sharding import rules
from kimi_jax.sharding.layout import Layout
from kimi_jax.sharding.mesh import Shape
from kimi_jax.speculation import weights as drafter_weights

DRAWS = 200  # of random routes; the mean of the busiest device is within 1 %

EIGHT = {
    "tp": Shape(tensor=8),
    "ep": Shape(expert=8),
    "mixed": Shape(expert=4, tensor=2),
    "context": Shape(tensor=8, split_context=True),
    "data_parallel_size=8, ep_size=8": Shape(data=8, experts_over_data=True),
}
"""The presets on eight devices; K2.6 with its experts whole on each (`data` alone) does not fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step on the busiest device."""

    weights: int  # bytes of target and drafter that the device holds
    read: int  # bytes that the step reads: weights it touches, and the cache
    reductions: int  # sums over devices in target and drafter, sampling left out
    reduced: int  # bytes of partial sums that a device puts into them
    exchanges: int = 0  # gathers and scatters, each half a reduction
    exchanged: int = 0  # bytes of the whole arrays that are gathered or scattered


def abstract_layout(shape: Shape) -> Layout:
    """A layout without devices: it can be asked everything, and run nothing."""
    mesh: object = AbstractMesh((shape.data, shape.expert, shape.tensor), rules.AXES)
    return Layout(
        mesh=mesh,  # type: ignore[arg-type]
        split_context=shape.split_context,
        experts_over_data=shape.experts_over_data,
    )


@functools.cache
def busiest(config: ModelConfig, rows: int, devices: int) -> float:
    """Expected number of different experts of a layer on the device that has most to read.

    Every row takes its experts uniformly at random; experts lie in `devices` equal bands.
    """
    rng = np.random.default_rng(0)
    experts, each = config.n_routed_experts, config.num_experts_per_tok
    most = 0
    for _ in range(DRAWS):
        routes = rng.random((rows, experts)).argpartition(each, axis=1)[:, :each]
        touched = np.zeros(experts, bool)
        touched[routes] = True
        most += touched.reshape(devices, -1).sum(axis=1).max()
    return most / DRAWS


@functools.cache
def step(
    config: ModelConfig,
    drafter: DrafterConfig | None,
    shape: Shape,
    *,
    sequences: int,
    nodes: int,
    context: int,
) -> Step:
    """Bytes of a bfloat16 step over `sequences` with trees of `nodes` behind `context` tokens.

    A step without a drafter has no tree.
    """
    layout = abstract_layout(shape)
    target = target_weights.describe(config, jnp.bfloat16)
    draft = drafter_weights.describe(drafter, jnp.bfloat16) if drafter else None
    own = math.ceil(sequences / layout.data_size)  # sequences of one group
    rows = own * (nodes + 1)
    meeting = sequences * (nodes + 1) if layout.experts_over_data else rows

    held = layout.device_bytes(target)
    expert_bytes = sum(
        layout.device_bytes(layer.mlp.experts)
        for layer in target.layers
        if isinstance(layer.mlp, target_weights.MoE)
    )
    split = layout.group("expert").size
    touched = busiest(config, meeting, split) / (config.n_routed_experts / split)
    embedding = layout.device_bytes(target.embed)
    cached = config.num_hidden_layers * config.cache_row * 2 / layout.group("page_offset").size
    read = held - embedding - expert_bytes * (1 - touched) + own * context * cached
    reductions, reduced = 0, 0
    if layout.model.size > 1:
        reductions = 1 + 2 * config.num_hidden_layers
        reduced = reductions * rows * config.hidden_size * 4
    if drafter and nodes:
        read += layout.device_bytes(draft)
        drafting = own * drafter.block_size
        if layout.model.size > 1:
            reductions += 2 + 2 * drafter.num_hidden_layers
            reduced += (1 + 2 * drafter.num_hidden_layers) * drafting * config.hidden_size * 4
            reduced += own * drafter.block_size * config.hidden_size * 4
    exchanges, exchanged = 0, 0
    if layout.experts_over_data:  # rows, their experts and shares; the experts' sums
        exchanges += 4 * config.num_moe_layers
        row = config.hidden_size * (2 + 4) + config.num_experts_per_tok * (4 + 4)
        exchanged += config.num_moe_layers * meeting * row
    if layout.split_context:  # queries, log-sum-exps, and what each part has attended to
        exchanges += 3 * config.num_hidden_layers
        head = config.cache_row * 2 + 4 + (config.kv_lora_rank + 1) * 4
        exchanged += config.num_hidden_layers * rows * config.num_attention_heads * head
    return Step(
        weights=held + layout.device_bytes(draft),
        read=int(read),
        reductions=reductions,
        reduced=reduced,
        exchanges=exchanges,
        exchanged=exchanged,
    )


def table() -> str:
    """K2.6 and its drafter on eight devices, as Markdown."""
    config, drafter = PRESETS["kimi-k2.6"], DRAFTER_PRESETS["kimi-k2.6"]
    cases = ((1, 0), (1, 8), (1, 16), (16, 8))
    heads = [f"{count} x {nodes + 1} rows" for count, nodes in cases]
    lines = [
        f"| preset | weights | {' | '.join(heads)} | reductions | exchanges |",
        f"|---|---|{'---|' * len(cases)}---|---|",
    ]
    for name, shape in EIGHT.items():
        steps = [
            step(config, drafter, shape, sequences=count, nodes=nodes, context=4096)
            for count, nodes in cases
        ]
        cells = [f"{one.read / 1e9:.1f} GB" for one in steps]
        sums = f"{steps[1].reductions}, {steps[1].reduced / 1e6:.1f} MB"
        moves = f"{steps[1].exchanges}, {steps[1].exchanged / 1e6:.1f} MB"
        held = f"{steps[0].weights / 1e9:.1f} GB"
        lines.append(f"| {name} | {held} | {' | '.join(cells)} | {sums} | {moves} |")
    return "\n".join(lines)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print(table())
