"""Reads a converted folder straight into any sharding: every process its own chunks, once.

The files are Orbax checkpoints, one a layer (see `layout.py`), and `orbax.checkpoint.v1.load` reads
them too. Here TensorStore, the library that Orbax stores arrays with, is used directly, because
that allows what Orbax's loading does not: a bound on the bytes in flight that also holds for a
parameter larger than the bound, a check for NaN before anything is placed, buffers that a CPU
device adopts without a copy, and separate times for reading and placing.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.checkpoint import layout, manifest
from kimi_jax.checkpoint.base import Checkpoint
from kimi_jax.checkpoint.finite import check_finite
from kimi_jax.checkpoint.layout import Stored
from kimi_jax.checkpoint.place import Box, Placing, aligned, intersection, slices
from kimi_jax.checkpoint.shards import CheckpointError, listed
from kimi_jax.config import DrafterConfig, ModelConfig
from kimi_jax.model import weights as model_weights
from kimi_jax.speculation import weights as drafter_weights

IN_FLIGHT = 1 << 30
"""Bytes being read or waiting to be placed at a time; one piece of a parameter may be larger."""

WORKERS = min(8, os.cpu_count() or 1)
"""Threads for file access, and as many for copying."""


@dataclass(frozen=True, kw_only=True)
class ConvertedCheckpoint(Checkpoint):
    """A folder with a manifest."""

    manifest: Mapping[str, Any]
    stored: Mapping[str, Stored]  # by the parameter's path

    @property
    def tensors_used(self) -> int:
        return sum(item["tensors"] for item in self.manifest["items"].values())

    @property
    def bytes_used(self) -> int:
        return sum(leaf.nbytes for leaf in self.stored.values())

    def peak_host_bytes(self, dtype: Any, shardings: Any = None) -> int:
        """See `Checkpoint`: buffers that wait, as many bytes of chunks being read, one widened."""
        placing = Placing(self.describe(self.config, dtype), shardings)
        largest = widened = 0
        for path, place in placing.places.items():
            for piece in place.pieces:
                size = int(np.prod(piece.shape))
                largest = max(largest, size * self.stored[path].dtype.itemsize)
                if place.param.dtype != self.stored[path].dtype:
                    widened = max(widened, size * place.param.dtype.itemsize)
        return 2 * max(largest, IN_FLIGHT) + widened

    def _account(self) -> str:
        return f"{self.tensors_used} tensors in {len(self.manifest['items'])} items"

    def _bytes_to_read(self, placing: Placing) -> int:
        return sum(
            int(np.prod(piece.shape)) * self.stored[path].dtype.itemsize
            for path, place in placing.places.items()
            for piece in place.pieces
        )

    def _read(self, placing: Placing, advance: Callable[[int], Any]) -> None:
        reader = _Reader(self.folder, placing, advance)
        for path, leaf in self.stored.items():
            reader.start(path, leaf)
        reader.finish()


class _Reader:
    """Keeps up to IN_FLIGHT bytes of reads going, and places pieces in their order."""

    def __init__(self, folder: Path, placing: Placing, advance: Callable[[int], Any]) -> None:
        self._folder = folder
        self._placing = placing
        self._advance = advance
        self._context = context()
        self._cells: collections.deque[tuple[_Piece, int, Any]] = collections.deque()
        self._reading = 0  # bytes of the cells
        self._waiting = 0  # bytes of buffers that are not yet placed
        self._done: dict[str, list[np.ndarray]] = {}

    def start(self, path: str, leaf: Stored) -> None:
        """Starts reading a parameter's pieces; waits for earlier ones if there are too many."""
        place = self._placing.places[path]
        if not place.pieces:
            self._placing.put(path, [])
            return
        item_folder = layout.item_folder(self._folder, leaf.item)
        store = open_array(leaf, item_folder, self._context)
        for piece in place.pieces:
            size = int(np.prod(piece.shape)) * leaf.dtype.itemsize
            while self._cells and self._waiting + size > IN_FLIGHT:
                self._finish_cell()
            self._waiting += size
            boxes = list(cells(leaf, piece.box))
            buffer = aligned(piece.shape, leaf.dtype)
            begun = _Piece(path=path, leaf=leaf, buffer=buffer, missing=len(boxes))
            for box, nbytes in boxes:
                while self._cells and self._reading + nbytes > IN_FLIGHT:
                    self._finish_cell()
                self._reading += nbytes
                target = begun.buffer[slices(box, piece.box)]
                self._cells.append((begun, nbytes, read_into(store, box, target)))

    def finish(self) -> None:
        """Waits for everything that was started."""
        while self._cells:
            self._finish_cell()

    def _finish_cell(self) -> None:
        piece, nbytes, future = self._cells.popleft()
        with self._placing.seconds.count("read"):
            wait_for(future, piece.leaf, layout.item_folder(self._folder, piece.leaf.item))
        self._reading -= nbytes
        self._advance(nbytes)
        piece.missing -= 1
        if not piece.missing:
            self._arrange(piece)

    def _arrange(self, piece: _Piece) -> None:
        place = self._placing.places[piece.path]
        values = piece.buffer
        self._waiting -= values.nbytes
        with self._placing.seconds.count("arrange"):
            folder = piece.leaf.folder(layout.item_folder(self._folder, piece.leaf.item))
            check_finite(folder, piece.path, values, values.shape)
            if values.dtype != place.param.dtype:
                wide = aligned(values.shape, place.param.dtype)
                wide[...] = values
                values = wide
        done = self._done.setdefault(piece.path, [])
        done.append(values)
        if len(done) == len(place.pieces):
            self._placing.put(piece.path, self._done.pop(piece.path))


