"""From what a user asks for to a mesh: presets, sizes, and the refusals.

Sizes are SGLang's: `tensor_parallel_size` devices share one copy of the model, and `ep_size` of
them split the experts by number (the rest of the factor by width); `data_parallel_size` copies take
sequences of their own. An `ep_size` of all devices, beyond a copy's, splits the experts over the
copies too: attention by sequences, experts by number.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kimi_jax.sharding import rules
from kimi_jax.sharding.layout import SINGLE, Layout

PRESETS = ("auto", "single", "tp", "ep", "mixed", "data", "context")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A mesh without its devices."""

    data: int = 1
    expert: int = 1
    tensor: int = 1
    split_context: bool = False
    experts_over_data: bool = False

    @property
    def num_devices(self) -> int:
        return self.data * self.expert * self.tensor

    def __str__(self) -> str:
        parts = [f"{name} {getattr(self, name)}" for name in rules.AXES if getattr(self, name) > 1]
        parts += ["context split"] if self.split_context else []
        parts += ["experts over data"] if self.experts_over_data else []
        return ", ".join(parts) or "one device"


def resolve(
    sharding: str = "auto",
    *,
    tensor_parallel_size: int | None = None,
    ep_size: int | None = None,
    data_parallel_size: int | None = None,
    num_devices: int,
) -> Shape:
    """The mesh for a preset and sizes; a size that is left out is what the devices allow.

    auto: the given sizes; without any, one device.

    Raises:
        ValueError: an unknown preset, sizes that contradict it or each other, too few devices.
    """
    given = {
        "tensor_parallel_size": tensor_parallel_size,
        "ep_size": ep_size,
        "data_parallel_size": data_parallel_size,
    }
    if sharding not in PRESETS:
        raise ValueError(f"sharding={sharding!r}: expected one of {', '.join(PRESETS)}")
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if sharding == "auto" and not any(given.values()):
        sharding = "single"
    if sharding == "single":
        return _only_ones(given)

    data = data_parallel_size or 1
    if tensor_parallel_size:
        copy = tensor_parallel_size
    elif sharding == "data":
        copy = 1
    elif sharding == "auto":  # only what was asked for
        copy = 1 if data_parallel_size else ep_size or 1
    else:
        copy = max(num_devices // data, 1)
    if sharding == "data" and data_parallel_size is None:
        data = max(num_devices // copy, 1)
    experts = ep_size or {"ep": copy, "mixed": max(copy // 2, 1)}.get(sharding, 1)
    devices = data * copy
    if devices > num_devices:
        raise ValueError(
            f"tensor_parallel_size={copy} x data_parallel_size={data} needs {devices} devices, but "
            f"there are {num_devices}"
        )
    if experts > copy:
        if experts != devices:
            raise ValueError(
                f"ep_size={experts} must divide tensor_parallel_size={copy}, or be all "
                f"{devices} devices"
            )
        return Shape(data=data, expert=copy, experts_over_data=data > 1)
    if copy % experts:
        raise ValueError(f"ep_size={experts} must divide tensor_parallel_size={copy}")
    if sharding == "tp" and experts > 1:
        raise ValueError(f"sharding=tp splits experts by width, but ep_size={experts}: use mixed")
    if sharding == "mixed" and not 1 < experts < copy:
        raise ValueError(
            f"sharding=mixed needs 1 < ep_size < tensor_parallel_size, got {experts} and {copy}"
        )
    return Shape(
        data=data,
        expert=experts,
        tensor=copy // experts,
        split_context=sharding == "context" and copy > 1,
    )


def _only_ones(given: dict[str, int | None]) -> Shape:
    for name, value in given.items():
        if value not in (None, 1):
            raise ValueError(f"sharding=single is one device, but {name}={value}")
    return Shape()


def make_layout(shape: Shape, devices: Sequence[Any] | None = None) -> Layout:
    """The layout over the first devices (all processes' by default); one device needs no mesh."""
    if shape.num_devices == 1:
        return SINGLE
    devices = jax.devices() if devices is None else devices
    sizes = (shape.data, shape.expert, shape.tensor)
    grid = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    return Layout(
        mesh=Mesh(grid, rules.AXES),
        split_context=shape.split_context,
        experts_over_data=shape.experts_over_data,
    )
