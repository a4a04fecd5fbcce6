"""Converts a published folder: each shard read once, in order, each byte hashed on its way.

A pipeline with bounded queues between its threads:

    reader           file -> straight into its place in a parameter (an expert in its stack)
    file hasher      sha256 of each shard, as `sha256sum` would print it
    tensor hasher    sha256 of each tensor, the check for NaN, the few matrices that are rearranged
    writer           complete slabs (rows of chunks) -> files; complete items -> sealed, in place

An item (a layer) is made under `.conversion/`, with everything in it on disk before it is renamed
to its place; `manifest.json` comes last. So whenever the process is killed, what lies in place is
whole, and the next run makes only what is not. The lock is the kernel's: it goes with the process.

The items are Orbax checkpoints (`orbax_item.py`).
"""

from __future__ import annotations

import collections
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kimi_jax.checkpoint import converted, layout, orbax_item
from kimi_jax.checkpoint.finite import check_finite
from kimi_jax.checkpoint.hf import PublishedCheckpoint, check_value
from kimi_jax.checkpoint.job import Job, check_drafter_given, claimed
from kimi_jax.checkpoint.layout import Stored
from kimi_jax.checkpoint.shards import DTYPES, CheckpointError, Shard, Tensor

RUN = 16 << 20
"""Bytes that are read and hashed at a time."""
RUN_PARTS = 512  # tensors in a run at most; a system call takes 1024
SEAL = 256 << 20
"""Bytes of complete items that are put in place together: each time waits for the disk."""
QUEUE = 4  # runs that wait for a hasher
WORKERS = min(4, os.cpu_count() or 1)
"""Threads that write chunks; each holds a chunk."""


@dataclass(kw_only=True)
class Report:
    """What a conversion did, and where the time went. The phases run side by side."""

    bytes_read: int = 0
    bytes_written: int = 0
    items_made: int = 0
    items_kept: int = 0  # proven by an earlier run
    read_seconds: float = 0.0
    hash_seconds: float = 0.0  # of the slower of the two hashers
    write_seconds: float = 0.0  # onto the disk, not into its cache
    total_seconds: float = 0.0

    def add(self, other: Report) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def lines(self) -> list[str]:
        """For people."""

        def phase(nbytes: int, seconds: float) -> str:
            rate = nbytes / 1e6 / seconds if seconds else 0.0
            return f"{nbytes / 1e6:,.0f} MB in {seconds:.1f} s, {rate:,.0f} MB/s"

        return [
            f"items   {self.items_made} made, {self.items_kept} kept from before",
            f"read    {phase(self.bytes_read, self.read_seconds)}",
            f"hash    {phase(self.bytes_read, self.hash_seconds)} (files and tensors)",
            f"write   {phase(self.bytes_written, self.write_seconds)}",
            f"in all  {phase(self.bytes_read, self.total_seconds)}; the phases run side by side",
        ]


def convert(
    source: PublishedCheckpoint,
    output: Path,
    *,
    drafter: PublishedCheckpoint | None = None,
    progress: bool = True,
) -> Report:
    """Makes `output` a whole conversion of `source`, with `drafter` inside it.

    What an earlier run left there, and its records prove, is kept. A drafter can be added to a
    folder that was converted without one.

    Args:
        source: the opened target.
        output: a folder that is empty, not there, or from an earlier conversion of this source.
        drafter: the opened drafter for it.
        progress: whether to show a progress bar on stderr.

    Raises:
        CheckpointError: the folder holds something else; another conversion is at work in it; the
            source holds NaN, is not what its hub's hashes say, or changes meanwhile.
    """
    start = time.monotonic()
    report = Report()
    output = Path(output)
    with claimed(output):
        if drafter is None:
            check_drafter_given(output)
        jobs = [Job.open(source, output, kind="model")]
        if drafter is not None:
            jobs.append(Job.open(drafter, output / layout.DRAFTER, kind="drafter"))
        report.items_kept = sum(len(job.proven) for job in jobs)
        inside = converted.drafter_inside(output)
        if jobs[0].drafter_named != inside or not all(job.is_whole for job in jobs[1:]):
            jobs[0].seal = None  # the whole's manifest names the drafter
        for job in jobs:
            if not job.is_whole:
                job.begin()
        with tqdm(
            total=sum(job.bytes_to_read for job in jobs),
            desc=f"converting {source.folder.name}",
            unit="B",
            unit_scale=True,
            disable=not progress,
        ) as bar:
            for job in reversed(jobs):  # the whole's manifest comes last
                if not job.is_whole:
                    report.add(_Pipeline(job, bar.update).run())
                    job.finish()
        for job in jobs:
            job.clean()
    report.total_seconds = time.monotonic() - start
    return report


