"""Reads a Hugging Face folder straight into arrays: no torch, each shard once, bounded memory.

Opening a checkpoint reads configuration, index and headers only, and is strict both ways: every
parameter must be filled exactly once, every tensor must be used or be one of the parts that a text
engine leaves out. Loading then goes through the shards in order. A tensor's bytes are read directly
into their place in the parameter (an expert into its place in the stack); a parameter goes to its
devices as soon as it is complete, so that beyond the weights themselves the host holds only the
parameters that are begun and not complete: about one shard of the published files.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from tqdm import tqdm

from kimi_jax.checkpoint import names
from kimi_jax.checkpoint.names import Expected, Part
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
from kimi_jax.model.param import Param
from kimi_jax.speculation import weights as drafter_weights

__all__ = ["Checkpoint", "CheckpointError", "load_drafter", "load_model", "open_checkpoint"]

_CHUNK = 1 << 20  # elements checked for NaN at a time, so that temporaries stay in the cache


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened folder: everything that headers can tell has been checked."""

    folder: Path
    config: Any  # ModelConfig or DrafterConfig
    shards: tuple[Shard, ...]
    skipped: Mapping[str, int]  # number of tensors left out, by the beginning of their names
    expected: Mapping[str, Expected]  # by the name in the file
    describe: Callable[[Any, Any], Any]  # (config, dtype) -> tree of Param

    @property
    def tensors_used(self) -> int:
        """Tensors that are read."""
        return sum(tensor.name in self.expected for s in self.shards for tensor in s.tensors)

    @property
    def bytes_used(self) -> int:
        """Bytes of the tensors that are read."""
        return sum(t.nbytes for s in self.shards for t in s.tensors if t.name in self.expected)

    def load(self, *, dtype: Any, shardings: Any = None, progress: bool = True) -> Any:
        """Reads the weights.

        Args:
            dtype: bfloat16 or float32, of everything but codes, scales and the router's bias.
            shardings: None for the default device, or a tree of `jax.sharding.Sharding` like the
                weights'.
            progress: whether to show a progress bar, in bytes, on stderr.

        Returns:
            the tree of arrays that `describe(config, dtype)` describes.

        Raises:
            CheckpointError: a tensor holds NaN or infinity, or a file changed under the reader.
        """
        if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
            raise ValueError(f"dtype={dtype!r} is not supported; use bfloat16 or float32")
        loading = _Loading(self.describe(self.config, dtype), shardings)
        logging.info(
            "%s: reading %.2f GiB of weights from %d files, with at most %.2f GiB of host memory",
            *(self.folder, self.bytes_used / 2**30, len(self.shards)),
            self.peak_host_bytes(dtype) / 2**30,
        )
        start = time.monotonic()
        with tqdm(
            total=self.bytes_used,
            desc=f"reading {self.folder.name}",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not progress,
        ) as bar:
            for shard in self.shards:
                with shard.open() as reader:
                    for tensor in shard.tensors:
                        if tensor.name in self.expected:
                            loading.fill(shard, reader, tensor, self.expected[tensor.name])
                            bar.update(tensor.nbytes)
        seconds = time.monotonic() - start
        logging.info(
            "%s: %d tensors, %.2f GiB in %.1f s (reading %.1f s, placing %.1f s); left out: %s",
            *(self.folder, self.tensors_used, self.bytes_used / 2**30, seconds),
            *(seconds - loading.placing_seconds, loading.placing_seconds),
            {start + "*": count for start, count in self.skipped.items()} or "nothing",
        )
        return loading.finish()

    def peak_host_bytes(self, dtype: Any) -> int:
        """An upper bound of what `load` holds on the host beyond the arrays it has completed.

        Parameters that are begun and not complete, and one tensor whose bytes cannot go straight
        into their place.
        """
        sizes = {
            leaf: math.prod(p.shape) * p.dtype.itemsize
            for leaf, p in _by_path(self.describe(self.config, dtype)).items()
        }
        order = [t for shard in self.shards for t in shard.tensors if t.name in self.expected]
        leaves = [[part.leaf for part in self.expected[t.name].parts] for t in order]
        last_use = {leaf: i for i, touched in enumerate(leaves) for leaf in touched}
        held: dict[str, int] = {}
        peak = 0
        for i, (tensor, touched) in enumerate(zip(order, leaves, strict=True)):
            held.update((leaf, sizes[leaf]) for leaf in touched)
            peak = max(peak, sum(held.values()) + tensor.nbytes)
            for leaf in touched:
                if last_use[leaf] == i:
                    del held[leaf]
        return peak


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Opens a target's folder; reads configuration, index and headers only.

    Raises:
        CheckpointError: something is missing, truncated, unexpected, or of another shape or dtype.
        ValueError: the configuration is not supported (see `ModelConfig.from_hf`).
    """
    folder = _existing(folder)
    config = ModelConfig.from_hf(folder)
    shards = open_shards(folder)
    found = _match(folder, shards, names.MODEL_PREFIX, names.model_tensors(config))
    _check_counts(found, config)
    return found.check(config, model_weights.describe)


def open_drafter(folder: str | Path, target: ModelConfig) -> Checkpoint:
    """Opens the folder of a drafter for `target`; reads configuration, index and headers only.

    Raises:
        CheckpointError: something is missing, truncated, unexpected, or of another shape or dtype.
        ValueError: the configuration is not supported, or does not fit the target.
    """
    folder = _existing(folder)
    config = DrafterConfig.from_hf(folder)
    try:
        config.check_against(target)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    found = _match(folder, open_shards(folder), names.DRAFTER_PREFIX, names.drafter_tensors(config))
    return found.check(config, drafter_weights.describe)


def load_model(
    folder: str | Path, *, dtype: Any, shardings: Any = None, progress: bool = True
) -> tuple[ModelConfig, model_weights.Weights]:
    """Opens and reads a target; see `open_checkpoint` and `Checkpoint.load`."""
    checkpoint = open_checkpoint(folder)
    loaded = checkpoint.load(dtype=dtype, shardings=shardings, progress=progress)
    return checkpoint.config, loaded


def load_drafter(
    folder: str | Path,
    target: ModelConfig,
    *,
    dtype: Any,
    shardings: Any = None,
    progress: bool = True,
) -> tuple[DrafterConfig, drafter_weights.DrafterWeights]:
    """Opens and reads a drafter for `target`; see `open_drafter` and `Checkpoint.load`."""
    checkpoint = open_drafter(folder, target)
    loaded = checkpoint.load(dtype=dtype, shardings=shardings, progress=progress)
    return checkpoint.config, loaded


def _existing(folder: str | Path) -> Path:
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        state = "has no config.json" if folder.is_dir() else "is not a folder"
        raise CheckpointError(
            f"{folder} {state}; expected a Hugging Face checkpoint folder with config.json and"
            " safetensors files"
        )
    return folder


@dataclass(frozen=True, kw_only=True)
class _Match:
    """The tensors of a folder under the names that the table uses."""

    folder: Path
    shards: tuple[Shard, ...]
    table: Mapping[str, Expected]
    holder: Mapping[str, tuple[Shard, Tensor]]  # by the table's names
    skipped: Mapping[str, int]

    def check(self, config: Any, describe: Callable[[Any, Any], Any]) -> Checkpoint:
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
        return Checkpoint(
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


class _Loading:
    """Parameters that are being filled."""

    def __init__(self, description: Any, shardings: Any) -> None:
        self._treedef = jax.tree.structure(description)
        self._params = _by_path(description)
        places = [None] * len(self._params)
        if shardings is not None:
            places = self._treedef.flatten_up_to(shardings)
        self._shardings = dict(zip(self._params, places, strict=True))
        self._missing = {leaf: math.prod(p.shape) for leaf, p in self._params.items()}
        self._buffers: dict[str, np.ndarray] = {}
        self._arrays: dict[str, jax.Array] = {}
        self.placing_seconds = 0.0

    def fill(self, shard: Shard, reader: ShardReader, tensor: Tensor, expected: Expected) -> None:
        """Reads one tensor into its place."""
        if expected.value is not None:
            _check_value(shard, tensor, _raw(reader, tensor), expected.value)
            return
        targets = [(part, self._region(part)) for part in expected.parts]
        part, region = targets[0]
        dtype = DTYPES[tensor.dtype]
        # Codes are bytes in the weights and int32 words in the file: the same bytes.
        if part.verbatim and (dtype == region.dtype or region.dtype == np.uint8):
            reader.read(tensor, region)
            _check_finite(shard, tensor, region)
        else:
            raw = _raw(reader, tensor)
            _check_finite(shard, tensor, raw)
            for part, region in targets:
                values = raw.reshape(part.view or region.shape)[part.select]
                region[...] = values if part.axes is None else values.transpose(part.axes)
        for part, region in targets:
            self._missing[part.leaf] -= region.size
            if not self._missing[part.leaf]:
                self._place(part.leaf)

    def finish(self) -> Any:
        """The tree of arrays."""
        assert set(self._arrays) == set(self._params), set(self._params) - set(self._arrays)
        return jax.tree.unflatten(self._treedef, [self._arrays[leaf] for leaf in self._params])

    def _region(self, part: Part) -> np.ndarray:
        if part.leaf not in self._buffers:
            assert part.leaf not in self._arrays, part.leaf
            self._buffers[part.leaf] = _aligned(self._params[part.leaf])
        return self._buffers[part.leaf][part.index]

    def _place(self, leaf: str) -> None:
        start = time.monotonic()
        buffer, sharding = self._buffers.pop(leaf), self._shardings[leaf]
        if sharding is None:
            array = jax.device_put(buffer)
        else:
            # Not device_put: in several processes that would compare the values of all of them.
            array = jax.make_array_from_callback(buffer.shape, sharding, buffer.__getitem__)
        # Wait, or buffers of parameters in transfer would pile up.
        self._arrays[leaf] = jax.block_until_ready(array)
        self.placing_seconds += time.monotonic() - start


def _by_path(tree: Any) -> dict[str, Param]:
    """Leaves by path, e.g. "layers.1.mlp.router", in the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): p for path, p in leaves}


