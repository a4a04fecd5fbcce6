"""Routed experts in INT4 with group scales."""

from typing import Literal

import jax

from kimi_jax.pallas.int4_moe import reference

Implementation = Literal["auto", "reference", "mosaic"]


def choose(implementation: Implementation = "auto") -> str:
    """The implementation that will run: "reference".

    Raises NotImplementedError for a named one that does not exist: nothing falls back in silence.
    """
    if implementation in ("auto", "reference"):
        return "reference"
    raise NotImplementedError(
        f"int4_moe: implementation={implementation!r} does not exist; use 'auto' or 'reference'"
    )


def routed_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up_codes: jax.Array,
    gate_up_scales: jax.Array,
    down_codes: jax.Array,
    down_scales: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """sum_k weights[m, k] * down_e(silu(gate_e x) * up_e x) for e = ids[m, k].

    Args:
      x: rows [M, D].
      ids: int32 [M, K] local expert ids; an id outside [0, E) is not routed and costs nothing.
      weights: float32 [M, K], `routed_scaling_factor` included (see `model.moe.route`).
      gate_up_codes: uint8 [E, 2, F, D / 2], gate then up, two columns a byte (low nibble first,
        q + 8); gate_up_scales: bfloat16 [E, 2, F, D / 32].
      down_codes: uint8 [E, D, F / 2]; down_scales: bfloat16 [E, D, F / 32].

    Returns:
      float32 [M, D].
    """
    choose(implementation)
    return reference.routed_experts(
        x, ids, weights, gate_up_codes, gate_up_scales, down_codes, down_scales
    )
