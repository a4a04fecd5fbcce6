"""What `sharding="auto"` takes: the preset whose step takes the least time over these links.

A step's time is computed: the bytes that the busiest device reads (`traffic`) at its memory's
rate, and its reductions and exchanges as long as the preflight measured them. Few rows and fast
links favour `tp`; over slow links it pays to split the experts alone and to leave each sequence's
attention to one device. `python3 -m kimi_jax.sharding.auto` prints the README's table.
"""

import functools

import jax
import jax.numpy as jnp

from kimi_jax.config import DRAFTER_PRESETS, PRESETS, DrafterConfig, ModelConfig
from kimi_jax.model import weights as target_weights
from kimi_jax.sharding import traffic
from kimi_jax.sharding.layout import SINGLE
from kimi_jax.sharding.mesh import Shape
from kimi_jax.sharding.preflight import SIZES, Report, Timing
from kimi_jax.speculation import weights as drafter_weights

READ_RATES = {"H200": 4.3e12, "B300": 7.0e12, "RTX PRO 6000": 1.6e12}
"""Bytes a second that a device reads: measured on the H200, nine tenths of other data sheets."""

CONTEXT = 4096  # tokens behind each sequence of the step that is computed
WEIGHTS_SHARE = 0.92  # of the usable memory; cache and workspace want some, too


def read_rate(kind: str) -> float:
    """Of a device by its kind; one that is not known counts as 2 TB/s."""
    return next((rate for name, rate in READ_RATES.items() if name in kind), 2e12)


def presets(devices: int) -> dict[str, Shape]:
    """The meshes of so many devices that are compared."""
    shapes = {"tp": Shape(tensor=devices), "ep": Shape(expert=devices)}
    if devices > 2 and devices % 2 == 0:
        shapes["mixed"] = Shape(expert=devices // 2, tensor=2)
    for copies in (count for count in range(2, devices + 1) if devices % count == 0):
        name = f"data_parallel_size={copies}, ep_size={devices}"
        shapes[name] = Shape(data=copies, expert=devices // copies, experts_over_data=True)
    return shapes


def seconds(step: traffic.Step, links: Report, rate: float) -> float:
    """Of a step that reads at `rate` bytes a second and communicates over these links."""
    total = step.read / rate
    if step.reductions:
        total += step.reductions * links.seconds(step.reduced / step.reductions)
    if step.exchanges:
        total += 0.5 * step.exchanges * links.seconds(step.exchanged / step.exchanges)
    return total


def choose(
    config: ModelConfig,
    drafter: DrafterConfig | None,
    links: Report,
    *,
    devices: int,
    kind: str,
    usable: int,
    sequences: int,
    nodes: int,
) -> tuple[str, Shape]:
    """The fastest preset that divides the model and fits, for so many sequences and tree nodes.

    kind, usable: of a device, and the bytes of its memory that may be used.

    Raises:
      ValueError: none does; the message names what each lacks.
    """
    times, reasons = {}, {}
    for name, shape in presets(devices).items():
        held = _held(config, drafter, shape)
        if isinstance(held, str):
            reasons[name] = held
            continue
        if held > WEIGHTS_SHARE * usable:
            reasons[name] = f"{held / 1e9:.1f} GB of weights for {usable / 1e9:.1f} GB a device"
            continue
        step = traffic.step(
            config, drafter, shape, sequences=sequences, nodes=nodes, context=CONTEXT
        )
        times[name] = seconds(step, links, read_rate(kind)), shape
    if not times:
        lacks = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise ValueError(f"no preset puts the model on {devices} x {kind}: {lacks}")
    name = min(times, key=lambda name: times[name][0])
    return name, times[name][1]


@functools.cache
def _held(config: ModelConfig, drafter: DrafterConfig | None, shape: Shape) -> int | str:
    """Bytes of weights on each device of a mesh, or why the model does not divide over it."""
    layout = traffic.abstract_layout(shape)
    target = target_weights.describe(config, jnp.bfloat16)
    try:
        layout.specs(target)
    except ValueError as error:
        return str(error)
    held = layout.device_bytes(target)
    if drafter is None:
        return held
    described = drafter_weights.describe(drafter, jnp.bfloat16)
    try:
        layout.specs(described)
    except ValueError:
        layout = SINGLE  # a drafter that cannot be split lies whole on each
    return held + layout.device_bytes(described)


def assumed(latency: float, rate: float) -> Report:
    """Links of eight devices on which a sum takes `latency` seconds and its bytes over `rate`."""
    everyone = tuple(range(8))
    timings = (
        Timing(devices=everyone, size=size, seconds=latency + size / rate, right=True)
        for size in SIZES
    )
    return Report(timings=tuple(timings), hung=())


LINKS = {
    "NVLink: 20 us, 300 GB/s": assumed(20e-6, 300e9),
    "PCIe 5.0, peer to peer: 40 us, 20 GB/s": assumed(40e-6, 20e9),
    "PCIe through host memory: 115 us, 8 GB/s": assumed(115e-6, 8e9),
}
"""Round figures for a sum over eight devices; `auto` goes by what the preflight measures."""


def table() -> str:
    """K2.6 with its drafter on eight devices: the preset and its computed step, as Markdown."""
    config, drafter = PRESETS["kimi-k2.6"], DRAFTER_PRESETS["kimi-k2.6"]
    cases = ((1, 8), (4, 8), (16, 8))
    heads = [f"{count} x {nodes + 1} rows" for count, nodes in cases]
    lines = [
        f"| links of eight | memory | {' | '.join(heads)} |",
        f"|---|---|{'---|' * len(cases)}",
    ]
    for name, links in LINKS.items():
        for kind, usable in (("H200", 127e9), ("RTX PRO 6000", 86e9)):
            cells = []
            for sequences, nodes in cases:
                options = {"sequences": sequences, "nodes": nodes}
                preset, shape = choose(
                    config, drafter, links, devices=8, kind=kind, usable=int(usable), **options
                )
                step = traffic.step(config, drafter, shape, context=CONTEXT, **options)
                time = seconds(step, links, read_rate(kind))
                cells.append(f"{preset}: {1e3 * time:.0f} ms")
            lines.append(f"| {name} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print(table())