def _aligned(param: Param) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which JAX on a CPU adopts without a copy."""
    nbytes = math.prod(param.shape) * param.dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(param.dtype).reshape(param.shape)


def _raw(reader: ShardReader, tensor: Tensor) -> np.ndarray:
    values = np.empty(tensor.shape, DTYPES[tensor.dtype])
    reader.read(tensor, values)
    return values


def _check_value(
    shard: Shard, tensor: Tensor, found: np.ndarray, expected: tuple[int, ...]
) -> None:
    if tuple(found.tolist()) != expected:
        raise CheckpointError(
            f"{shard.path}: {tensor.name!r} says {found.tolist()}, expected {list(expected)}; do"
            " config.json and the shards belong together?"
        )


def _check_finite(shard: Shard, tensor: Tensor, values: np.ndarray) -> None:
    flat = values.reshape(-1)
    if flat.dtype == DTYPES["BF16"]:
        # On the bits, several times faster than converting: without the sign, infinity is 0x7F80
        # and NaN is above it.
        bits = flat.view(np.uint16)
        finite = all(
            (bits[i : i + _CHUNK] << np.uint16(1)).max() < 0xFF00
            for i in range(0, flat.size, _CHUNK)
        )
    elif flat.dtype == np.float32:
        finite = bool(np.isfinite(flat).all())
    else:
        return
    if not finite:
        bad = int(np.flatnonzero(~np.isfinite(flat.astype(np.float32)))[0])
        where = [int(i) for i in np.unravel_index(bad, tensor.shape)]
        raise CheckpointError(
            f"{shard.path}: {tensor.name!r} holds {float(flat[bad])} at {where}; expected finite"
            " values: the file is damaged, download it again"
        )
