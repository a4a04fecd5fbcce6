"""Looking up rows of a table that may be split over devices by vocabulary."""

import jax
import jax.numpy as jnp

from kimi_jax.sharding.group import ALONE, Group


def lookup(table: jax.Array, tokens: jax.Array, vocab: Group = ALONE) -> jax.Array:
    """table [VOCAB (this device's part), D], tokens int32 [M] -> [M, D].

    The sum over the devices is exact: all parts but one are zero.
    """
    if vocab.size == 1:
        return table[tokens]
    place = vocab.local(tokens, table.shape[0])
    rows = jnp.where((place >= 0)[:, None], table[jnp.maximum(place, 0)], 0)
    return vocab.sum(rows.astype(jnp.float32)).astype(table.dtype)