@dataclass(kw_only=True, eq=False)
class _Piece:
    """A piece of a parameter that is being read."""

    path: str
    leaf: Stored
    buffer: np.ndarray
    missing: int  # cells that are not yet read


def is_converted(folder: Path) -> bool:
    """Whether a conversion into this folder was finished."""
    return (folder / layout.MANIFEST).is_file()


def is_unfinished(folder: Path) -> bool:
    """Whether a conversion into this folder was begun and not finished."""
    return not is_converted(folder) and is_begun(folder)


def is_begun(folder: Path) -> bool:
    """Whether a conversion into this folder was begun; it may be finished."""
    return any((folder / name).is_dir() for name in (layout.WORK, layout.WEIGHTS))


def open_model(folder: Path) -> ConvertedCheckpoint:
    """See `read.open_checkpoint`."""
    return _open(folder, "model", ModelConfig.from_hf(folder), model_weights.describe)


def open_drafter(folder: Path) -> ConvertedCheckpoint:
    """See `read.open_drafter`."""
    return _open(folder, "drafter", DrafterConfig.from_hf(folder), drafter_weights.describe)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest.

    Raises:
        CheckpointError: it is damaged, or of a version that this one does not read.
    """
    path = folder / layout.MANIFEST
    data = manifest.read_sealed(path)
    if data.get("format") != "kimi_jax" or data.get("version") != manifest.VERSION:
        raise CheckpointError(
            f"{path}: format {data.get('format')!r} version {data.get('version')!r}; this program"
            f" reads 'kimi_jax' version {manifest.VERSION}: convert the source into another folder"
        )
    times = data.get("times")  # the seal does not cover them
    known = times.get("mtime_ns") if isinstance(times, dict) else None
    if (
        not isinstance(times, dict)
        or not isinstance(known, dict)
        or "finished" not in times
        or set(known) != set(data["source"]["files"])
    ):
        raise CheckpointError(f"{path} is damaged: its times; {manifest.REMEDY}")
    return data


def drafter_inside(folder: Path) -> str | None:
    """The seal of the converted drafter that lies in a converted target's folder now."""
    drafter = folder / layout.DRAFTER
    return read_manifest(drafter)["sha256"] if is_converted(drafter) else None


def drafter_fault(checkpoint: ConvertedCheckpoint) -> str | None:
    """What is wrong with the drafter in a target's folder, if it is not the one converted with it.

    Any other is of no concern to a target that was converted without one.
    """
    named = checkpoint.manifest["drafter"]
    if named is None or named == drafter_inside(checkpoint.folder):
        return None
    drafter = checkpoint.folder / layout.DRAFTER
    state = "is another one" if is_converted(drafter) else "is not there"
    return (
        f"{drafter}: the drafter that was converted with this model {state}; convert again, with"
        " --drafter, or with --drafter= for a model without one"
    )


def _open(
    folder: Path, kind: str, config: Any, describe: Callable[[Any, Any], Any]
) -> ConvertedCheckpoint:
    data = read_manifest(folder)
    if data["kind"] != kind:
        raise CheckpointError(f"{folder} holds a converted {data['kind']}, expected a {kind}")
    # Stored as published: bfloat16 but for codes and the router's bias.
    expected = layout.stored(describe(config, "bfloat16"))
    found = leaves_of(data["items"])
    compare_leaves(folder, found, expected)
    if faults := missing_chunks(folder, found.values()):
        raise CheckpointError(
            f"{folder}: {len(faults)} chunks are missing or truncated: {faults[0]}; copy them"
            " again, or convert again: what is whole is kept"
        )
    return ConvertedCheckpoint(
        folder=folder,
        config=config,
        describe=describe,
        manifest=data,
        stored={path: found[path] for path in expected},
    )


