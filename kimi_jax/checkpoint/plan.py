"""What a conversion will read, write and need, from headers alone; and what the result needs."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kimi_jax.checkpoint import layout as folders
from kimi_jax.checkpoint.convert import host_bytes
from kimi_jax.checkpoint.hf import PublishedCheckpoint
from kimi_jax.checkpoint.job import Job, check_drafter_given, check_place
from kimi_jax.checkpoint.shards import CheckpointError
from kimi_jax.config import DrafterConfig, ModelConfig
from kimi_jax.engine.plan import DoesNotFit, Memory, size
from kimi_jax.engine.plan import make_plan as plan_memory
from kimi_jax.model import weights as model_weights
from kimi_jax.sharding.layout import SINGLE, Layout
from kimi_jax.sharding.traffic import EIGHT, abstract_layout
from kimi_jax.speculation import weights as drafter_weights

PROGRAM_BYTES = 1 << 30
"""Memory of the program itself and of 200,000 tensors' names, places and hashes."""

TOKENIZER = "tiktoken.model"

DISK_MARGIN = 1.01  # file system's own blocks, records, small files

CARDS = {"RTX PRO 6000": 95.6, "H200": 140.4, "B300": 268.2}
"""GiB of the cards that the presets are meant for."""
CARD_SHARE = 0.9
"""Share of a card's memory that the engine takes unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """A conversion, before anything is written."""

    source: PublishedCheckpoint
    drafter: PublishedCheckpoint | None
    output: Path
    jobs: tuple[Job, ...]
    disk_free: int
    memory_available: int | None

    @property
    def bytes_to_read(self) -> int:
        return sum(job.bytes_to_read for job in self.jobs)

    @property
    def bytes_to_write(self) -> int:
        return sum(job.bytes_to_write for job in self.jobs)

    @cached_property
    def host_bytes(self) -> int:
        """Peak memory of the converting process."""
        return PROGRAM_BYTES + max(map(host_bytes, self.jobs))

    def check(self) -> None:
        """Refuses what cannot work.

        Raises:
            CheckpointError: the disk or the memory is too small; with the numbers.
        """
        needed = math.ceil(DISK_MARGIN * self.bytes_to_write)
        if needed > self.disk_free:
            raise CheckpointError(
                f"{self.output}: the conversion takes {size(needed)} of disk, but"
                f" {size(self.disk_free)} are free; choose a folder on a larger disk"
            )
        if self.memory_available is not None and self.host_bytes > self.memory_available:
            raise CheckpointError(
                f"the conversion takes up to {size(self.host_bytes)} of memory, but"
                f" {size(self.memory_available)} are available; use a machine with more, or end"
                " other programs"
            )

    def lines(self) -> list[str]:
        """For people."""
        chunks = [leaf for job in self.jobs for leaf in job.stored.values()]
        largest = max(chunks, key=lambda leaf: leaf.chunk_bytes)
        kept = sum(len(job.proven) for job in self.jobs)
        total = sum(len(job.items) for job in self.jobs)
        available = self.memory_available
        travelling = [path.name for path in self.jobs[0].travelling()]
        lacking = "" if TOKENIZER in travelling else f"; no {TOKENIZER}, which text needs"
        return [
            f"source   {_described(self.source)}",
            f"drafter  {_described(self.drafter) if self.drafter else 'none'}",
            f"files    {', '.join(travelling)}{lacking}",
            f"output   {self.output}: {total} items, {kept} of them whole already",
            f"read     {size(self.bytes_to_read)}, each file once",
            f"write    {size(self.bytes_to_write)}; largest chunk {size(largest.chunk_bytes)}"
            f" ({largest.path})",
            f"disk     {size(self.disk_free)} free",
            f"memory   at most {size(self.host_bytes)}"
            + (f", {size(available)} available" if available is not None else ""),
            *device_lines(self.source.config, self.drafter.config if self.drafter else None),
        ]


def make_plan(
    source: PublishedCheckpoint, output: Path, drafter: PublishedCheckpoint | None
) -> ConversionPlan:
    """Looks at the source's headers, at what the output holds, and at this machine.

    Raises:
        CheckpointError: the output holds something else, or lies inside the source.
    """
    output = output.absolute()
    for folder in (source.folder, *([drafter.folder] if drafter else [])):
        inside = folder.resolve()
        if inside == output.resolve() or inside in output.resolve().parents:
            raise CheckpointError(
                f"{output} lies in the source folder {folder}; choose a folder outside it"
            )
    check_place(output)
    if drafter is None:
        check_drafter_given(output)
    jobs = [Job.open(source, output, kind="model")]
    if drafter is not None:
        jobs.append(Job.open(drafter, output / folders.DRAFTER, kind="drafter"))
    existing = next(path for path in (output, *output.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CheckpointError(f"{existing} cannot be written to; choose a folder that you may use")
    return ConversionPlan(
        source=source,
        drafter=drafter,
        output=output,
        jobs=tuple(jobs),
        disk_free=shutil.disk_usage(existing).free,
        memory_available=available_memory(),
    )


def device_lines(config: ModelConfig, drafter: DrafterConfig | None) -> Iterator[str]:
    """Weights on each device under each preset, and the longest context that then fits."""
    yield (
        f"on one device, or on each of eight, with {CARD_SHARE:.0%} of its memory used, in"
        " bfloat16:"
    )
    cards = "".join(f"{card:>16}" for card in CARDS)
    yield f"  {'preset':<16}{'weights':>11}  longest context on{cards}"
    layouts = {"single": SINGLE} | {name: abstract_layout(shape) for name, shape in EIGHT.items()}
    for preset, layout in layouts.items():
        try:
            layout = _holding(layout, config, drafter)
        except ValueError as error:  # something cannot be split evenly
            yield f"  {preset:<16} {error}"
            continue
        weights = layout.device_bytes(model_weights.describe(config, "bfloat16"))
        if drafter is not None:
            weights += layout.device_bytes(drafter_weights.describe(drafter, "bfloat16"))
        fits = (_fit(config, drafter, layout, gib) for gib in CARDS.values())
        yield f"  {preset:<16}{size(weights):>11}{'':<20}" + "".join(f"{fit:>16}" for fit in fits)


def _holding(layout: Layout, config: ModelConfig, drafter: DrafterConfig | None) -> Layout:
    """The layout, checked against the model; as the engine does, it leaves a drafter whole that
    cannot be split."""
    layout.specs(model_weights.describe(config, "bfloat16"))
    if drafter is not None:
        try:
            layout.specs(drafter_weights.describe(drafter, "bfloat16"))
        except ValueError:
            return replace(layout, whole_drafter=True)
    return layout


def _fit(config: ModelConfig, drafter: DrafterConfig | None, layout: Layout, gib: float) -> str:
    total = int(gib * 2**30)
    memory = Memory(device="", platform="gpu", total=total, usable=int(CARD_SHARE * total))
    try:
        plan = plan_memory(
            config, drafter, dtype="bfloat16", memory=memory, max_num_seqs=1, layout=layout
        )
    except DoesNotFit:
        return "does not fit"
    return f"{plan.largest_context} tokens"


def available_memory() -> int | None:
    """Bytes that can be had without swapping, in this machine or container; None if unknown."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((group / "memory.current").read_text(encoding="ascii"))
            found.append(int(limit) - used)
    except OSError:
        pass
    return min(found, default=None)


def _described(checkpoint: PublishedCheckpoint) -> str:
    tensors = sum(len(shard.tensors) for shard in checkpoint.shards)
    nbytes = sum(tensor.nbytes for shard in checkpoint.shards for tensor in shard.tensors)
    left_out = "".join(f", {n} {start}* left out" for start, n in checkpoint.skipped.items())
    return (
        f"{checkpoint.folder}: {tensors:,} tensors in {len(checkpoint.shards)} files,"
        f" {size(nbytes)}{left_out}"
    )
