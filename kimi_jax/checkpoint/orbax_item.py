"""Items as Orbax has them: its files around arrays that are written chunk by chunk."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from kimi_jax.checkpoint.layout import STATE, Stored, naming
from kimi_jax.checkpoint.place import Box, slices

_FILES = ("_CHECKPOINT_METADATA", "orbax.checkpoint", f"{STATE}/_METADATA")
"""What Orbax's reading needs beside the arrays."""


def save_skeleton(folder: Path, names: Iterable[str]) -> None:
    """Has Orbax save a tree with these dotted names, of arrays of one element, into `folder`.

    Its files depend on the names alone, so they serve every item with the same ones.
    """
    from orbax.checkpoint import v1 as ocp  # two seconds

    tree: dict[str, Any] = {}
    for name in names:
        *branches, last = name.split(".")
        at = tree
        for branch in branches:
            at = at.setdefault(branch, {})
        at[last] = np.zeros(1, np.uint8)
    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_compression = False
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # it would report on every step of every save
    try:
        shutil.rmtree(folder, ignore_errors=True)
        with context:
            ocp.save(str(folder), tree)
    finally:
        logging.set_verbosity(verbosity)


def complete(skeleton: Path, item_folder: Path, leaves: Iterable[Stored]) -> None:
    """Makes written chunks an Orbax checkpoint: its files, and each array's zarr.json."""
    for name in _FILES:
        target = item_folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with naming(target):
            target.write_bytes((skeleton / name).read_bytes())
    for leaf in leaves:
        target = leaf.folder(item_folder) / "zarr.json"
        with naming(target):
            target.write_text(json.dumps(leaf.zarr_json()), encoding="utf-8")


class ChunkWriter:
    """Writes chunks, several at a time, each from a buffer that is used again.

    A chunk's file is the chunk's values as they lie in memory. Orbax's own saving would choose the
    chunk shapes itself (whole axes or single entries), copy what it is given, and have no bound on
    the bytes in flight.
    """

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers)
        self._own = threading.local()

    def write(self, leaf: Stored, slab: int, item_folder: Path, values: np.ndarray) -> None:
        """Writes a slab of an array; returns when the kernel has it."""
        rows = (slab * leaf.chunk[0], (slab + 1) * leaf.chunk[0])
        origin = (rows, *((0, size) for size in leaf.shape[1:]))

        def write_one(file: tuple[Path, Box]) -> None:
            path, box = file
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path), path.open("wb", buffering=0) as out:
                left = memoryview(self._contiguous(values[slices(box, origin)]))
                while left:
                    left = left[out.write(left) :]

        files = [*leaf.files(item_folder, slab)]
        run = self._pool.map if len(files) > 1 else map
        for _ in run(write_one, files):
            pass

    def close(self) -> None:
        self._pool.shutdown()

    def _contiguous(self, values: np.ndarray) -> np.ndarray:
        """The bytes of the values in order; a copy in this thread's buffer if need be."""
        if not values.flags.c_contiguous:
            own = getattr(self._own, "buffer", None)
            if own is None or own.nbytes < values.nbytes:
                own = self._own.buffer = np.empty(values.nbytes, np.uint8)
            copy = own[: values.nbytes].view(values.dtype).reshape(values.shape)
            copy[...] = values
            values = copy
        return values.reshape(-1).view(np.uint8)
