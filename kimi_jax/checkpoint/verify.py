"""Proves a converted folder: every published tensor is rebuilt from it, hashed, and compared.

The hashes to compare with were taken while the source was read. With the source at hand it is read
again too, so that the two are compared as they are now.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kimi_jax.checkpoint import converted, layout, manifest, names
from kimi_jax.checkpoint.converted import ConvertedCheckpoint
from kimi_jax.checkpoint.finite import check_finite
from kimi_jax.checkpoint.hf import PublishedCheckpoint
from kimi_jax.checkpoint.job import travelling
from kimi_jax.checkpoint.layout import Stored
from kimi_jax.checkpoint.names import Expected
from kimi_jax.checkpoint.place import Box, aligned, whole
from kimi_jax.checkpoint.shards import DTYPES, CheckpointError, Shard
from kimi_jax.config import ModelConfig

_BLOCK = 16 << 20  # bytes of a file hashed at a time


@dataclass(kw_only=True)
class Verdict:
    """What verifying found, and what it cost."""

    faults: list[str] = field(default_factory=list)
    damaged: set[Path] = field(default_factory=set)  # folders of the output
    tensors: int = 0  # rebuilt from the output and compared
    output_bytes: int = 0
    output_seconds: float = 0.0
    source_tensors: int = 0  # read from the source and compared
    source_bytes: int = 0
    source_seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.faults

    def add(self, other: Verdict) -> None:
        self.faults += other.faults
        self.damaged |= other.damaged
        for name in ("tensors", "output_bytes", "output_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("source_tensors", "source_bytes", "source_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def lines(self, limit: int = 20) -> list[str]:
        """For people: faults first."""

        def cost(nbytes: int, seconds: float) -> str:
            rate = nbytes / 1e6 / seconds if seconds else 0.0
            return f"{nbytes / 1e6:,.0f} MB in {seconds:.1f} s, {rate:,.0f} MB/s"

        lines = [f"FAULT   {fault}" for fault in self.faults[:limit]]
        if len(self.faults) > limit:
            lines.append(f"FAULT   and {len(self.faults) - limit} more")
        cost_of_output = cost(self.output_bytes, self.output_seconds)
        lines.append(f"output  {self.tensors:,} tensors rebuilt and compared: {cost_of_output}")
        if self.source_bytes:
            cost_of_source = cost(self.source_bytes, self.source_seconds)
            lines.append(f"source  {self.source_tensors:,} tensors compared: {cost_of_source}")
        lines.append("equal" if self.good else f"NOT EQUAL: {len(self.faults)} faults")
        if self.damaged:
            lines += ["to make what is damaged again, delete it and run the same conversion again:"]
            lines += [f"  {path}" for path in sorted(self.damaged)]
        return lines


type Listener = Callable[[str, str, str], Any]
"""Called with a tensor's name and its two sha256: the source's and the output's."""


def verify(
    output: ConvertedCheckpoint,
    source: PublishedCheckpoint | None = None,
    *,
    progress: bool = True,
    listener: Listener | None = None,
) -> Verdict:
    """Compares every tensor.

    Args:
        output: the opened conversion; opening has found what is missing or truncated.
        source: the published folder, if it is to be read again.
        progress: whether to show progress bars on stderr.
        listener: is told every pair of hashes.

    Returns:
        a verdict with every fault, by the tensor's name.
    """
    verdict = Verdict(faults=_small_files(output))
    if isinstance(output.config, ModelConfig) and (fault := converted.drafter_fault(output)):
        verdict.faults.append(fault)
    records = _records(output, verdict)
    start = time.monotonic()
    with _bar(output.bytes_used, f"verifying {output.folder.name}", progress) as bar:
        for record in records:
            before = len(verdict.faults)
            _verify_item(output, record, verdict, bar.update, listener)
            if len(verdict.faults) > before:
                verdict.damaged.add(layout.item_folder(output.folder, record["item"]))
    verdict.output_bytes = output.bytes_used
    verdict.output_seconds = time.monotonic() - start
    if source is not None:
        start = time.monotonic()
        _verify_source(output, source, records, verdict, progress)
        verdict.source_seconds = time.monotonic() - start
    return verdict


def _small_files(output: ConvertedCheckpoint) -> list[str]:
    faults = []
    for name, sha256 in output.manifest["files"].items():
        path = output.folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif manifest.file_sha256(path) != sha256:
            faults.append(f"{name} is not as it was in the source")
    return faults


