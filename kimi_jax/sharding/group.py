"""A group of devices that hold the parts of one thing, and how they talk to each other.

The model is written for one device's part. Where parts must meet, it names the group; a group of
one device does nothing, so that the program for a single device holds no trace of any of this.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kimi_jax.pallas.reduce import api as reduce


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The devices along some mesh axes; its methods are for use inside `jax.shard_map`.

    A thing that is split over the group lies there in order: device `index` holds the part that
    starts at index * (size of a part).
    """

    axes: tuple[str, ...] = ()  # of more than one device each
    size: int = 1

    @property
    def index(self) -> jax.Array | int:
        """This device's place in the group."""
        return lax.axis_index(self.axes) if self.axes else 0

    def sum(self, x: jax.Array) -> jax.Array:
        """Adds the devices' partial sums, float32 or int32."""
        return reduce.all_reduce(x, self.axes) if self.axes else x

    def max(self, x: jax.Array) -> jax.Array:
        return lax.pmax(x, self.axes) if self.axes else x

    def min(self, x: jax.Array) -> jax.Array:
        return lax.pmin(x, self.axes) if self.axes else x

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """Puts the parts together along `axis`, in order."""
        return lax.all_gather(x, self.axes, axis=axis, tiled=True) if self.axes else x

    def sum_parts(self, x: jax.Array, axis: int) -> jax.Array:
        """Adds the devices' partial sums, and leaves each its part along `axis`."""
        if not self.axes:
            return x
        return lax.psum_scatter(x, self.axes, scatter_dimension=axis, tiled=True)

    def part(self, x: jax.Array, axis: int) -> jax.Array:
        """This device's part of something that every device holds whole."""
        if not self.axes:
            return x
        width = x.shape[axis] // self.size
        return lax.dynamic_slice_in_dim(x, self.index * width, width, axis=axis)

    def first(self, width: int) -> jax.Array | int:
        """Where this device's part starts, parts being `width` wide."""
        return self.index * width

    def local(self, ids: jax.Array, width: int) -> jax.Array:
        """Global ids as places in this device's part of `width`; -1 for the others' ids."""
        if not self.axes:
            return ids
        place = ids - self.first(width)
        return jnp.where((place >= 0) & (place < width), place, -1)


ALONE = Group()
"""One device."""