def leaves_of(items: Mapping[str, Any]) -> dict[str, Stored]:
    """The parameters that a manifest (or {item: record}) lists, by path."""
    leaves = [
        Stored(
            item=item,
            name=name,
            shape=tuple(entry["shape"]),
            dtype=np.dtype(entry["dtype"]),
            chunk=tuple(entry["chunk"]),
        )
        for item, record in items.items()
        for name, entry in record["leaves"].items()
    ]
    return {leaf.path: leaf for leaf in leaves}


def compare_leaves(
    folder: Path, found: Mapping[str, Stored], expected: Mapping[str, Stored]
) -> None:
    """Refuses parameters that are missing, unexpected, or of another shape or dtype."""
    hint = "do config.json and the weights belong together?"
    if missing := [path for path in expected if path not in found]:
        raise CheckpointError(
            f"{folder}: {len(missing)} parameters are missing: {listed(missing)}; {hint}"
        )
    if unexpected := [path for path in found if path not in expected]:
        raise CheckpointError(
            f"{folder}: {len(unexpected)} parameters are unexpected: {listed(unexpected)}; {hint}"
        )
    for path, leaf in expected.items():
        ours, theirs = found[path], leaf
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise CheckpointError(
                f"{folder}: {path} is {ours.dtype.name} {list(ours.shape)}, expected"
                f" {theirs.dtype.name} {list(theirs.shape)}; {hint}"
            )


def missing_chunks(folder: Path, leaves: Any) -> list[str]:
    """Chunk files that are not there, or not of their size."""
    faults = []
    for leaf in leaves:
        for path, _ in leaf.files(layout.item_folder(folder, leaf.item)):
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                faults.append(f"{path.relative_to(folder)} (not there)")
                continue
            if size != leaf.chunk_bytes:
                faults.append(
                    f"{path.relative_to(folder)} ({size} bytes instead of {leaf.chunk_bytes})"
                )
    return faults


def cells(leaf: Stored, box: Box) -> Iterator[tuple[Box, int]]:
    """The part of `box` in each chunk, and its bytes, chunk by chunk."""
    spans = [
        range(start // step, -(-stop // step))
        for (start, stop), step in zip(box, leaf.chunk, strict=True)
    ]
    for cell in itertools.product(*spans):
        chunk = tuple((i * c, (i + 1) * c) for i, c in zip(cell, leaf.chunk, strict=True))
        if part := intersection(chunk, box):
            size = int(np.prod([stop - start for start, stop in part]))
            yield part, size * leaf.dtype.itemsize


# TensorStore is imported where it is used: a fifth of a second that a published folder does not
# need.


def context() -> Any:
    """TensorStore's settings: its threads are capped."""
    import tensorstore

    return tensorstore.Context(
        {
            "file_io_concurrency": {"limit": WORKERS},
            "data_copy_concurrency": {"limit": WORKERS},
        }
    )


def open_array(leaf: Stored, item_folder: Path, context: Any) -> Any:
    """The stored array, a `tensorstore.TensorStore`.

    Raises:
        CheckpointError: it is not there, or of another shape, dtype or chunk shape.
    """
    import tensorstore

    try:
        return tensorstore.open(leaf.spec(item_folder), open=True, context=context).result()
    except ValueError as error:
        raise CheckpointError(
            f"{leaf.folder(item_folder)}: not the array that the manifest describes:"
            f" {_first_sentence(error)}"
        ) from error


def read_into(store: Any, box: Box, target: np.ndarray) -> Any:
    """Starts reading a part of an array into `target`; returns the future."""
    import tensorstore

    part = store[slices(box)]
    return tensorstore.array(target)[tensorstore.d[:].translate_to[part.origin]].write(part)


def wait_for(future: Any, leaf: Stored, item_folder: Path) -> None:
    """Waits for `read_into`.

    Raises:
        CheckpointError: a chunk is not there or not of its size.
    """
    try:
        future.result()
    except ValueError as error:
        raise CheckpointError(
            f"{leaf.folder(item_folder)}: {_first_sentence(error)}; the file has been changed"
            " since it was written: copy it again, or convert again"
        ) from error


def _first_sentence(error: Exception) -> str:
    return str(error).split(" [")[0]
