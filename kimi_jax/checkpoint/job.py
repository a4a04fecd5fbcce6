"""The state of a conversion on disk: what is proven, what is to be made, and who is at work."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from kimi_jax.checkpoint import converted, hub, layout, manifest, orbax_item
from kimi_jax.checkpoint.hf import PublishedCheckpoint
from kimi_jax.checkpoint.layout import DRAFTER, MANIFEST, RECORD, WEIGHTS, WORK, Stored
from kimi_jax.checkpoint.shards import CheckpointError, Shard, Tensor

_TRAVELS = re.compile(r".*\.(json|model|jinja|txt|md)|LICENSE.*|NOTICE.*", re.IGNORECASE)
"""Top-level files of the source that go with the weights: configuration, tokenizer, template."""
_STAYS = re.compile(r".*\.index\.json|manifest\.json", re.IGNORECASE)

_SOURCE = "source.json"  # under WORK: the source as it was when the items were made
_SHARDS = "shards"  # under WORK: a file for each shard that was read to its end
_MAKING = "items"  # under WORK: items that are being made
_SKELETON = "skeleton"  # under WORK


def check_place(output: Path) -> None:
    """Refuses a place for a conversion that holds something else.

    Raises:
        CheckpointError: naming what is there.
    """
    for path in (output, *output.parents):
        if path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"{path} is a link to {path.readlink()}, which is not there; remove the link, or"
                " choose another folder"
            )
        if path.exists():
            if not path.is_dir():
                raise CheckpointError(f"{path} is a file; choose a folder for the conversion")
            break
    known = (MANIFEST, WORK, WEIGHTS)
    if output.is_dir() and not any((output / name).exists() for name in known):
        if others := sorted(path.name for path in output.iterdir()):
            raise CheckpointError(
                f"{output} is not empty and not a conversion (it holds {others[0]!r}); choose"
                " another folder"
            )


def check_drafter_given(output: Path) -> None:
    """Refuses to go on without the drafter that an interrupted conversion began with.

    Its half would stay, and make the folder one that does not load.

    Raises:
        CheckpointError: naming it.
    """
    begun = output / DRAFTER
    if converted.is_unfinished(begun):
        raise CheckpointError(
            f"{begun}: the conversion of a drafter was begun and not finished; give its --drafter"
            f" again, or delete {begun} for a conversion without one"
        )


def travelling(folder: Path) -> list[Path]:
    """A published folder's files that go with the weights."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and _TRAVELS.fullmatch(path.name) and not _STAYS.fullmatch(path.name)
    ]


