"""The paged cache: the target's latents and the drafter's context keys and values.

Both live under the same page ids. Position t of a sequence is row t % P of page page_table[t // P].
Page 0 belongs to nobody: page tables are filled up with it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from kimi_jax.config import DrafterConfig, ModelConfig
from kimi_jax.sharding.group import Group
from kimi_jax.sharding.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The bytes of one cached position of one layer.

    bfloat16 (or float32, for oracles): kv_lora_rank latent values after their norm, then
    qk_rope_head_dim rotary values after rotation, in interleaved order. An fp8 format would put
    its scales behind the codes here, and nowhere else.
    """

    width: int  # values a row: R + PE
    dtype: DTypeLike

    @property
    def num_bytes(self) -> int:
        return self.width * jnp.dtype(self.dtype).itemsize


@struct.dataclass
class Cache:
    """latent [L, pages, P, R + PE]; draft_k and draft_v [Ld, pages, P, KV, HD], or None."""

    latent: jax.Array
    draft_k: jax.Array | None = None
    draft_v: jax.Array | None = None

    @property
    def page_size(self) -> int:
        return self.latent.shape[2]


def abstract(
    config: ModelConfig,
    drafter: DrafterConfig | None,
    *,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
) -> Cache:
    """The cache as jax.ShapeDtypeStruct, for memory plans and compilation."""
    row = RowFormat(width=config.cache_row, dtype=dtype)
    latent: Any = jax.ShapeDtypeStruct(
        (config.num_hidden_layers, num_pages, page_size, row.width), row.dtype
    )
    if drafter is None:
        return Cache(latent=latent)
    context: Any = jax.ShapeDtypeStruct(
        (
            drafter.num_hidden_layers,
            num_pages,
            page_size,
            drafter.num_key_value_heads,
            drafter.head_dim,
        ),
        dtype,
    )
    return Cache(latent=latent, draft_k=context, draft_v=context)


def create(
    config: ModelConfig,
    drafter: DrafterConfig | None,
    *,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
) -> Cache:
    """A cache of zeros."""
    shapes = abstract(config, drafter, num_pages=num_pages, page_size=page_size, dtype=dtype)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def specs(layout: Layout, drafter: DrafterConfig | None) -> Cache:
    """How a cache is split: the tree of its PartitionSpecs."""
    latent: Any = layout.spec("layers", "pages", "page_offset", "latent")
    if drafter is None:
        return Cache(latent=latent)
    context: Any = layout.spec("layers", "pages", "any", "draft_kv_heads", "draft_head")
    return Cache(latent=latent, draft_k=context, draft_v=context)


def part_length(length: jax.Array, share: int, context: Group) -> jax.Array:
    """Of `length` positions, how many lie on this device, which holds `share` of every page.

    They are the first ones in its own count of positions, as in pages of `share` positions.
    """
    page = share * context.size
    rest = jnp.clip(length % page - context.first(share), 0, share)
    return length // page * share + rest


def part_places(
    offsets: jax.Array, valid: jax.Array, share: int, context: Group
) -> tuple[jax.Array, jax.Array]:
    """Offsets in this device's `share` of the pages; places of other devices are not valid."""
    if context.size == 1:
        return offsets, valid
    return offsets % share, valid & (offsets // share == context.index)


def locate(
    page_table: jax.Array, positions: jax.Array, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Page ids and offsets, both [B, T], of positions int32 [B, T] under page_table [B, pages]."""
    pages = jnp.take_along_axis(page_table, positions // page_size, axis=1, mode="clip")
    return pages, positions % page_size


def write_rows(
    pages: jax.Array, rows: jax.Array, page_ids: jax.Array, offsets: jax.Array, valid: jax.Array
) -> jax.Array:
    """Writes rows [L, T, ...] into pages [L, pages, P, ...] at (page_ids, offsets) [T].

    Rows that are not valid are dropped: they go nowhere, not even to page 0.
    """
    targets = jnp.where(valid, page_ids, pages.shape[1])
    return pages.at[:, targets, offsets].set(rows.astype(pages.dtype), mode="drop")
