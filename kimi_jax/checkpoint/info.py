"""What a folder is: published or converted, of what, and whether all of it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.checkpoint import converted, hf, layout, manifest
from kimi_jax.checkpoint.base import Checkpoint
from kimi_jax.checkpoint.hf import PublishedCheckpoint
from kimi_jax.checkpoint.shards import CheckpointError
from kimi_jax.config import DrafterConfig, ModelConfig
from kimi_jax.engine.plan import size


@dataclass(frozen=True, kw_only=True)
class Info:
    """A folder's nature and state."""

    kind: str  # "published", "converted", "unfinished conversion", "unknown"
    state: str  # "whole", "partial", "damaged"
    details: tuple[tuple[str, str], ...]

    def lines(self) -> list[str]:
        """For people."""
        rows = (("kind", self.kind), ("state", self.state), *self.details)
        return [f"{name:<12} {text}" for name, text in rows]


def inspect(folder: Path) -> Info:
    """Looks at a folder without reading weights. What is wrong with it is in the details."""
    if not folder.is_dir():
        return _bad("unknown", f"{folder} is not a folder")
    if converted.is_unfinished(folder):
        return _unfinished(folder)
    kind = "converted" if converted.is_converted(folder) else "published"
    has_weights = any(folder.glob("*.safetensors*"))
    if kind == "published" and not has_weights and not (folder / "config.json").exists():
        return _bad("unknown", "neither config.json, nor safetensors files, nor a manifest")
    try:
        checkpoint = _opener(folder, kind)(folder)
    except (ValueError, OSError) as error:
        return _bad(kind, str(error))
    details = [*_details(checkpoint)]
    drafter = folder / layout.DRAFTER
    if isinstance(checkpoint, converted.ConvertedCheckpoint):
        try:
            fault = converted.drafter_fault(checkpoint) if _is_target(checkpoint) else None
        except CheckpointError as error:
            fault = str(error)
        if fault:
            details.append(("fault", fault))
            return Info(kind=kind, state="damaged", details=tuple(details))
    if drafter.is_dir():
        inside = inspect(drafter)
        details.append(("drafter", f"{inside.kind}, {inside.state}"))
        if inside.state != "whole":
            details += inside.details
            return Info(kind=kind, state=inside.state, details=tuple(details))
    return Info(kind=kind, state="whole", details=tuple(details))


def _opener(folder: Path, kind: str) -> Callable[[Path], Checkpoint]:
    """How to open a target or a drafter."""
    try:
        ModelConfig.from_hf(folder)
    except ValueError as not_a_model:
        try:
            DrafterConfig.from_hf(folder)
        except ValueError:
            raise not_a_model from None
        return converted.open_drafter if kind == "converted" else hf.open_drafter
    return converted.open_model if kind == "converted" else hf.open_model


def _is_target(checkpoint: Checkpoint) -> bool:
    return isinstance(checkpoint.config, ModelConfig)


def _details(checkpoint: Any) -> list[tuple[str, str]]:
    config = checkpoint.config
    details = [("role", "target" if _is_target(checkpoint) else "drafter")]
    sizes = f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}"
    if isinstance(config, ModelConfig):
        sizes += f", {config.n_routed_experts} experts"
    details.append(("model", sizes))
    details.append(("weights", size(checkpoint.bytes_used)))
    if isinstance(checkpoint, PublishedCheckpoint):
        tensors = sum(len(shard.tensors) for shard in checkpoint.shards)
        left_out = dict(checkpoint.skipped) or "nothing"
        details.append(("tensors", f"{tensors} in {len(checkpoint.shards)} files"))
        details.append(("left out", str(left_out)))
        return details
    data = checkpoint.manifest
    source = data["source"]
    details += [
        ("version", f"{data['version']}, by {data['program']}"),
        ("finished", data["times"]["finished"]),
        ("items", str(len(data["items"]))),
        ("tensors", f"{checkpoint.tensors_used} hashed, of {source['tensors']} in the source"),
        ("source", f"{source['name']}, {len(source['files'])} files"),
    ]
    for name in ("repository", "revision"):
        if name in source:
            details.append((name, source[name]))
    return details


def _unfinished(folder: Path) -> Info:
    done = [path for path in (folder / layout.WEIGHTS).glob("*") if (path / layout.RECORD).exists()]
    journal = folder / layout.WORK / "source.json"
    total = "?"
    if journal.exists():
        try:
            total = str(len(manifest.read_sealed(journal)["items"]))
        except CheckpointError as error:
            return _bad("unfinished conversion", str(error))
    details = (
        ("items", f"{len(done)} of {total} whole"),
        ("remedy", "run the same conversion again; it goes on from here"),
    )
    return Info(kind="unfinished conversion", state="partial", details=details)


def _bad(kind: str, message: str) -> Info:
    return Info(kind=kind, state="damaged", details=(("fault", message),))
