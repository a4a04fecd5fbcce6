"""Reads a Hugging Face folder straight into arrays: no torch, each shard once, bounded memory.

Opening a checkpoint reads configuration, index and headers only, and is strict both ways: every
parameter must be filled exactly once, every tensor must be used or be one of the parts that a text
engine leaves out. Loading then goes through the shards in order. A tensor's bytes are read directly
into their place in the parameter (an expert into its place in the stack); a parameter goes to its
devices as soon as it is complete, so that beyond the weights themselves the host holds only the
parameters that are begun and not complete: about one shard of the published files.

A process among several reads only the tensors, and of a tensor only the rows, that its devices
hold. (Where a matrix is split along its columns it reads whole rows.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.checkpoint import names
from kimi_jax.checkpoint.base import Checkpoint
from kimi_jax.checkpoint.finite import check_finite
from kimi_jax.checkpoint.names import Expected, Part
from kimi_jax.checkpoint.place import Box, Placing, aligned, intersection, slices
from kimi_jax.checkpoint.shards import (
    DTYPES,
    CheckpointError,
    Shard,
    ShardReader,
    Tensor,
    listed,
    open_shards,
)
from kimi_jax.config import DrafterConfig, ModelConfig
from kimi_jax.model import weights as model_weights
from kimi_jax.speculation import weights as drafter_weights


@dataclass(frozen=True, kw_only=True)
class PublishedCheckpoint(Checkpoint):
    """A folder of safetensors files with the published names."""

    shards: tuple[Shard, ...]
    skipped: Mapping[str, int]  # number of tensors left out, by the beginning of their names
    expected: Mapping[str, Expected]  # by the name in the file

    @property
    def tensors_used(self) -> int:
        return sum(tensor.name in self.expected for s in self.shards for tensor in s.tensors)

    @property
    def bytes_used(self) -> int:
        return sum(t.nbytes for s in self.shards for t in s.tensors if t.name in self.expected)

    def peak_host_bytes(self, dtype: Any, shardings: Any = None) -> int:
        """See `Checkpoint`.

        Parameters that are begun and not complete, and one tensor whose bytes cannot go straight
        into their place.
        """
        places = Placing(self.describe(self.config, dtype), shardings).places
        sizes = {
            path: _size(place.box) * place.param.dtype.itemsize for path, place in places.items()
        }
        return peak_bytes(self, sizes)

    def _account(self) -> str:
        left_out = {start + "*": count for start, count in self.skipped.items()} or "nothing"
        return f"{self.tensors_used} tensors in {len(self.shards)} files; left out: {left_out}"

    def _bytes_to_read(self, placing: Placing) -> int:
        filling = _Filling(placing)
        return sum(
            filling.bytes_of(tensor, self.expected[tensor.name])
            for shard in self.shards
            for tensor in shard.tensors
            if tensor.name in self.expected
        )

    def _read(self, placing: Placing, advance: Callable[[int], Any]) -> None:
        filling = _Filling(placing)
        for shard in self.shards:
            with shard.open() as reader:
                for tensor in shard.tensors:
                    if tensor.name in self.expected:
                        advance(filling.fill(shard, reader, tensor, self.expected[tensor.name]))
        filling.place_the_rest()


def peak_bytes(checkpoint: PublishedCheckpoint, sizes: Mapping[str, int]) -> int:
    """Most bytes of parameters that are begun and not complete, going through the shards in order.

    sizes: bytes of each parameter by its path; one that is not there is not made.
    """
    order = [t for shard in checkpoint.shards for t in shard.tensors]
    order = [t for t in order if t.name in checkpoint.expected]
    leaves = [
        [part.leaf for part in checkpoint.expected[t.name].parts if part.leaf in sizes]
        for t in order
    ]
    last_use = {leaf: i for i, touched in enumerate(leaves) for leaf in touched}
    held, now, peak = set[str](), 0, 0
    for i, (tensor, touched) in enumerate(zip(order, leaves, strict=True)):
        for leaf in touched:
            if leaf not in held:
                held.add(leaf)
                now += sizes[leaf]
        peak = max(peak, now + tensor.nbytes)
        for leaf in touched:
            if last_use[leaf] == i and leaf in held:
                held.discard(leaf)
                now -= sizes[leaf]
    return peak


def open_model(folder: Path) -> PublishedCheckpoint:
    """See `read.open_checkpoint`."""
    config = ModelConfig.from_hf(folder)
    shards = open_shards(folder)
    found = _match(folder, shards, names.MODEL_PREFIX, names.model_tensors(config))
    _check_counts(found, config)
    return found.check(config, model_weights.describe)


def open_drafter(folder: Path) -> PublishedCheckpoint:
    """See `read.open_drafter`."""
    config = DrafterConfig.from_hf(folder)
    found = _match(folder, open_shards(folder), names.DRAFTER_PREFIX, names.drafter_tensors(config))
    return found.check(config, drafter_weights.describe)


@dataclass(frozen=True, kw_only=True)
class _Match:
    """The tensors of a folder under the names that the table uses."""

    folder: Path
    shards: tuple[Shard, ...]
    table: Mapping[str, Expected]
    holder: Mapping[str, tuple[Shard, Tensor]]  # by the table's names
    skipped: Mapping[str, int]

    def check(self, config: Any, describe: Callable[[Any, Any], Any]) -> PublishedCheckpoint:
        """Refuses tensors that are missing, unexpected, or of another shape or dtype."""
        # Unpacked shapes are optional as a whole: a checkpoint has all of them or none.
        some = any(self.table[n].optional for n in self.holder if n in self.table)
        missing = [
            name
            for name, expected in self.table.items()
            if name not in self.holder and (some or not expected.optional)
        ]
        unexpected = [name for name in self.holder if name not in self.table]
        if missing or unexpected:
            self._refuse(missing, unexpected)
        wrong = []
        for name, expected in self.table.items():
            if name in self.holder:
                shard, tensor = self.holder[name]
                if tensor.shape != expected.shape or tensor.dtype not in expected.dtypes:
                    wrong.append(
                        f"{tensor.name!r} in {shard.path.name} is {tensor.dtype}"
                        f" {list(tensor.shape)}, expected {' or '.join(expected.dtypes)}"
                        f" {list(expected.shape)}"
                    )
        if wrong:
            others = f" (and {len(wrong) - 1} tensors more)" if len(wrong) > 1 else ""
            raise CheckpointError(
                f"{self.folder}: {wrong[0]}{others}; do config.json and the shards belong together?"
            )
        return PublishedCheckpoint(
            folder=self.folder,
            config=config,
            shards=self.shards,
            skipped=self.skipped,
            expected={t.name: self.table[n] for n, (_, t) in self.holder.items()},
            describe=describe,
        )

    def _refuse(self, missing: list[str], unexpected: list[str]) -> None:
        count = sum(len(shard.tensors) for shard in self.shards)
        faults = []
        if missing:
            faults.append(f"{len(missing)} expected tensors are missing: {listed(missing)}")
        if unexpected:
            in_file = [self.holder[name][1].name for name in unexpected]
            first = self.holder[unexpected[0]][0].path.name
            faults.append(
                f"{len(unexpected)} tensors are unexpected (in {first}): {listed(in_file)}"
            )
        remedy = "incomplete download?"
        if unexpected:
            remedy = "renamed tensors?" if missing else "do config.json and shards belong together?"
        raise CheckpointError(
            f"{self.folder} holds {count} tensors in {len(self.shards)} files, but"
            f" {'; '.join(faults)}; {remedy}"
        )


def _match(
    folder: Path, shards: tuple[Shard, ...], prefix: str, table: Mapping[str, Expected]
) -> _Match:
    holder: dict[str, tuple[Shard, Tensor]] = {}
    skipped: dict[str, int] = {}
    for shard in shards:
        for tensor in shard.tensors:
            start = next((s for s in names.SKIPPED if tensor.name.startswith(s)), None)
            if start is not None:
                skipped[start] = skipped.get(start, 0) + 1
                continue
            name = tensor.name.removeprefix(prefix)
            if name in holder:
                raise CheckpointError(
                    f"{folder}: {tensor.name!r} and {holder[name][1].name!r} are the same"
                    " parameter; expected it once"
                )
            holder[name] = (shard, tensor)
    return _Match(folder=folder, shards=shards, table=table, holder=holder, skipped=skipped)


def _check_counts(found: _Match, config: ModelConfig) -> None:
    """Names a wrong number of layers or experts, rather than thousands of tensors."""
    experts: dict[int, set[int]] = {}
    layers = set()
    for name in found.holder:
        if layer := re.match(r"model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?", name):
            layers.add(int(layer[1]))
            if layer[2] is not None:
                experts.setdefault(int(layer[1]), set()).add(int(layer[2]))
    if layers and max(layers) >= config.num_hidden_layers:
        raise CheckpointError(
            f"{found.folder}: config.json says num_hidden_layers={config.num_hidden_layers}, but"
            f" the shards hold layers 0..{max(layers)}; do they belong together?"
        )
    counts = {len(ids) if ids == set(range(len(ids))) else None for ids in experts.values()}
    if len(counts) == 1 and (count := counts.pop()) not in (None, config.n_routed_experts):
        raise CheckpointError(
            f"{found.folder}: config.json says n_routed_experts={config.n_routed_experts}, but the"
            f" shards hold {count} experts a layer; do they belong together?"
        )


class _Filling:
    """Parameters that are being filled: of each, the box that this process needs."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._boxes = {path: place.box for path, place in placing.places.items()}
        self._missing = {path: _size(box) for path, box in self._boxes.items()}
        self._buffers: dict[str, np.ndarray] = {}

    def bytes_of(self, tensor: Tensor, expected: Expected) -> int:
        """How many of the tensor's bytes `fill` will read."""
        if expected.value is not None:
            return tensor.nbytes
        targets = [target for part in expected.parts if (target := self._target(part))]
        if len(targets) == 1 and (rows := self._rows(tensor, targets[0])):
            return rows[1]
        return tensor.nbytes if targets else 0

    def fill(self, shard: Shard, reader: ShardReader, tensor: Tensor, expected: Expected) -> int:
        """Reads what is needed of one tensor into its place; returns the bytes read."""
        seconds = self._placing.seconds
        if expected.value is not None:
            with seconds.count("read"):
                raw = _raw(reader, tensor)
            check_value(shard.path, tensor, raw, expected.value)
            return tensor.nbytes
        targets = [target for part in expected.parts if (target := self._target(part))]
        if not targets:
            return 0
        nbytes = tensor.nbytes
        if len(targets) == 1 and (rows := self._rows(tensor, targets[0])):
            skip, nbytes = rows
            with seconds.count("read"):
                reader.read(tensor, targets[0].region, *([skip] if skip else []))
            with seconds.count("arrange"):
                check_finite(shard.path, tensor.name, targets[0].region, tensor.shape, skip)
        else:
            with seconds.count("read"):
                raw = _raw(reader, tensor)
            with seconds.count("arrange"):
                check_finite(shard.path, tensor.name, raw, tensor.shape)
                for target in targets:
                    stored = raw.view(np.uint8) if target.region.dtype == np.uint8 else raw
                    values = target.part.taken_from(stored, target.whole)
                    target.region[...] = values[target.cut]
        for target in targets:
            self._missing[target.part.leaf] -= target.region.size
            if not self._missing[target.part.leaf]:
                self._place(target.part.leaf)
        return nbytes

    def place_the_rest(self) -> None:
        """Places the parameters of which no local device holds anything."""
        for path, box in self._boxes.items():
            if not _size(box):
                self._placing.put(path, [])

    def _target(self, part: Part) -> _Target | None:
        """Where a part goes; None if no local device holds any of it."""
        param = self._placing.places[part.leaf].param
        box = _box(part.index, param.shape)
        needed = intersection(box, self._boxes[part.leaf])
        if needed is None:
            return None
        if part.leaf not in self._buffers:
            ours = self._boxes[part.leaf]
            self._buffers[part.leaf] = aligned(tuple(b - a for a, b in ours), param.dtype)
        drop = [isinstance(i, int) for i in part.index]
        drop += [False] * (len(box) - len(drop))
        kept = [i for i, dropped in enumerate(drop) if not dropped]
        at = slices(needed, self._boxes[part.leaf])
        return _Target(
            part=part,
            whole=tuple(box[i][1] - box[i][0] for i in kept),
            cut=slices(tuple(needed[i] for i in kept), tuple(box[i] for i in kept)),
            region=self._buffers[part.leaf][
                tuple(s.start if d else s for s, d in zip(at, drop, strict=True))
            ],
        )

    def _rows(self, tensor: Tensor, target: _Target) -> tuple[int, int] | None:
        """Bytes to skip and to read if they can go straight into the region, else None."""
        dtype = DTYPES[tensor.dtype]
        # Codes are bytes in the weights and int32 words in the file: the same bytes.
        same = dtype == target.region.dtype or target.region.dtype == np.uint8
        rest = zip(target.cut[1:], target.whole[1:], strict=True)
        if not (target.part.verbatim and same) or any(c != slice(0, n) for c, n in rest):
            return None
        row = tensor.nbytes // target.whole[0]
        return target.cut[0].start * row, (target.cut[0].stop - target.cut[0].start) * row

    def _place(self, leaf: str) -> None:
        place, buffer = self._placing.places[leaf], self._buffers.pop(leaf)
        self._placing.put(leaf, [buffer[slices(p.box, place.box)] for p in place.pieces])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """Where the part of a tensor that this process needs goes."""

    part: Part
    whole: tuple[int, ...]  # shape of the part
    cut: tuple[slice, ...]  # what is needed of it
    region: np.ndarray  # its place in the buffer


def _box(index: tuple[int | slice, ...], shape: tuple[int, ...]) -> Box:
    spans = []
    for i, size in enumerate(shape):
        at = index[i] if i < len(index) else slice(None)
        spans.append((at, at + 1) if isinstance(at, int) else at.indices(size)[:2])
    return tuple(spans)


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _raw(reader: ShardReader, tensor: Tensor) -> np.ndarray:
    values = np.empty(tensor.shape, DTYPES[tensor.dtype])
    reader.read(tensor, values)
    return values


def check_value(path: Path, tensor: Tensor, found: np.ndarray, expected: tuple[int, ...]) -> None:
    """Refuses a tensor that is known from the configuration and says something else."""
    if tuple(found.tolist()) != expected:
        raise CheckpointError(
            f"{path}: {tensor.name!r} says {found.tolist()}, expected {list(expected)}; do"
            " config.json and the shards belong together?"
        )
