"""Plain JAX definition of the routed experts."""

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 32  # input columns that share a scale
TILE = 16  # rows of one expert that are multiplied together


def unpack(codes: jax.Array) -> jax.Array:
    """uint8 [..., n / 2] -> int32 [..., n] in [-8, 7]: low nibble first, stored as q + 8."""
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-1).astype(jnp.int32) - 8
    return pairs.reshape(*codes.shape[:-1], -1)


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

    Experts in the order of their ids, only those that some row chose; one is expanded at a time,
    and its rows are gathered into tiles.
    """
    num_rows, num_experts = x.shape[0], gate_up_codes.shape[0]
    tile = min(num_rows, TILE)
    one_hot = ids[:, :, None] == jnp.arange(num_experts)  # an id outside [0, E) matches nothing
    share = jnp.sum(jnp.where(one_hot, weights[:, :, None], 0.0), axis=1)  # [M, E]
    routed = one_hot.any(axis=1)
    (active,) = jnp.nonzero(routed.any(axis=0), size=num_experts, fill_value=0)

    def add_expert(i: jax.Array, total: jax.Array) -> jax.Array:
        e = active[i]
        gate_up = _halves(gate_up_codes[e], gate_up_scales[e])
        down = _halves(down_codes[e], down_scales[e])
        count = routed[:, e].sum(dtype=jnp.int32)
        # Filled up with a row beyond the last: read as the last one, written nowhere.
        (rows,) = jnp.nonzero(routed[:, e], size=num_rows + tile, fill_value=num_rows)

        def add_tile(t: jax.Array, total: jax.Array) -> jax.Array:
            mine = lax.dynamic_slice_in_dim(rows, t * tile, tile)
            gate_up_out = _product(x[mine].astype(jnp.float32), gate_up)  # [tile, 2, F]
            hidden = jax.nn.silu(gate_up_out[:, 0]) * gate_up_out[:, 1]
            out = _product(hidden, down) * share[mine, e, None]
            return total.at[mine].add(out, mode="drop")

        return lax.fori_loop(0, (count + tile - 1) // tile, add_tile, total)

    zero = jnp.zeros(x.shape, jnp.float32)
    return lax.fori_loop(0, routed.any(axis=0).sum(dtype=jnp.int32), add_expert, zero)


def _halves(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 weights of the even and of the odd columns, each shaped like `codes`.

    Kept apart, unpacking is a plain elementwise loop, which a CPU vectorises; interleaving the low
    and the high nibbles is not.
    """
    grouped = codes.reshape(*codes.shape[:-1], -1, GROUP // 2)
    scale = scales.astype(jnp.float32)[..., None]
    even = ((grouped & 15).astype(jnp.float32) - 8.0) * scale
    odd = ((grouped >> 4).astype(jnp.float32) - 8.0) * scale
    return even.reshape(codes.shape), odd.reshape(codes.shape)


def _product(x: jax.Array, halves: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x float32 [M, k] times the transpose of the weights [..., k] -> [M, ...]."""
    columns = x.reshape(x.shape[0], -1, 2)
    even, odd = (
        lax.dot_general(
            columns[..., parity],
            half,
            (((1,), (half.ndim - 1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        for parity, half in enumerate(halves)
    )
    return even + odd
