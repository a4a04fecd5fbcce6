"""Plain JAX definition of tree-masked MLA attention over a paged latent cache."""

import jax
import jax.numpy as jnp
from jax import lax

from kimi_jax.numerics import OnlineSoftmax, einsum

BLOCK = 256  # tokens of context folded in at a time, fixed: a row's sum never depends on the batch


def tree_bits(ancestors: jax.Array, num_rows: int) -> jax.Array:
    """uint32 words [..., W] -> bool [..., num_rows]: bit j says whether row j is visible."""
    bits = (ancestors[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*ancestors.shape[:-1], -1)[..., :num_rows].astype(bool)


def attend(
    q: jax.Array,
    latent: jax.Array,
    layer: jax.Array | int,
    own: jax.Array,
    ancestors: jax.Array,
    row_start: jax.Array,
    row_count: jax.Array,
    length: jax.Array,
    page_table: jax.Array,
    *,
    rank: int,
    scale: float,
    max_rows: int,
) -> tuple[jax.Array, jax.Array]:
    """Shapes as in `api.attend`."""
    num_rows, heads, width = q.shape
    batch = row_start.shape[0]
    page_size = latent.shape[2]

    # Rows by sequence: [B, max_rows]; a place beyond a sequence's rows is masked.
    place = jnp.arange(max_rows)
    real = place < row_count[:, None]
    index = jnp.where(real, row_start[:, None] + place, 0)
    # A tree's row sees row j < 32 W only; places beyond row_count must not see or be seen.
    visible = tree_bits(ancestors[index], max_rows) & real[:, None, :] & real[:, :, None]
    queries = jnp.where(real[..., None, None], q[index], 0)
    seen = visible.any(axis=1)  # a row that nobody sees may hold NaN
    own_rows = jnp.where(seen[..., None], own[index], 0)

    pages_a_block = max(BLOCK // page_size, 1)
    tokens = pages_a_block * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_a_block)))

    def fold(softmax: OnlineSoftmax, rows: jax.Array, mask: jax.Array) -> OnlineSoftmax:
        scores = einsum("brhc,btc->brht", queries, rows) * scale
        return softmax.fold(
            jnp.where(mask, scores, -jnp.inf),
            lambda p: einsum("brht,btc->brhc", p.astype(rows.dtype), rows[..., :rank]),
        )

    def context_block(i: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
        pages = lax.dynamic_slice_in_dim(table, i * pages_a_block, pages_a_block, axis=1)
        rows = latent[layer, pages].reshape(batch, tokens, width)
        inside = i * tokens + jnp.arange(tokens) < length[:, None]
        rows = jnp.where(inside[..., None], rows, 0)  # unwritten memory may hold NaN
        return fold(softmax, rows, inside[:, None, None, :])

    softmax = OnlineSoftmax.start((batch, max_rows, heads), rank)
    blocks = (jnp.max(jnp.where(row_count > 0, length, 0)) + tokens - 1) // tokens
    softmax = lax.fori_loop(0, blocks, context_block, softmax)
    out, lse = fold(softmax, own_rows, visible[:, :, None, :]).finish()

    # Back to flat rows; a row that no sequence owns keeps 0 and -inf.
    target = jnp.where(real, index, num_rows)
    flat_out = jnp.zeros((num_rows, heads, rank), jnp.float32).at[target].set(out, mode="drop")
    flat_lse = jnp.full((num_rows, heads), -jnp.inf, jnp.float32).at[target].set(lse, mode="drop")
    return flat_out.astype(q.dtype), flat_lse