@contextmanager
def claimed(output: Path) -> Iterator[None]:
    """Holds the lock of a conversion's folder, which the kernel releases with the process.

    Raises:
        CheckpointError: another process holds it, or the folder holds something else.
    """
    check_place(output)
    work = output / WORK
    path = work / "lock"
    while True:
        work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file since it was opened.
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"{output}: another conversion into this folder is at work; wait for it, or choose"
                " another folder"
            ) from error
        os.close(descriptor)
    try:
        yield
    finally:
        if converted.is_converted(output):
            path.unlink()
            with suppress(OSError):  # not empty: something is left to be resumed
                work.rmdir()
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class _ShardState:
    """A source file as headers and the file system show it."""

    size: int
    header_sha256: str
    mtime_ns: int

    @classmethod
    def of(cls, shard: Shard) -> _ShardState:
        status = shard.path.stat()
        with shard.path.open("rb") as file:
            first = file.read(8)
            header = first + file.read(int.from_bytes(first, "little"))
        return cls(
            size=status.st_size,
            header_sha256=hashlib.sha256(header).hexdigest(),
            mtime_ns=status.st_mtime_ns,
        )

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Bytes of a tensor that lie together in a slab of a parameter."""

    path: str
    slab: int
    skip: int  # bytes of the slab before them
    size: int


@dataclass(kw_only=True, eq=False)
class Job:
    """One checkpoint to convert: the target or its drafter."""

    source: PublishedCheckpoint
    output: Path
    kind: str  # "model" or "drafter"
    states: Mapping[str, _ShardState]  # of the source's files, by name
    config_sha256: str
    proven: set[str] = field(default_factory=set)  # items that need not be made
    hashes: dict[str, str] = field(default_factory=dict)  # sha256 of files read to their ends
    seal: str | None = None  # of a manifest that is still right

    @classmethod
    def open(cls, source: PublishedCheckpoint, output: Path, *, kind: str) -> Job:
        """Finds out what an earlier run left.

        Raises:
            CheckpointError: the folder holds a conversion of another source.
        """
        job = cls(
            source=source,
            output=output,
            kind=kind,
            states={shard.path.name: _ShardState.of(shard) for shard in source.shards},
            config_sha256=manifest.file_sha256(source.folder / "config.json"),
        )
        job._look_back()
        return job

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """How each parameter will be stored."""
        return layout.stored(self.source.describe(self.source.config, "bfloat16"))

    @cached_property
    def items(self) -> Mapping[str, list[Stored]]:
        return layout.by_item(self.stored.values())

    @cached_property
    def to_make(self) -> Mapping[str, list[Stored]]:
        """The items that are not proven, in their order."""
        return {item: leaves for item, leaves in self.items.items() if item not in self.proven}

    @cached_property
    def checks(self) -> Mapping[str, int]:
        """Tensors of each item that are compared with the configuration and not stored."""
        counts: dict[str, int] = {}
        for shard in self.source.shards:
            for tensor in shard.tensors:
                expected = self.source.expected.get(tensor.name)
                if expected is not None and expected.value is not None:
                    item = self.item_of(tensor)
                    assert item
                    counts[item] = counts.get(item, 0) + 1
        return counts

    def item_of(self, tensor: Tensor) -> str | None:
        """The item that a tensor belongs to; None for what a text engine leaves out."""
        expected = self.source.expected.get(tensor.name)
        if expected is None:
            return None
        if expected.parts:
            return self.stored[expected.parts[0].leaf].item
        number = re.search(r"\blayers\.(\d+)\.", tensor.name)
        return f"layers.{number[1]}" if number else "top"

    @cached_property
    def _items_of_shard(self) -> Mapping[str, set[str]]:
        return {
            shard.path.name: {item for t in shard.tensors if (item := self.item_of(t))}
            for shard in self.source.shards
        }

    @property
    def is_whole(self) -> bool:
        return self.seal is not None

    @property
    def shards_to_read(self) -> list[Shard]:
        return [
            shard
            for shard in self.source.shards
            if self.needs_hash(shard) or self._items_of_shard[shard.path.name] & set(self.to_make)
        ]

    @property
    def bytes_to_read(self) -> int:
        if self.is_whole:
            return 0
        return sum(
            self.states[shard.path.name].size
            if self.needs_hash(shard)
            else sum(t.nbytes for t in shard.tensors if self.item_of(t) in self.to_make)
            for shard in self.shards_to_read
        )

    @property
    def bytes_to_write(self) -> int:
        if self.is_whole:
            return 0
        return sum(leaf.nbytes for leaves in self.to_make.values() for leaf in leaves)

    def stretches(self, tensor: Tensor) -> list[Stretch]:
        """Where in slabs the bytes of a tensor go as they stand; none for one to be rearranged."""
        parts = self.source.expected[tensor.name].parts
        if len(parts) != 1 or not parts[0].verbatim:
            return []
        leaf = self.stored[parts[0].leaf]
        at = parts[0].start(leaf.shape) * leaf.dtype.itemsize
        stretches, left = [], tensor.nbytes
        while left:
            slab, skip = divmod(at, leaf.slab_bytes)
            size = min(left, leaf.slab_bytes - skip)
            stretches.append(Stretch(path=leaf.path, slab=slab, skip=skip, size=size))
            at, left = at + size, left - size
        return stretches

    @cached_property
    def buffer_limit(self) -> int:
        """Bytes of parameters in memory: what the order in the files needs, but at least two
        layers, so that one is read while the one before it is written."""
        largest = max(self.item_bytes(item) for item in self.items if item != "top")
        return max(self._bytes_open(), 2 * largest)

    def _bytes_open(self) -> int:
        """Most bytes of slabs that are begun and not complete, going through the files in order."""
        filled: dict[tuple[str, int], int] = {}
        now = peak = 0
        for shard in self.source.shards:
            for tensor in shard.tensors:
                expected = self.source.expected.get(tensor.name)
                if expected is None:
                    continue
                stretches = self.stretches(tensor)
                if not stretches:  # rearranged: its parameters come and go at once
                    sizes = {part.leaf: self.stored[part.leaf].nbytes for part in expected.parts}
                    peak = max(peak, now + sum(sizes.values()))
                for stretch in stretches:
                    key, size = (stretch.path, stretch.slab), self.stored[stretch.path].slab_bytes
                    now += size if key not in filled else 0
                    filled[key] = filled.get(key, 0) + stretch.size
                    peak = max(peak, now)
                    now -= size if filled[key] == size else 0
        return peak

    def needs_hash(self, shard: Shard) -> bool:
        """Whether the shard's sha256 is still to be computed, for which all of it is read."""
        return shard.path.name not in self.hashes

    # What an earlier run left

    def _look_back(self) -> None:
        before = self._earlier_source()
        if before is None:
            return
        self._compare(before)
        same = {
            name
            for name, state in self.states.items()
            if before["shards"][name]["mtime_ns"] == state.mtime_ns
        }
        self.hashes = {name: sha for name, sha in before["hashes"].items() if name in same}
        stale = {
            item
            for name, items in self._items_of_shard.items()
            if name not in same
            for item in items
        }
        self.proven = {item for item in self.items if item not in stale and self._is_proven(item)}
        if (
            before["seal"]
            and self.proven == set(self.items)
            and set(self.hashes) == set(self.states)
            and self._small_files_are(before["files"])
        ):
            self.seal = before["seal"]

    def _earlier_source(self) -> dict[str, Any] | None:
        """The source, the hashes and the seal that an earlier run left."""
        if converted.is_converted(self.output):
            data = converted.read_manifest(self.output)
            files = data["source"]["files"]
            times = data["times"]["mtime_ns"]
            return {
                "kind": data["kind"],
                "config_sha256": data["source"]["config_sha256"],
                "shards": {name: {**f, "mtime_ns": times[name]} for name, f in files.items()},
                "hashes": {name: entry["sha256"] for name, entry in files.items()},
                "files": data["files"],
                "seal": data["sha256"],
            }
        path = self.output / WORK / _SOURCE
        if not path.exists():
            return None
        data = manifest.read_sealed(path)
        hashes = {}
        for file in (self.output / WORK / _SHARDS).glob("*.json"):
            entry = manifest.read_sealed(file)
            hashes[entry["name"]] = entry["sha256_of_file"]
        return {**data, "hashes": hashes, "seal": None}

    def _compare(self, before: Mapping[str, Any]) -> None:
        """Refuses to go on with a conversion of another source."""

        def refuse(what: str) -> CheckpointError:
            return CheckpointError(
                f"{self.output} holds a conversion of another source ({what}); choose another"
                " folder, or delete this one"
            )

        if before["kind"] != self.kind:
            raise refuse(f"a {before['kind']}, not a {self.kind}")
        if before["config_sha256"] != self.config_sha256:
            raise refuse("config.json differs")
        if set(before["shards"]) != set(self.states):
            raise refuse("its safetensors files have other names")
        for name, state in self.states.items():
            entry = before["shards"][name]
            if (entry["size"], entry["header_sha256"]) != (state.size, state.header_sha256):
                raise refuse(f"{name} differs")

    def _small_files_are(self, files: Mapping[str, str]) -> bool:
        """Whether source and output hold the configuration, tokenizer, ... with these hashes."""
        here = [self.output / name for name in files]
        return (
            all(path.is_file() for path in here)
            and {path.name: manifest.file_sha256(path) for path in here} == files
            and {path.name: manifest.file_sha256(path) for path in self.travelling()} == files
        )

    def _is_proven(self, item: str) -> bool:
        """Whether an item lies in its place, with its record, and every chunk of its size."""
        folder = layout.item_folder(self.output, item)
        try:
            record = manifest.read_sealed(folder / RECORD)
        except CheckpointError:
            return False
        leaves = [leaf.to_json() for leaf in self.items[item]]
        if [record["leaves"].get(leaf.name) for leaf in self.items[item]] != leaves:
            return False
        return not converted.missing_chunks(self.output, self.items[item])

    # Making

    def begin(self) -> None:
        """Takes the manifest back and prepares the folder: only what is proven stays.

        In this order a kill at any point loses nothing that is proven and proves nothing that is
        stale: stale items go while the old journal, or manifest, still knows them as such.
        """
        work = self.output / WORK
        for item in self.to_make:
            shutil.rmtree(layout.item_folder(self.output, item), ignore_errors=True)
        for name in (_MAKING, _SKELETON):
            shutil.rmtree(work / name, ignore_errors=True)
        for folder in (work / _MAKING, work / _SHARDS, self.output / WEIGHTS):
            folder.mkdir(parents=True, exist_ok=True)
        for path in (work / _SHARDS).glob("*.json"):
            if path.name.removesuffix(".json") not in self.hashes:
                path.unlink()
        for name, sha256 in self.hashes.items():
            self._write_hash(name, sha256)
        manifest.write_sealed(
            work / _SOURCE,
            {
                "kind": self.kind,
                "config_sha256": self.config_sha256,
                "shards": {name: state.to_json() for name, state in self.states.items()},
                "items": list(self.items),
            },
        )
        self.seal = None
        (self.output / MANIFEST).unlink(missing_ok=True)
        for item, leaves in self.to_make.items():
            skeleton = self._skeleton(leaves)
            if not skeleton.exists():
                orbax_item.save_skeleton(skeleton, (leaf.name for leaf in leaves))
            self.making(item).mkdir()

    def making(self, item: str) -> Path:
        """Where an item is made."""
        return self.output / WORK / _MAKING / item

    def check_unchanged(self, shard: Shard) -> None:
        """Refuses a file that was changed since it was opened."""
        status, state = shard.path.stat(), self.states[shard.path.name]
        if (status.st_size, status.st_mtime_ns) != (state.size, state.mtime_ns):
            raise CheckpointError(
                f"{shard.path} was changed while it was being converted; run again when the"
                " download is complete"
            )

    def record_hash(self, shard: Shard, sha256: str) -> None:
        """Notes a file's hash once all of it was read, and compares it with the hub's.

        Raises:
            CheckpointError: the hub's hash is known here, and another.
        """
        expected = hub.expected_sha256(shard.path)
        if expected not in (None, sha256):
            raise CheckpointError(
                f"{shard.path}: its sha256 is {sha256}, but {expected} was downloaded; the file is"
                " damaged, download it again"
            )
        self.hashes[shard.path.name] = sha256
        self._write_hash(shard.path.name, sha256)

    def item_bytes(self, item: str) -> int:
        return sum(leaf.nbytes for leaf in self.items[item])

    def write_record(
        self, item: str, tensors: Mapping[str, Mapping[str, str]], checked: int
    ) -> None:
        """Makes an item complete, whose arrays are written."""
        folder, leaves = self.making(item), self.items[item]
        orbax_item.complete(self._skeleton(leaves), folder, leaves)
        manifest.write_sealed(
            folder / RECORD,
            {
                "item": item,
                "leaves": {leaf.name: leaf.to_json() for leaf in leaves},
                "tensors": {
                    shard: dict(sorted(hashes.items())) for shard, hashes in sorted(tensors.items())
                },
                "checked": checked,
            },
        )

    def put_in_place(self, items: Iterable[str]) -> None:
        """Renames complete items to their places, once the disk holds everything in them."""
        layout.sync_file_system(self.output)
        for item in items:
            os.rename(self.making(item), layout.item_folder(self.output, item))

    def finish(self) -> None:
        """Writes the manifest: from now on the folder is whole."""
        files = {path.name: manifest.file_sha256(self._copied(path)) for path in self.travelling()}
        items = {}
        for item in self.items:
            record = manifest.read_sealed(layout.item_folder(self.output, item) / RECORD)
            items[item] = {
                "leaves": record["leaves"],
                "tensors": sum(len(hashes) for hashes in record["tensors"].values()),
                "checked": record["checked"],
                "record_sha256": record["sha256"],
            }
        data = {
            "format": "kimi_jax",
            "version": manifest.VERSION,
            "kind": self.kind,
            "program": f"kimi-jax {metadata.version('kimi-jax')}",
            "source": {
                "name": self.source.folder.resolve().name,
                **hub.provenance(self.source.folder),
                "config_sha256": self.config_sha256,
                "files": {
                    name: {
                        "size": state.size,
                        "header_sha256": state.header_sha256,
                        "sha256": self.hashes[name],
                    }
                    for name, state in self.states.items()
                },
                "tensors": sum(len(shard.tensors) for shard in self.source.shards),
                "left_out": dict(self.source.skipped),
            },
            "files": files,
            "items": items,
            "drafter": converted.drafter_inside(self.output),
            "times": {
                "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "mtime_ns": {name: state.mtime_ns for name, state in self.states.items()},
            },
        }
        layout.sync_file_system(self.output)
        self.seal = manifest.write_sealed(self.output / MANIFEST, data)

    def clean(self) -> None:
        """Removes what only an unfinished conversion needs, but for a lock."""
        for name in (_SOURCE, _SHARDS, _MAKING, _SKELETON):
            path = self.output / WORK / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if self.kind == "drafter" and (self.output / WORK).is_dir():
            (self.output / WORK).rmdir()

    @property
    def drafter_named(self) -> str | None:
        """The drafter's seal in the manifest that is in place."""
        return converted.read_manifest(self.output)["drafter"] if self.is_whole else None

    def _skeleton(self, leaves: list[Stored]) -> Path:
        names = "\n".join(leaf.name for leaf in leaves)
        key = hashlib.sha256(names.encode()).hexdigest()[:16]
        return self.output / WORK / _SKELETON / key

    def _write_hash(self, name: str, sha256: str) -> None:
        path = self.output / WORK / _SHARDS / f"{name}.json"
        manifest.write_sealed(path, {"name": name, "sha256_of_file": sha256})

    def travelling(self) -> list[Path]:
        """The source's files that go with the weights."""
        return travelling(self.source.folder)

    def _copied(self, path: Path) -> Path:
        target = self.output / path.name
        with layout.naming(target):
            target.write_bytes(path.read_bytes())
        return target