def _small_files_of_source(output: ConvertedCheckpoint, source: PublishedCheckpoint) -> list[str]:
    then = output.manifest["files"]
    now = {path.name: manifest.file_sha256(path) for path in travelling(source.folder)}
    remedy = "convert again"
    if now.get("config.json") != output.manifest["source"]["config_sha256"]:
        remedy += ", into another folder"  # of this one it would be refused
    return [
        f"{name} in {source.folder} "
        + ("is not what was converted" if name in now else "is missing")
        + f"; {remedy}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]


def _records(output: ConvertedCheckpoint, verdict: Verdict) -> list[dict[str, Any]]:
    records = []
    for item, entry in output.manifest["items"].items():
        path = layout.item_folder(output.folder, item) / layout.RECORD
        try:
            record = manifest.read_sealed(path)
        except CheckpointError as error:
            verdict.faults.append(str(error))
            verdict.damaged.add(path.parent)
            continue
        if record["sha256"] != entry["record_sha256"] or record["item"] != item:
            where = path.relative_to(output.folder)
            verdict.faults.append(f"{where} is not the manifest's: swapped?")
            verdict.damaged.add(path.parent)
        else:
            records.append(record)
    return records


def _table(output: ConvertedCheckpoint) -> tuple[Mapping[str, Expected], str]:
    if isinstance(output.config, ModelConfig):
        return names.model_tensors(output.config), names.MODEL_PREFIX
    return names.drafter_tensors(output.config), names.DRAFTER_PREFIX


def _verify_item(
    output: ConvertedCheckpoint,
    record: Mapping[str, Any],
    verdict: Verdict,
    advance: Callable[[int], Any],
    listener: Listener | None,
) -> None:
    """Rebuilds the item's tensors and compares them with its record."""
    table, prefix = _table(output)
    recorded = {
        name: sha for tensors in record["tensors"].values() for name, sha in tensors.items()
    }
    owner = {sha: name for name, sha in recorded.items()}
    expected = {name: table[name.removeprefix(prefix)] for name in recorded}
    folder = layout.item_folder(output.folder, record["item"])
    leaves = {path: leaf for path, leaf in output.stored.items() if leaf.item == record["item"]}
    found: dict[str, str] = {}
    try:
        for name, sha256 in _rebuilt(leaves, expected, folder, verdict.faults, advance):
            found[name] = sha256
    except CheckpointError as error:
        verdict.faults.append(str(error))
    for name, sha256 in recorded.items():
        if name not in found:
            verdict.faults.append(f"{name}: could not be rebuilt from {record['item']}")
            continue
        verdict.tensors += 1
        if listener is not None:
            listener(name, sha256, found[name])
        if found[name] != sha256:
            there = owner.get(found[name])
            where = ", ".join(sorted({part.leaf for part in expected[name].parts}))
            hint = f"; it is {there}: swapped?" if there else ""
            verdict.faults.append(
                f"{name}: what {where} holds is not what was read from the source"
                f" (sha256 {found[name][:16]}... instead of {sha256[:16]}...){hint}"
            )


def _rebuilt(
    leaves: Mapping[str, Stored],
    expected: Mapping[str, Expected],
    folder: Path,
    faults: list[str],
    advance: Callable[[int], Any],
) -> Iterator[tuple[str, str]]:
    """(name, sha256) of every tensor of an item, from its arrays.

    Most tensors are a run of bytes of one array: those are hashed as the array streams by. The few
    that were rearranged are put together from whole arrays.
    """
    context = converted.context()
    runs: dict[str, list[tuple[int, int, str]]] = {path: [] for path in leaves}
    rearranged = []
    for name, entry in expected.items():
        if len(entry.parts) == 1 and entry.parts[0].verbatim:
            [part] = entry.parts
            leaf = leaves[part.leaf]
            start = part.start(leaf.shape) * leaf.dtype.itemsize
            size = math.prod(entry.shape) * DTYPES[entry.dtypes[0]].itemsize
            runs[part.leaf].append((start, start + size, name))
        else:
            rearranged.append(name)
    with ThreadPoolExecutor(converted.WORKERS) as pool:
        for path, parts in runs.items():
            if parts:
                blocks = _blocks(leaves[path], folder, context, advance)
                yield from _hash_runs(sorted(parts), blocks, expected, folder, faults, pool)
    whole_leaf: dict[str, np.ndarray] = {}
    for name in rearranged:
        entry = expected[name]
        tensor = np.empty(entry.shape, DTYPES[entry.dtypes[0]])
        for part in entry.parts:
            if part.leaf not in whole_leaf:
                [(_, whole_leaf[part.leaf])] = _blocks(
                    leaves[part.leaf], folder, context, advance, at_once=True
                )
            part.put_back(whole_leaf[part.leaf][part.index], tensor)
        _note_if_not_finite(folder, name, tensor, tensor.shape, 0, faults)
        yield name, hashlib.sha256(tensor.reshape(-1).view(np.uint8)).hexdigest()


def _hash_runs(
    runs: list[tuple[int, int, str]],
    blocks: Iterable[tuple[int, np.ndarray]],
    expected: Mapping[str, Expected],
    folder: Path,
    faults: list[str],
    pool: ThreadPoolExecutor,
) -> Iterator[tuple[str, str]]:
    """Hashes runs of bytes of an array, of which consecutive blocks come in."""
    begun: dict[str, Any] = {}  # hashes of runs that no block holds all of

    def update(run: tuple[int, int, str], at: int, block: np.ndarray) -> str | None:
        start, stop, name = run
        values = block[max(start - at, 0) : stop - at]
        dtype = DTYPES[expected[name].dtypes[0]]
        skip = max(at - start, 0)
        _note_if_not_finite(folder, name, values.view(dtype), expected[name].shape, skip, faults)
        hasher = begun.setdefault(name, hashlib.sha256())
        hasher.update(values)
        return begun.pop(name).hexdigest() if stop <= at + block.nbytes else None

    for at, array in blocks:
        block = array.reshape(-1).view(np.uint8)
        here = [run for run in runs if run[0] < at + block.nbytes and run[1] > at]
        done = pool.map(lambda run, at=at, block=block: update(run, at, block), here)
        for (_, _, name), sha256 in zip(here, done, strict=True):
            if sha256 is not None:
                yield name, sha256


def _blocks(
    leaf: Stored,
    folder: Path,
    context: Any,
    advance: Callable[[int], Any],
    at_once: bool = False,
) -> Iterator[tuple[int, np.ndarray]]:
    """(position in bytes, values) of an array, a row of chunks at a time; reads one ahead."""
    store = converted.open_array(leaf, folder, context)
    step = leaf.shape[0] if at_once else leaf.chunk[0]
    rest = whole(leaf.shape)[1:]
    boxes: list[Box] = [((i, i + step), *rest) for i in range(0, leaf.shape[0], step)]

    def begin(box: Box) -> tuple[np.ndarray, Any]:
        values = aligned(tuple(stop - start for start, stop in box), leaf.dtype)
        return values, converted.read_into(store, box, values)

    coming = begin(boxes[0])
    position = 0
    for following in [*boxes[1:], None]:
        values, future = coming
        converted.wait_for(future, leaf, folder)
        if following is not None:
            coming = begin(following)
        advance(values.nbytes)
        yield position, values
        position += values.nbytes


def _note_if_not_finite(
    folder: Path,
    name: str,
    values: np.ndarray,
    shape: tuple[int, ...],
    skip: int,
    faults: list[str],
) -> None:
    try:
        check_finite(folder, name, values, shape, skip)
    except CheckpointError as error:
        faults.append(str(error))


def _verify_source(
    output: ConvertedCheckpoint,
    source: PublishedCheckpoint,
    records: list[dict[str, Any]],
    verdict: Verdict,
    progress: bool,
) -> None:
    """Reads the source again: files and tensors have to be those that were converted."""
    files = output.manifest["source"]["files"]
    recorded: dict[str, dict[str, str]] = {}
    for record in records:
        for shard, tensors in record["tensors"].items():
            recorded.setdefault(shard, {}).update(tensors)
    if set(files) != {shard.path.name for shard in source.shards}:
        verdict.faults.append(f"{source.folder} has other files than the source that was converted")
    verdict.faults += _small_files_of_source(output, source)
    total = sum(shard.path.stat().st_size for shard in source.shards)
    with _bar(total, f"verifying {source.folder.name}", progress) as bar:
        for shard in source.shards:
            tensors = recorded.get(shard.path.name, {})
            sha256, found = _hash_shard(shard, tensors, bar.update)
            verdict.source_tensors += len(found)
            name = shard.path.name
            wrong = [tensor for tensor, sha in tensors.items() if found.get(tensor) != sha]
            verdict.faults += [f"{tensor} in {name} is not what was converted" for tensor in wrong]
            if name in files and sha256 != files[name]["sha256"] and not wrong:
                verdict.faults.append(
                    f"{name} is not the file that was converted (sha256 {sha256[:16]}... instead"
                    f" of {files[name]['sha256'][:16]}...), though its tensors are the same"
                )
    verdict.source_bytes = total


def _hash_shard(
    shard: Shard, wanted: Iterable[str], advance: Callable[[int], Any]
) -> tuple[str, dict[str, str]]:
    """sha256 of a file and of its tensors, in one pass."""
    wanted = set(wanted)
    whole_file, found = hashlib.sha256(), {}
    begin = shard.tensors[0].start if shard.tensors else shard.path.stat().st_size
    segments = [(begin, None), *((t.nbytes, t.name) for t in shard.tensors)]
    with shard.path.open("rb") as file, ThreadPoolExecutor(1) as pool:
        for nbytes, name in segments:
            hasher = hashlib.sha256() if name in wanted else None
            while nbytes:
                block = file.read(min(nbytes, _BLOCK))
                if not block:
                    raise CheckpointError(f"{shard.path}: the file ended early; it was changed")
                pending = pool.submit(whole_file.update, block)
                if hasher is not None:
                    hasher.update(block)
                pending.result()
                nbytes -= len(block)
                advance(len(block))
            if hasher is not None and name is not None:
                found[name] = hasher.hexdigest()
    return whole_file.hexdigest(), found


def _bar(total: int, title: str, progress: bool) -> Any:
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=not progress)