def host_bytes(job: Job) -> int:
    """Most memory that the job takes beyond the program itself."""
    loose = [
        tensor.nbytes
        for shard in job.source.shards
        for tensor in shard.tensors
        if (expected := job.source.expected.get(tensor.name))
        and not all(part.verbatim for part in expected.parts)
    ]
    chunk = max(leaf.chunk_bytes for leaf in job.stored.values())
    runs = (2 * QUEUE + 3) * RUN
    return job.buffer_limit + max(loose, default=0) + WORKERS * chunk + runs


@dataclass(kw_only=True, eq=False)
class _Open:
    """A slab of a parameter that is being filled."""

    leaf: Stored
    slab: int
    item: _Item
    buffer: np.ndarray  # uint8
    unhashed: int  # bytes that the tensor hasher has not seen
    references: int = 0  # runs with parts of it that the file hasher has not seen
    leaving: bool = False  # handed to the writer

    @property
    def values(self) -> np.ndarray:
        return self.buffer.view(self.leaf.dtype).reshape(self.leaf.slab_shape)


@dataclass(kw_only=True, eq=False)
class _Item:
    """An item that is being made."""

    name: str
    folder: Path  # where it is made
    pending: int  # slabs not yet written, and tensors not yet compared with the configuration
    tensors: dict[str, dict[str, str]] = field(default_factory=dict)  # shard -> tensor -> sha256
    checked: int = 0  # tensors that were compared with the configuration and are not stored


@dataclass(kw_only=True, eq=False, slots=True)
class _Bytes:
    """Some bytes of a file, in memory: a tensor or a part of it, or what is only hashed."""

    view: np.ndarray  # uint8
    shard: Shard
    tensor: Tensor | None = None  # None: of interest to the file's hash only
    skip: int = 0  # bytes of the tensor before these
    last: bool = True  # whether the tensor ends with them
    direct: _Open | None = None  # they lie in this slab
    raw: np.ndarray | None = None  # they lie in this tensor, which is yet to be rearranged


@dataclass(kw_only=True, eq=False)
class _Run:
    """Neighbouring bytes of a file."""

    parts: list[_Bytes] = field(default_factory=list)
    nbytes: int = 0


