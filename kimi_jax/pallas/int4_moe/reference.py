"""Plain JAX definition of the routed experts."""

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 32


def unpack(codes: jax.Array) -> jax.Array:
    """uint8 [..., n / 2] -> int32 [..., n] in [-8, 7]: low nibble first, stored as q + 8."""
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-1).astype(jnp.int32) - 8
    return pairs.reshape(*codes.shape[:-1], -1)


def dequantize(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """float32 [..., n] weights of codes uint8 [..., n / 2] and scales [..., n / 32], exactly."""
    return unpack(codes) * jnp.repeat(scales.astype(jnp.float32), GROUP, axis=-1)


def _product(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """x float32 [M, k] times the transpose of the packed weights [..., k] -> [M, ...].

    Even columns (low nibbles) are laid before odd ones in both operands: unpacking is then a plain
    elementwise loop, which a CPU vectorises; interleaving the nibbles is not.
    """
    grouped = codes.reshape(*codes.shape[:-1], -1, GROUP // 2)
    scale = scales.astype(jnp.float32)[..., None]
    even = (grouped & 15).astype(jnp.float32) - 8.0
    odd = (grouped >> 4).astype(jnp.float32) - 8.0
    halves = [(half * scale).reshape(codes.shape) for half in (even, odd)]
    columns = x.reshape(x.shape[0], -1, 2)
    return sum(
        lax.dot_general(
            columns[..., parity],
            half,
            (((1,), (half.ndim - 1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        for parity, half in enumerate(halves)
    )


def routed_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up_codes: jax.Array,
    gate_up_scales: jax.Array,
    down_codes: jax.Array,
    down_scales: jax.Array,
) -> jax.Array:
    """Weighted sum of each row's experts; shapes as in `api.routed_experts`.

    One expert is expanded at a time, in the order of the ids, and only experts that some row chose.
    """
    num_experts = gate_up_codes.shape[0]
    wide = x.astype(jnp.float32)
    one_hot = ids[:, :, None] == jnp.arange(num_experts)  # an id outside [0, E) matches nothing
    share = jnp.sum(jnp.where(one_hot, weights[:, :, None], 0.0), axis=1)  # [M, E]
    routed = one_hot.any(axis=1)
    active = routed.any(axis=0)
    (order,) = jnp.nonzero(active, size=num_experts, fill_value=0)

    def add_expert(i: jax.Array, total: jax.Array) -> jax.Array:
        e = order[i]
        gate_up = _product(wide, gate_up_codes[e], gate_up_scales[e])  # [M, 2, F]
        hidden = jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]
        out = _product(hidden, down_codes[e], down_scales[e])
        # A dead row may hold NaN: it is left out by selection, not by a product with zero.
        return total + jnp.where(routed[:, e, None], out * share[:, e, None], 0.0)

    zero = jnp.zeros(x.shape, jnp.float32)
    return lax.fori_loop(0, active.sum(dtype=jnp.int32), add_expert, zero)
