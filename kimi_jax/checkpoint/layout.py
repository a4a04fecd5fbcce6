"""The converted folder: what lies where, and in which pieces.

    FOLDER/
      manifest.json            written last: without it the folder is not a checkpoint
      config.json, tokenizer and template files, as they were in the source
      weights/
        layers.0/ ... top/     one Orbax checkpoint an item: a layer, or what is outside the layers
          tensors.json         sha256 of every published tensor that went into the item
          state/               Orbax's tree: a zarr array a parameter
            mlp.experts.gate_up_codes/
              zarr.json        shape, dtype, chunk shape
              c/0/0/3/0        one chunk, its values as they lie in memory: no compression
      drafter/                 the same again, for the drafter

Parameters have the shapes, and bytes the order, of `model/weights.py`. Arrays are cut into chunks
at the finest piece that a device of any sharding holds: of every axis that is ever split, an
eighth. Then a device reads whole chunks and nothing else, whichever way the mesh lies.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.checkpoint.place import Box, by_path
from kimi_jax.model.param import Param
from kimi_jax.sharding import rules

MANIFEST = "manifest.json"
WORK = ".conversion"
"""Holds what a conversion needs to resume; gone when it is done."""
WEIGHTS = "weights"
RECORD = "tensors.json"
DRAFTER = "drafter"
STATE = "state"  # Orbax's name for the tree of a checkpoint

SPLIT_AXES = frozenset(axis for axis, over in rules.RULES.items() if {*over} & {*rules.MODEL})
"""The logical axes that some sharding splits over the devices of a copy of the model."""
FINEST = 8
"""Devices that a copy is split over at most without a device reading more than it holds."""

_SYNCFS = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)  # Linux

MIN_CHUNK = 1 << 20
"""Bytes below which a chunk is not split: a small file costs more than reading it whole."""
MAX_CHUNK = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One parameter on disk."""

    item: str
    name: str  # inside the item
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]  # divides the shape

    @property
    def path(self) -> str:
        """In the tree of weights, e.g. "layers.1.mlp.router"."""
        return self.name if self.item == "top" else f"{self.item}.{self.name}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def slabs(self) -> int:
        """Rows of chunks along the first axis; each is a run of the array's flat order."""
        return self.shape[0] // self.chunk[0]

    @property
    def slab_shape(self) -> tuple[int, ...]:
        return (self.chunk[0], *self.shape[1:])

    @property
    def slab_bytes(self) -> int:
        return self.nbytes // self.slabs

    def folder(self, item_folder: Path) -> Path:
        """The array's folder, in its item's."""
        return item_folder / STATE / self.name

    def files(self, item_folder: Path, slab: int | None = None) -> Iterator[tuple[Path, Box]]:
        """Every chunk's file (or those of one slab), and the part of the array in it."""
        folder = self.folder(item_folder)
        rows = range(self.slabs) if slab is None else (slab,)
        columns = zip(self.shape[1:], self.chunk[1:], strict=True)
        for cell in itertools.product(rows, *(range(size // step) for size, step in columns)):
            box = tuple((i * c, (i + 1) * c) for i, c in zip(cell, self.chunk, strict=True))
            yield folder.joinpath("c", *map(str, cell)), box

    def zarr_json(self) -> dict[str, Any]:
        """The array's metadata: zarr version 3, chunks as plain bytes."""
        byte_order = {"configuration": {"endian": "little"}} if self.dtype.itemsize > 1 else {}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "bytes", **byte_order}],
            "fill_value": 0,
        }

    def spec(self, item_folder: Path) -> dict[str, Any]:
        """The array for TensorStore, for reading."""
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(self.folder(item_folder))},
            "fill_missing_data_reads": False,  # a chunk that is not there is an error
            "metadata": self.zarr_json(),
        }

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype.name, "chunk": list(self.chunk)}


def stored(description: Any) -> dict[str, Stored]:
    """How every parameter of a tree of `Param` is stored, by its path."""
    leaves = {}
    for path, param in by_path(description).items():
        item, name = split_path(path)
        leaves[path] = Stored(
            item=item,
            name=name,
            shape=param.shape,
            dtype=param.dtype,
            chunk=chunk_shape(param),
        )
    return leaves


def split_path(path: str) -> tuple[str, str]:
    """A parameter's item and its name in there: "layers.1.mlp.router" -> layers.1, mlp.router."""
    if not path.startswith("layers."):
        return "top", path
    _, number, name = path.split(".", 2)
    return f"layers.{number}", name


def by_item(leaves: Iterable[Stored]) -> dict[str, list[Stored]]:
    """The parameters of each item."""
    items: dict[str, list[Stored]] = {}
    for leaf in leaves:
        items.setdefault(leaf.item, []).append(leaf)
    return items


def item_folder(folder: Path, item: str) -> Path:
    return folder / WEIGHTS / item


def chunk_shape(param: Param) -> tuple[int, ...]:
    """The finest piece of any sharding, but not below MIN_CHUNK and not above MAX_CHUNK bytes."""
    chunk = list(param.shape)
    size = math.prod(chunk) * param.dtype.itemsize
    for place, axis in enumerate(param.axes):
        if axis in SPLIT_AXES:
            parts = math.gcd(chunk[place], FINEST)
            while parts > 1 and size // parts < MIN_CHUNK:
                parts //= 2
            chunk[place] //= parts
            size //= parts
    while size > MAX_CHUNK:
        place = next((i for i, n in enumerate(chunk) if n % 2 == 0), None)
        if place is None:
            break
        chunk[place] //= 2
        size //= 2
    return tuple(chunk)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has an error of a read, write or sync say whose it was; the kernel doesn't."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_json(path: Path, data: Any) -> None:
    """Writes a file that is there whole or not at all, whatever happens meanwhile."""
    temporary = path.with_name(path.name + ".tmp")
    text = json.dumps(data, indent=1)
    text = re.sub(r"\[[\d,\s]+\]", lambda match: re.sub(r"\s+", " ", match[0]), text)  # shapes
    with naming(temporary), temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Has the disk hold a folder's entries."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(folder: Path) -> None:
    """Has the disk hold everything that was written to the folder's file system so far.

    One call for the hundreds of files of an item: syncing each of them takes ten times as long.
    """
    if _SYNCFS is None:
        os.sync()
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if _SYNCFS(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)


def abstract_item(description: Any, item: str) -> Any:
    """What to give `orbax.checkpoint.v1.load` as the abstract tree of an item.

    Args:
        description: a tree like the weights', e.g. of `jax.ShapeDtypeStruct` with shardings.
        item: "layers.0", ..., or "top" for what is outside the layers.
    """
    if item != "top":
        return description.layers[int(item.removeprefix("layers."))]
    return {
        path: leaf for path, leaf in by_path(description).items() if split_path(path)[0] == "top"
    }
