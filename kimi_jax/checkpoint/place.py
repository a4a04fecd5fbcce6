"""From host memory onto devices: which parts of a parameter this process needs, and where they go.

A reader asks each `Place` for its pieces (one per distinct index that a local device holds), fills
host buffers, and hands them over. Nothing here knows about files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kimi_jax.checkpoint.shards import CheckpointError
from kimi_jax.model.param import Param

type Device = Any
"""A `jax.Device`, which pyright takes for a variable."""

type Box = tuple[tuple[int, int], ...]
"""Start and end along each dimension."""

DEVICE_TOLERANCE = 0.01
"""How far a device's bytes may lie from the plan before loading counts as gone wrong."""


@dataclass(kw_only=True)
class Seconds:
    """Where the time of a load went. Reading goes on in the background while others count."""

    read: float = 0.0  # waiting for bytes from files
    arrange: float = 0.0  # checking, reordering and widening on the host
    place: float = 0.0  # onto the devices
    total: float = 0.0

    @contextmanager
    def count(self, phase: str) -> Iterator[None]:
        """Adds the time inside to one of the phases."""
        start = time.monotonic()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.monotonic() - start)

    def line(self, nbytes: int) -> str:
        """For the log: "2.00 GiB in 1.9 s, 1.05 GiB/s (read 1.1 s, arrange 0.3 s, place 0.5 s)"."""
        rate = nbytes / 2**30 / max(self.total, 1e-9)
        return (
            f"{nbytes / 2**30:.2f} GiB in {self.total:.1f} s, {rate:.2f} GiB/s"
            f" (read {self.read:.1f} s, arrange {self.arrange:.1f} s, place {self.place:.1f} s)"
        )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a parameter that one or more local devices hold."""

    box: Box
    devices: tuple[Device | None, ...]  # None: the default device, uncommitted

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one parameter goes."""

    param: Param
    sharding: jax.sharding.Sharding | None
    pieces: tuple[Piece, ...]  # distinct; empty if no local device holds any of it

    @property
    def box(self) -> Box:
        """The smallest box around all pieces; of no extent if there are none."""
        if not self.pieces:
            return ((0, 0),) * len(self.param.shape)
        return tuple(
            (min(start for start, _ in spans), max(stop for _, stop in spans))
            for spans in zip(*(piece.box for piece in self.pieces), strict=True)
        )


class Placing:
    """The arrays of a tree, as they arrive."""

    def __init__(self, description: Any, shardings: Any, seconds: Seconds | None = None) -> None:
        self._treedef = jax.tree.structure(description)
        params = by_path(description)
        where = [None] * len(params)
        if shardings is not None:
            where = self._treedef.flatten_up_to(shardings)
        self.places = {
            path: _place(param, sharding)
            for (path, param), sharding in zip(params.items(), where, strict=True)
        }
        self.seconds = seconds or Seconds()
        self._arrays: dict[str, jax.Array] = {}

    def put(self, path: str, buffers: Sequence[np.ndarray]) -> None:
        """Puts a parameter's pieces, in the order of `Place.pieces`, onto their devices.

        Returns when they have arrived; the buffers may be kept as the arrays' own memory.
        """
        place = self.places[path]
        assert path not in self._arrays, path
        with self.seconds.count("place"):
            if place.sharding is None:
                array = jax.device_put(buffers[0])
            else:
                # Not device_put of the whole: in several processes that would compare the values
                # of all of them, and each has only its own.
                array = jax.make_array_from_single_device_arrays(
                    place.param.shape,
                    place.sharding,
                    [
                        jax.device_put(buffer, device)
                        for piece, buffer in zip(place.pieces, buffers, strict=True)
                        for device in piece.devices
                    ],
                    dtype=place.param.dtype,
                )
            # Wait, or buffers of parameters in transfer would pile up.
            self._arrays[path] = jax.block_until_ready(array)

    def finish(self, folder: Path, planned: int | None = None) -> Any:
        """The tree of arrays.

        Raises:
            CheckpointError: a device holds other bytes than its shardings call for, or than
                `planned`.
        """
        assert set(self._arrays) == set(self.places), set(self.places) - set(self._arrays)
        found = self.bytes_per_device
        for device, expected in self._called_for(found).items():
            for wanted in (expected, planned):
                held = found.get(device, 0)
                if wanted is not None and abs(held - wanted) > DEVICE_TOLERANCE * wanted:
                    raise CheckpointError(
                        f"{folder}: {device} holds {held} bytes of weights after loading, planned"
                        f" {wanted}; were the shardings made for this tree, and the plan for them?"
                    )
        return jax.tree.unflatten(self._treedef, [self._arrays[path] for path in self.places])

    @property
    def bytes_per_device(self) -> dict[Device, int]:
        """Bytes that have arrived on each local device."""
        return bytes_per_device(list(self._arrays.values()))

    def _called_for(self, found: Iterable[Device]) -> dict[Device, int]:
        """Bytes that the shardings call for on each local device."""
        bytes_for = dict.fromkeys(found, 0)
        for place in self.places.values():
            if place.sharding is None:
                for device in bytes_for:
                    bytes_for[device] += math.prod(place.param.shape) * place.param.dtype.itemsize
                continue
            size = math.prod(place.sharding.shard_shape(place.param.shape))
            for device in place.sharding.addressable_devices:
                size_here = size * place.param.dtype.itemsize
                bytes_for[device] = bytes_for.get(device, 0) + size_here
        return bytes_for


def bytes_per_device(tree: Any) -> dict[Device, int]:
    """Bytes that each local device holds of the arrays in a tree."""
    held: dict[Device, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


def by_path(tree: Any) -> dict[str, Any]:
    """Leaves by path, e.g. "layers.1.mlp.router", in the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which JAX on a CPU adopts without a copy."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if nothing."""
    shared = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """The box as an index, of an array that begins at `origin`'s corner."""
    corner = [start for start, _ in origin] if origin else [0] * len(box)
    return tuple(
        slice(start - at, stop - at) for (start, stop), at in zip(box, corner, strict=True)
    )


def whole(shape: tuple[int, ...]) -> Box:
    """All of an array."""
    return tuple((0, size) for size in shape)


def _place(param: Param, sharding: jax.sharding.Sharding | None) -> Place:
    if sharding is None:
        piece = Piece(box=whole(param.shape), devices=(None,))
        return Place(param=param, sharding=None, pieces=(piece,))
    devices: dict[Box, list[Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(param.shape).items():
        spans = index if index is not None else (slice(None),) * len(param.shape)
        box = tuple(span.indices(size)[:2] for span, size in zip(spans, param.shape, strict=True))
        devices.setdefault(box, []).append(device)
    pieces = tuple(Piece(box=box, devices=tuple(held)) for box, held in sorted(devices.items()))
    return Place(param=param, sharding=sharding, pieces=pieces)