class _Pipeline:
    """Makes the items of a job that are not proven."""

    def __init__(self, job: Job, advance: Callable[[int], Any]) -> None:
        self._job = job
        self._advance = advance
        self._report = Report()
        self._lock = threading.Lock()
        self._failure = _Failure()
        self._pool = _Pool(job.buffer_limit, self._failure)
        self._open: dict[tuple[str, int], _Open] = {}
        self._items = {
            name: _Item(
                name=name,
                folder=job.making(name),
                pending=sum(leaf.slabs for leaf in leaves) + job.checks.get(name, 0),
            )
            for name, leaves in job.to_make.items()
        }
        self._writer = _Stage("write", self._write, self._failure, maxsize=0)
        self._tensor_hasher = _Stage("hash tensors", self._hash_tensors, self._failure, QUEUE)
        self._file_hasher = _Stage("hash files", self._hash_file, self._failure, QUEUE)
        self._complete_items: list[str] = []
        self._file_hash = hashlib.sha256()
        self._tensor_hash = hashlib.sha256()
        self._chunks = orbax_item.ChunkWriter(WORKERS)

    def run(self) -> Report:
        """Reads what is to be read; returns when everything made is in place."""
        stages = [self._file_hasher, self._tensor_hasher, self._writer]
        for stage in stages:
            stage.start()
        try:
            for shard in self._job.shards_to_read:
                self._read(shard)
        except BaseException as error:
            self._failure.set(error)
        for stage in stages:
            stage.finish()
        self._chunks.close()
        self._pool.clear()
        self._failure.check()
        with _timed(self._writer):
            self._seal()
        assert not self._items, list(self._items)
        report = self._report
        report.hash_seconds = max(self._file_hasher.seconds, self._tensor_hasher.seconds)
        report.write_seconds = self._writer.seconds
        return report

    # The reader

    def _read(self, shard: Shard) -> None:
        """Reads a shard, all of it if its hash is still to be known, forwards and once."""
        hashed = self._job.needs_hash(shard)
        self._job.check_unchanged(shard)
        run, at = _Run(), 0
        with shard.path.open("rb", buffering=0) as file:

            def send() -> None:
                nonlocal run, at
                self._fill(file.fileno(), shard, run, at)
                at += run.nbytes
                for part in run.parts if hashed else ():
                    if part.direct:
                        with self._lock:
                            part.direct.references += 1
                if hashed:
                    self._file_hasher.put(run)
                self._tensor_hasher.put(run)
                run = _Run()

            for start, part in self._parts(shard, hashed, before_waiting=send):
                if start != at + run.nbytes:
                    send()
                    at = start
                run.parts.append(part)
                run.nbytes += part.view.nbytes
                if run.nbytes >= RUN or len(run.parts) >= RUN_PARTS:
                    send()
            send()
        self._job.check_unchanged(shard)
        if hashed:
            self._file_hasher.put(shard)

    def _parts(
        self, shard: Shard, hashed: bool, before_waiting: Callable[[], None]
    ) -> Iterator[tuple[int, _Bytes]]:
        """(position in the file, memory for what lies there) for all that is to be read."""
        begin = shard.tensors[0].start if shard.tensors else shard.path.stat().st_size
        segments: list[tuple[int, int, Tensor | None]] = [(0, begin, None)] if hashed else []
        for tensor in shard.tensors:
            wanted = self._job.item_of(tensor) in self._job.to_make
            if wanted or hashed:
                segments.append((tensor.start, tensor.nbytes, tensor if wanted else None))
        for start, nbytes, tensor in segments:
            skip = 0
            for view, direct, raw in self._memory(nbytes, tensor, before_waiting):
                for at in range(0, max(view.nbytes, 1), RUN):
                    piece = view[at : at + RUN]
                    yield (
                        start + skip,
                        _Bytes(
                            view=piece,
                            shard=shard,
                            tensor=tensor,
                            skip=skip,
                            last=skip + piece.nbytes == nbytes,
                            direct=direct,
                            raw=raw,
                        ),
                    )
                    skip += piece.nbytes

    def _memory(
        self, nbytes: int, tensor: Tensor | None, before_waiting: Callable[[], None]
    ) -> Iterator[tuple[np.ndarray, _Open | None, np.ndarray | None]]:
        """Where bytes of a file are read to: (memory, the slab that it is in, or a loose tensor).

        Slabs are opened one by one, as they are reached.
        """
        if tensor is None:
            for at in range(0, max(nbytes, 1), RUN):
                yield np.empty(min(RUN, nbytes - at), np.uint8), None, None
            return
        stretches = self._job.stretches(tensor)
        for stretch in stretches:
            opened = self._opened(stretch.path, stretch.slab, before_waiting)
            yield opened.buffer[stretch.skip : stretch.skip + stretch.size], opened, None
        if not stretches:
            for part in self._job.source.expected[tensor.name].parts:
                for slab in range(self._job.stored[part.leaf].slabs):
                    self._opened(part.leaf, slab, before_waiting)
            raw = np.empty(tensor.shape, DTYPES[tensor.dtype])
            yield raw.reshape(-1).view(np.uint8), None, raw

    def _opened(self, path: str, slab: int, before_waiting: Callable[[], None]) -> _Open:
        if (path, slab) not in self._open:
            leaf = self._job.stored[path]
            self._open[path, slab] = _Open(
                leaf=leaf,
                slab=slab,
                item=self._items[leaf.item],
                buffer=self._pool.take(leaf.slab_bytes, before_waiting),
                unhashed=leaf.slab_bytes,
            )
        return self._open[path, slab]

    def _fill(self, descriptor: int, shard: Shard, run: _Run, at: int) -> None:
        self._failure.check()
        start = time.monotonic()
        views = collections.deque(part.view for part in run.parts if part.view.nbytes)
        while views:
            with layout.naming(shard.path):
                count = os.preadv(descriptor, views, at)
            if not count:
                raise CheckpointError(
                    f"{shard.path}: the file ended at byte {at}; it has been changed since its"
                    " header was read"
                )
            at += count
            self._advance(count)
            self._report.bytes_read += count
            while views and count >= views[0].nbytes:
                count -= views.popleft().nbytes
            if count:
                views[0] = views[0][count:]
        self._report.read_seconds += time.monotonic() - start

    # The hashers

    def _hash_file(self, work: _Run | Shard) -> None:
        if isinstance(work, Shard):
            self._job.record_hash(work, self._file_hash.hexdigest())
            self._file_hash = hashlib.sha256()
            return
        for part in work.parts:
            self._file_hash.update(part.view)
        for part in work.parts:
            if part.direct:
                with self._lock:
                    part.direct.references -= 1
                    self._leave_if_complete(part.direct)

    def _hash_tensors(self, run: _Run) -> None:
        for part in run.parts:
            if part.tensor is not None:
                self._hash_tensor(part, part.tensor)

    def _hash_tensor(self, part: _Bytes, tensor: Tensor) -> None:
        name = self._job.item_of(tensor)
        assert name is not None, tensor
        item = self._items[name]
        expected = self._job.source.expected[tensor.name]
        path = part.shard.path
        if expected.value is not None:
            assert part.raw is not None
            check_value(path, tensor, part.raw, expected.value)
            item.checked += 1
            if self._one_done(item):
                self._writer.put(item)
            return
        if not part.skip:
            self._tensor_hash = hashlib.sha256()
        self._tensor_hash.update(part.view)
        if part.last:
            hashes = item.tensors.setdefault(path.name, {})
            hashes[tensor.name] = self._tensor_hash.hexdigest()
        if part.direct:
            # Codes are bytes in the weights and words in the file; neither can be NaN.
            values = part.view.view(part.direct.leaf.dtype)
            check_finite(path, tensor.name, values, tensor.shape, part.skip)
            with self._lock:
                part.direct.unhashed -= part.view.nbytes
                self._leave_if_complete(part.direct)
        elif part.last:
            assert part.raw is not None
            check_finite(path, tensor.name, part.raw, tensor.shape)
            for target in expected.parts:
                assert not target.index, target  # it is all of the parameter
                leaf = self._job.stored[target.leaf]
                values = target.taken_from(part.raw, leaf.shape)
                for slab in range(leaf.slabs):
                    opened = self._open[target.leaf, slab]
                    opened.values[...] = values[slab * leaf.chunk[0] : (slab + 1) * leaf.chunk[0]]
                    with self._lock:
                        opened.unhashed = 0
                        self._leave_if_complete(opened)

    def _leave_if_complete(self, opened: _Open) -> None:
        """Hands a slab to the writer once neither hasher needs it. Under the lock."""
        if not (opened.unhashed or opened.references or opened.leaving):
            opened.leaving = True
            self._writer.put(opened)

    def _one_done(self, item: _Item) -> bool:
        """Counts something that an item was waiting for; whether that was the last."""
        with self._lock:
            item.pending -= 1
            return not item.pending

    # The writer

    def _write(self, work: _Open | _Item) -> None:
        if isinstance(work, _Item):
            self._complete(work)
            return
        leaf = work.leaf
        self._chunks.write(leaf, work.slab, work.item.folder, work.values)
        self._report.bytes_written += leaf.slab_bytes
        del self._open[leaf.path, work.slab]
        self._pool.give(work.buffer)
        if self._one_done(work.item):
            self._complete(work.item)

    def _complete(self, item: _Item) -> None:
        """Everything of an item is written: it gets its record, and soon its place."""
        self._job.write_record(item.name, item.tensors, item.checked)
        self._complete_items.append(item.name)
        if sum(self._job.item_bytes(name) for name in self._complete_items) >= SEAL:
            self._seal()

    def _seal(self) -> None:
        self._job.put_in_place(self._complete_items)
        self._report.items_made += len(self._complete_items)
        for name in self._complete_items:
            del self._items[name]
        self._complete_items = []


