"""What lies where: from the logical axis of an array to the mesh axes that it is split over.

One table for weights, state and control blocks. Every parameter names its dimensions
(`model/param.py`), so a new weight needs no rule of its own unless it has a new kind of axis; an
axis that the table does not know is refused, and nothing is split by accident.
"""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
AXES = (DATA, EXPERT, TENSOR)
MODEL = (EXPERT, TENSOR)
"""The devices that share one copy of the model."""

type Rules = Mapping[str, tuple[str, ...]]

RULES: Rules = {
    # The target. Heads, widths and vocabulary are split over all devices of a copy; the experts by
    # number over `expert` and by width over `tensor`, which comes to the same bytes.
    "vocab": MODEL,
    "heads": MODEL,
    "mlp_width": MODEL,
    "shared_width": MODEL,
    "expert": (EXPERT,),
    "expert_width": (TENSOR,),
    # The drafter; its features are a sum over the taps' width.
    "draft_heads": MODEL,
    "draft_kv_heads": MODEL,
    "draft_width": MODEL,
    "tap_embed": MODEL,
    # State and control: each group along `data` has its own slots and its own pages.
    "slots": (DATA,),
    "pages": (DATA,),
    # Everything else is whole on every device: the residual stream, the latents that all heads
    # share (q_a and kv_a make them, each device for itself), the router.
    "page_offset": (),
    "embed": (),
    "qkv_a": (),
    "q_rank": (),
    "latent": (),
    "qk_head": (),
    "nope": (),
    "v_head": (),
    "gate_up": (),
    "router": (),
    "tap": (),
    "draft_head": (),
    "layers": (),
    "block": (),  # inside a kernel's own order of the experts
    "unit": (),
    "rows": (),
    "any": (),
}

SPLIT_CONTEXT: Rules = {"page_offset": MODEL}
"""For long contexts: every page is split by position over the devices of a copy."""

WHOLE_DRAFTER: Rules = {
    axis: () for axis in ("draft_heads", "draft_kv_heads", "draft_width", "tap_embed")
}
"""A drafter whose heads cannot be split: every device runs all of it."""

EXPERTS_OVER_DATA: Rules = {"expert": (DATA, EXPERT)}
"""Attention by sequences, experts over all devices: rows travel to the experts and back."""


def spec(
    axes: Sequence[str], rules: Rules, sizes: Mapping[str, int], shape: Sequence[int] | None = None
) -> PartitionSpec:
    """How an array with these logical axes is split over a mesh of these sizes.

    Mesh axes of one device are left out, so that a mesh of one splits nothing.

    Raises:
        ValueError: an axis without a rule; two axes of the array on the same mesh axis; or, if
            `shape` is given, a size that does not divide. The message names the axis.
    """
    parts: list[tuple[str, ...] | None] = []
    taken: dict[str, str] = {}
    for place, axis in enumerate(axes):
        if axis not in rules:
            raise ValueError(f"no sharding rule for the axis {axis!r} of an array {tuple(axes)}")
        mesh_axes = tuple(name for name in rules[axis] if sizes[name] > 1)
        for name in mesh_axes:
            if name in taken:
                raise ValueError(
                    f"an array {tuple(axes)} would be split twice over the mesh axis {name!r}: by "
                    f"{taken[name]!r} and by {axis!r}"
                )
            taken[name] = axis
        count = math.prod(sizes[name] for name in mesh_axes)
        if shape is not None and shape[place] % count:
            raise ValueError(
                f"{axis!r} has {shape[place]} parts, which {count} devices "
                f"({' x '.join(mesh_axes)}) cannot share evenly"
            )
        parts.append(mesh_axes or None)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)
