"""Routed experts in INT4 with group scales."""

from typing import Literal, Protocol

import jax
import jax.numpy as jnp

from kimi_jax.pallas.int4_moe import packed, reference, tuning
from kimi_jax.pallas.int4_moe.packed import Packed
from kimi_jax.pallas.int4_moe.program import Shape
from kimi_jax.pallas.stream import target as targets
from kimi_jax.pallas.stream.target import Target

Implementation = Literal["auto", "reference", "mosaic"]

AUTO_USES_MOSAIC = False
"""Whether "auto" means "mosaic" on a GPU that the kernel serves. Turned on once the kernel has been
measured there against the reference (`bench/int4_moe.py`); until then "mosaic" is asked for."""


class Canonical(Protocol):
    """Experts as checkpoints have them (`model.weights.Experts` is one); E, D, F, groups of 32.

    gate_up_codes: uint8 [E, 2, F, D / 2], gate then up, two columns a byte (low nibble first,
    q + 8); gate_up_scales: bfloat16 [E, 2, F, D / 32]; down_codes: uint8 [E, D, F / 2];
    down_scales: bfloat16 [E, D, F / 32].
    """

    @property
    def gate_up_codes(self) -> jax.Array: ...
    @property
    def gate_up_scales(self) -> jax.Array: ...
    @property
    def down_codes(self) -> jax.Array: ...
    @property
    def down_scales(self) -> jax.Array: ...


def choose(implementation: Implementation = "auto", *, target: Target | None = None) -> str:
    """The implementation that will run: "reference" or "mosaic".

    target: the GPU to compile for; None for this process's own. Raises NotImplementedError, naming
    the reason, if it can't serve an implementation asked for: nothing falls back in silence.
    """
    if implementation == "reference":
        return "reference"
    if implementation == "mosaic":
        _ = target or _own_target()
        return "mosaic"
    if implementation != "auto":
        raise NotImplementedError(
            f"int4_moe: implementation={implementation!r} does not exist; use 'auto', 'reference'"
            " or 'mosaic'"
        )
    if AUTO_USES_MOSAIC:
        try:
            return choose("mosaic", target=target)
        except NotImplementedError:
            pass  # no GPU that it serves: the choice is the reference
    return "reference"


def prepare[C: Canonical](
    experts: C, *, implementation: Implementation = "auto", target: Target | None = None
) -> C | Packed:
    """The weights of one layer as the chosen implementation reads them; once, at load.

    The reference takes them as they are; "mosaic" has an order of its own (`stream.packing`), made
    on the device from the canonical arrays, which may then be dropped. A device's part of the
    experts, or of their width, is prepared where it lives. Raises NotImplementedError as `choose`
    does, and for shapes that the kernel can't serve.
    """
    if choose(implementation, target=target) == "reference":
        return experts
    check(
        experts.gate_up_codes.shape[0], experts.down_codes.shape[1], 2 * experts.down_codes.shape[2]
    )
    return pack(experts)


def pack(experts: Canonical) -> Packed:
    """The kernel's order of one layer's experts, bit for bit; `packed.unpack` is the inverse."""
    return packed.pack(
        experts.gate_up_codes, experts.gate_up_scales, experts.down_codes, experts.down_scales
    )


def check(experts: int, hidden: int, width: int) -> None:
    """Raises NotImplementedError for sizes that the kernel can't serve."""
    for name, size in (("hidden size", hidden), ("expert width", width)):
        if size <= 0 or size % reference.GROUP:
            raise NotImplementedError(
                f"int4_moe: {name} {size} is not a multiple of {reference.GROUP}"
            )
    if not 0 < experts < 1 << 16:
        raise NotImplementedError(f"int4_moe: {experts} experts; the kernel numbers at most 65535")


def num_experts(experts: Canonical | Packed) -> int:
    """E: experts that are here."""
    return experts.num_experts if isinstance(experts, Packed) else experts.gate_up_codes.shape[0]


def routed_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: Canonical | Packed,
    *,
    layer: int | jax.Array | None = None,
    implementation: Implementation = "auto",
    target: Target | None = None,
) -> jax.Array:
    """sum_k weights[m, k] * down_e(silu(gate_e x) * up_e x) for e = ids[m, k].

    Args:
      x: rows [M, D].
      ids: int32 [M, K] local expert ids, those of a row distinct; an id outside [0, E) is not
        routed and costs nothing.
      weights: float32 [M, K], `routed_scaling_factor` included (see `model.moe.route`).
      experts: as `prepare` returns them.
      layer: index into experts that are a stack of layers (a leading axis); None: one layer.
      implementation: "auto" takes what the experts were prepared for.

    Returns:
      float32 [M, D]. From the kernel, a row's result is bit-equal whatever the other rows are.

    Raises:
      ValueError: experts prepared for another implementation than the one asked for.
      NotImplementedError: what the kernel can't serve, named.
    """
    if not isinstance(experts, Packed):
        if implementation == "mosaic":
            raise ValueError(
                "int4_moe: implementation='mosaic' needs experts in the kernel's order: call"
                " prepare(experts, implementation='mosaic') once, at load"
            )
        choose(implementation, target=target)
        if layer is not None:
            raise NotImplementedError(
                f"int4_moe: layer={layer} is for packed experts; index the arrays of the reference"
            )
        return reference.routed_experts(
            x,
            ids,
            weights,
            experts.gate_up_codes,
            experts.gate_up_scales,
            experts.down_codes,
            experts.down_scales,
        )
    if implementation == "reference":
        raise ValueError(
            "int4_moe: implementation='reference' needs canonical experts, got packed ones; keep"
            " them as loaded, or undo it with packed.unpack"
        )
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"int4_moe: rows of {x.dtype}; the kernel multiplies bfloat16, other types are for the"
            " reference"
        )
    if (experts.gate_up.ndim == 5) != (layer is not None):
        raise ValueError(
            f"int4_moe: layer={layer} with weights of shape {experts.gate_up.shape}: a stack of"
            " layers needs the index of one, arrays of one layer none"
        )
    # Not at the top: it imports Mosaic, half a second that a CPU has no use for.
    from kimi_jax.pallas.int4_moe import kernel

    return kernel.routed_experts(
        x, ids, weights, experts, target=target or _own_target(), layer=layer
    )


def describe(rows: int, choices: int, experts: Packed, *, target: Target | None = None) -> str:
    """One line for the run log: the tiling that `rows` rows get."""
    shape = Shape(
        rows=rows,
        choices=choices,
        experts=experts.num_experts,
        hidden=experts.hidden,
        width=experts.width,
    )
    return str(tuning.choose(shape, target or _own_target()))


def _own_target() -> Target:
    devices = [d for d in jax.local_devices() if d.platform == "gpu"]
    if not devices:
        raise NotImplementedError(
            "int4_moe: implementation='mosaic' needs an NVIDIA GPU, this process has"
            f" {jax.default_backend()!r}; use 'reference', or name a target to compile for"
        )
    return targets.of(devices[0])
