"""A layout: a mesh and the rules for it. Static: it is part of what a program is compiled for."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.model.param import Param
from kimi_jax.sharding import rules
from kimi_jax.sharding.group import ALONE, Group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where everything lies. The default is one device, on which every method does nothing."""

    mesh: Mesh | None = None
    split_context: bool = False  # pages by position over the devices of a copy
    whole_drafter: bool = False  # every device runs the whole drafter
    experts_over_data: bool = False  # experts over all devices, rows travel to them

    @property
    def rules(self) -> rules.Rules:
        return {
            **rules.RULES,
            **(rules.SPLIT_CONTEXT if self.split_context else {}),
            **(rules.WHOLE_DRAFTER if self.whole_drafter else {}),
            **(rules.EXPERTS_OVER_DATA if self.experts_over_data else {}),
        }

    @property
    def sizes(self) -> Mapping[str, int]:
        """Devices along each mesh axis."""
        return self.mesh.shape if self.mesh else dict.fromkeys(rules.AXES, 1)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def data_size(self) -> int:
        """Groups of devices with slots and pages of their own."""
        return self.sizes[rules.DATA]

    def group(self, axis: str) -> Group:
        """The devices that a logical axis is split over."""
        return self._along(self.rules[axis])

    @property
    def model(self) -> Group:
        """The devices that share one copy of the model."""
        return self._along(rules.MODEL)

    @property
    def data(self) -> Group:
        return self._along((rules.DATA,))

    @property
    def rows_travel(self) -> Group:
        """The groups along `data` that share experts: rows are gathered over them."""
        return self.data if self.experts_over_data else ALONE

    def _along(self, axes: tuple[str, ...]) -> Group:
        axes = tuple(axis for axis in axes if self.sizes[axis] > 1)
        return Group(axes=axes, size=math.prod(self.sizes[axis] for axis in axes))

    def spec(self, *axes: str, shape: Sequence[int] | None = None) -> PartitionSpec:
        """See `rules.spec`."""
        return rules.spec(axes, self.rules, self.sizes, shape)

    def specs(self, described: Any) -> Any:
        """A tree of `Param` -> the tree of its PartitionSpecs; raises ValueError by name."""

        def of(path: Any, param: Param) -> PartitionSpec:
            try:
                return self.spec(*param.axes, shape=param.shape)
            except ValueError as error:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ValueError(f"{name} {list(param.shape)}: {error}") from error

        return jax.tree_util.tree_map_with_path(of, described)

    def device_bytes(self, described: Any) -> int:
        """Bytes of a tree of `Param` on each device."""
        total = 0
        for param in jax.tree.leaves(described):
            split = math.prod(self.group(axis).size for axis in param.axes)
            total += math.prod(param.shape) * param.dtype.itemsize // split
        return total

    def sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        """Where an array with this spec lies; None: on the default device."""
        return NamedSharding(self.mesh, spec) if self.mesh else None

    def shardings(self, specs: Any) -> Any:
        """A tree of PartitionSpecs -> the tree of shardings, or None on one device."""
        if self.mesh is None:
            return None
        return jax.tree.map(
            self.sharding, specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )

    @property
    def processes(self) -> set[int]:
        """Numbers of the processes whose devices these are."""
        return {device.process_index for device in self.mesh.devices.flat} if self.mesh else set()

    def readable(self, arrays: Any) -> Any:
        """Results of a compiled function, as every process can read them."""
        if len(self.processes) < 2:
            return arrays
        return lax.with_sharding_constraint(arrays, self.sharding(PartitionSpec()))

    def spmd(self, function: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        """`function` of each device's parts; on one device the function itself."""
        if self.mesh is None:
            return function
        # Not check_vma: kernels' loops start from constants, which it would have marked one by one.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False
        )


SINGLE = Layout()
"""One device."""
