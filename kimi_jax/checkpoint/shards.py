"""A folder of safetensors files: index and headers checked against each other and the disk.

Format (safetensors' own documentation): 8 bytes little-endian header length, a JSON header with
dtype, shape and data offsets of each tensor, then the data without gaps. A folder holds either one
`model.safetensors` or shards with a `model.safetensors.index.json` that maps tensor to shard.

Only headers are read here, so whatever is wrong with a folder shows within seconds, not after
minutes of reading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import jax.numpy as jnp
import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BF16": jnp.bfloat16,
        "F16": np.float16,
        "F32": np.float32,
        "F64": np.float64,
        "I32": np.int32,
        "I64": np.int64,
        "U8": np.uint8,
        "I8": np.int8,
    }.items()
}
"""safetensors' names of the dtypes that a size can be checked for."""

_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_READ_CHUNK = 1 << 30  # bytes; one read(2) returns at most 2 GiB


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the culprit, what was expected, a remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """Where one tensor lies in its file."""

    name: str
    dtype: str  # safetensors' name, e.g. "BF16"
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One safetensors file with its tensors in file order."""

    path: Path
    tensors: tuple[Tensor, ...]

    @contextmanager
    def open(self) -> Iterator[ShardReader]:
        """The file, for reading tensors into memory; in file order it is read once, forwards."""
        with self.path.open("rb", buffering=0) as file:
            yield ShardReader(self, file)


class ShardReader:
    """Reads tensors of an open shard."""

    def __init__(self, shard: Shard, file: FileIO) -> None:
        self._shard = shard
        self._file = file

    def read(self, tensor: Tensor, out: np.ndarray, skip: int = 0) -> None:
        """Fills `out`, which is contiguous, with the stored bytes from the `skip`-th on."""
        self._file.seek(tensor.start + skip)
        view = memoryview(out.reshape(-1).view(np.uint8))
        assert skip + view.nbytes <= tensor.nbytes, (tensor, out.shape)
        while view:
            count = self._file.readinto(view[:_READ_CHUNK])
            if not count:
                raise CheckpointError(
                    f"{self._shard.path}: the file ended while {tensor.name!r} was being read; it"
                    " has been changed since its header was read"
                )
            view = view[count:]


def open_shards(folder: Path) -> tuple[Shard, ...]:
    """The folder's shards, in the order of their names.

    Raises:
        CheckpointError: a shard is missing or truncated, a header is damaged, or index and
            headers disagree.
    """
    index = folder / INDEX
    if not index.is_file():
        single = folder / SINGLE
        if single.is_file():
            return (_read_header(single),)
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        found = f"there are {listed(others)}; incomplete download?" if others else "there is none"
        raise CheckpointError(
            f"{folder}: expected {INDEX} with its shards, or {SINGLE}; of safetensors files {found}"
        )
    shard_of = _read_index(index)
    names = sorted(set(shard_of.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        lost = sum(shard in missing for shard in shard_of.values())
        unnamed = {path.name for path in folder.glob("*.safetensors")} - set(names)
        hint = f"the index is stale (it does not name {listed(sorted(unnamed))})" if unnamed else ""
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} shards are missing, with {lost} of"
            f" {len(shard_of)} tensors: {listed(missing)}; {hint or 'incomplete download?'}"
        )
    shards = tuple(_read_header(folder / name) for name in names)
    _compare(index, shard_of, shards)
    return shards


def listed(names: Collection[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(repr(name) for name in list(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        shard_of = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        # A shard lies in the folder itself; an index cannot send the reader elsewhere.
        fine = shard_of and all(Path(name).name == name for name in set(shard_of.values()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a safetensors index ({error!r}); incomplete download?"
        ) from error
    if not fine:
        raise CheckpointError(f"{path}: weight_map is empty or names a file outside the folder")
    return shard_of


def _compare(index: Path, shard_of: Mapping[str, str], shards: tuple[Shard, ...]) -> None:
    """Refuses an index that disagrees with the headers."""
    holder: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in holder:
                where = f"{holder[tensor.name]} and {shard.path.name}"
                raise CheckpointError(f"{index.parent}: tensor {tensor.name!r} is in both {where}")
            holder[tensor.name] = shard.path.name
    wrong = [name for name, shard in shard_of.items() if holder.get(name) != shard]
    wrong += [name for name in holder if name not in shard_of]
    if wrong:
        name = wrong[0]
        says = f"in {shard_of[name]}" if name in shard_of else "nowhere"
        lies = f"in {holder[name]}" if name in holder else "in none of the shards"
        raise CheckpointError(
            f"{index}: index and shards disagree about {len(wrong)} tensors: {name!r} should be"
            f" {says}, but is {lies}; the index is stale, or a shard is of another revision:"
            " download both again"
        )


def _is_sound(tensor: Tensor) -> bool:
    """Whether a header's values are of the kinds that they should be."""
    numbers = (tensor.start, tensor.nbytes, *tensor.shape)
    return isinstance(tensor.dtype, str) and all(type(n) is int and n >= 0 for n in numbers)


def _read_header(path: Path) -> Shard:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size or length > _MAX_HEADER:
            raise CheckpointError(
                f"{path}: {size} bytes are too few for its header; truncated, or not a safetensors"
                " file: download it again"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = [
            Tensor(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=8 + length + entry["data_offsets"][0],
                nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        ]
        if not all(map(_is_sound, tensors)):
            raise ValueError("a dtype, shape or offset is of another kind than it should be")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: damaged safetensors header ({error!r}); download it again"
        ) from error
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))  # empty tensors first
    end = 8 + length
    for tensor in tensors:
        dtype = DTYPES.get(tensor.dtype)
        fits = dtype is None or tensor.nbytes == math.prod(tensor.shape) * dtype.itemsize
        if tensor.start != end or tensor.nbytes < 0 or not fits:
            raise CheckpointError(
                f"{path}: the header's offsets of {tensor.name!r} do not fit its shape"
                f" {list(tensor.shape)} {tensor.dtype} or leave a gap; download it again"
            )
        end += tensor.nbytes
    if end != size:
        fault = "truncated" if size < end else "longer than its header says"
        raise CheckpointError(
            f"{path}: {fault}: {size} bytes instead of {end}; incomplete download?"
        )
    return Shard(path=path, tensors=tuple(tensors))