class _Failure:
    """The first error of any thread."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.happened = threading.Event()

    def set(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self.happened.set()

    def check(self) -> None:
        """Raises it, if there is one."""
        if self._error is not None:
            raise self._error


class _Stage(threading.Thread):
    """A thread that works through a queue, in order; after a failure it only empties it."""

    def __init__(
        self, name: str, work: Callable[[Any], None], failure: _Failure, maxsize: int
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._failure = failure
        self._queue: queue.Queue[Any] = queue.Queue(maxsize)
        self.seconds = 0.0  # at work

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._failure.happened.is_set():
                continue
            with _timed(self):
                try:
                    self._work(item)
                except BaseException as error:
                    self._failure.set(error)
            del item

    def finish(self) -> None:
        """Returns when everything in the queue is done."""
        self._queue.put(None)
        self.join()


@contextmanager
def _timed(stage: _Stage) -> Iterator[None]:
    """Counts the time inside as the stage's work."""
    start = time.monotonic()
    try:
        yield
    finally:
        stage.seconds += time.monotonic() - start


class _Pool:
    """Memory for parameters, at most `limit` bytes; sizes repeat from layer to layer.

    Fresh memory costs more than the copy into it (the kernel clears it page by page), so buffers
    are used again.
    """

    def __init__(self, limit: int, failure: _Failure) -> None:
        self._limit = limit
        self._failure = failure
        self._held = 0
        self._free: dict[int, list[np.ndarray]] = {}
        self._returned = threading.Condition()

    def take(self, nbytes: int, before_waiting: Callable[[], None]) -> np.ndarray:
        """A buffer; waits until one is returned if there is no room.

        before_waiting: called once before; what is waited for may depend on it.
        """
        with self._returned:
            buffer = self._try(nbytes)
        if buffer is not None:
            return buffer
        before_waiting()
        with self._returned:
            while (buffer := self._try(nbytes)) is None:
                self._returned.wait(timeout=0.1)
                self._failure.check()
        return buffer

    def give(self, buffer: np.ndarray) -> None:
        """Takes a buffer back."""
        with self._returned:
            self._free.setdefault(buffer.nbytes, []).append(buffer)
            self._returned.notify()

    def clear(self) -> None:
        """Lets go of what was returned, now and not when a collector finds the time."""
        with self._returned:
            self._free.clear()

    def _try(self, nbytes: int) -> np.ndarray | None:
        if self._free.get(nbytes):
            return self._free[nbytes].pop()
        while self._held + nbytes > self._limit and (
            sizes := [n for n, b in self._free.items() if b]
        ):
            size = max(sizes)
            self._free[size].pop()
            self._held -= size
        if self._held and self._held + nbytes > self._limit:
            return None
        self._held += nbytes
        return np.empty(nbytes, np.uint8)
