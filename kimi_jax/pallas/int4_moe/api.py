"""Routed experts in INT4 with group scales."""

from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.pallas.int4_moe import packed, reference
from kimi_jax.pallas.int4_moe.packed import Packed
from kimi_jax.pallas.int4_moe.packed import shapes as packed_shapes
from kimi_jax.pallas.stream import target as targets
from kimi_jax.pallas.stream.target import Target

__all__ = [
    "Canonical",
    "Implementation",
    "Packed",
    "check",
    "choose",
    "num_experts",
    "pack",
    "packed_shapes",
    "routed_experts",
]

Implementation = Literal["auto", "reference", "mosaic"]


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


def choose(
    implementation: Implementation = "auto",
    *,
    experts: int = 1,
    hidden: int = reference.GROUP,
    width: int = reference.GROUP,
    dtype: DTypeLike = jnp.bfloat16,
    target: Target | None = None,
) -> Literal["reference", "mosaic"]:
    """The implementation that will run: "reference" or "mosaic".

    "auto" is "mosaic" on a GPU that the kernel serves, for sizes and rows (dtype) that it serves.
    target: the GPU to compile for; None for this process's own. Raises NotImplementedError, naming
    the reason, if it can't serve an implementation asked for: nothing falls back in silence.
    """
    if implementation == "reference":
        return "reference"
    if implementation == "mosaic":
        _ = target or _own_target()
        check(experts, hidden, width)
        _check_dtype(dtype)
        return "mosaic"
    if implementation != "auto":
        raise NotImplementedError(
            f"int4_moe: implementation={implementation!r} does not exist; use 'auto', 'reference'"
            " or 'mosaic'"
        )
    sizes: dict[str, Any] = dict(experts=experts, hidden=hidden, width=width)
    try:
        return choose("mosaic", **sizes, dtype=dtype, target=target)
    except NotImplementedError:
        return "reference"


def pack(experts: Canonical) -> Packed:
    """The kernel's order (`stream.packing`) of one layer's experts, made on the device where they
    are, bit for bit; `packed.unpack` is the inverse. A device's part of the experts, or of their
    width, is packed where it lives."""
    return packed.pack(
        experts.gate_up_codes, experts.gate_up_scales, experts.down_codes, experts.down_scales
    )


def _check_dtype(dtype: DTypeLike) -> None:
    if dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"int4_moe: rows of {jnp.dtype(dtype)}; the kernel multiplies bfloat16, other types are"
            " for the reference"
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
    routed_over: int | None = None,
    implementation: Implementation = "auto",
    target: Target | None = None,
) -> jax.Array:
    """sum_k weights[m, k] * down_e(silu(gate_e x) * up_e x) for e = ids[m, k].

    Args:
      x: rows [M, D].
      ids: int32 [M, K] local expert ids, those of a row distinct; an id outside [0, E) is not
        routed and costs nothing.
      weights: float32 [M, K], `routed_scaling_factor` included (see `model.moe.route`).
      experts: as published, or in the kernel's order (`pack`).
      layer: index into experts that are a stack of layers (a leading axis); None: one layer.
      routed_over: experts of all devices that the ids were chosen among, so that the kernel knows
        how many to expect here; None: all are here.
      implementation: "auto" takes what the experts are ordered for.

    Returns:
      float32 [M, D]. From the kernel, a row's result is bit-equal whatever the other rows are.

    Raises:
      ValueError: experts ordered for another implementation than the one asked for.
      NotImplementedError: what the kernel can't serve, named.
    """
    if not isinstance(experts, Packed):
        if implementation == "mosaic":
            raise ValueError(
                "int4_moe: implementation='mosaic' needs experts in the kernel's order: call pack,"
                " once, at load"
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
    _check_dtype(x.dtype)
    if (experts.gate_up.ndim == 5) != (layer is not None):
        raise ValueError(
            f"int4_moe: layer={layer} with weights of shape {experts.gate_up.shape}: a stack of"
            " layers needs the index of one, arrays of one layer none"
        )
    # Not at the top: it imports Mosaic, half a second that a CPU has no use for.
    from kimi_jax.pallas.int4_moe import kernel

    return kernel.routed_experts(
        x,
        ids,
        weights,
        experts,
        target=target or _own_target(),
        layer=layer,
        routed_over=routed_over,
    )


def _own_target() -> Target:
    devices = [d for d in jax.local_devices() if d.platform == "gpu"]
    if not devices:
        raise NotImplementedError(
            "int4_moe: implementation='mosaic' needs an NVIDIA GPU, this process has"
            f" {jax.default_backend()!r}; use 'reference', or name a target to compile for"
        )
    return targets.of(devices[0])
