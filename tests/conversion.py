"""Helpers for tests of converted checkpoints."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.checkpoint import hf
from kimi_jax.checkpoint.convert import Report, convert
from kimi_jax.model.param import Param


def converted(source: Path, output: Path, drafter: Path | None = None) -> Report:
    """Converts a published folder."""
    return convert(
        hf.open_model(source),
        output,
        drafter=hf.open_drafter(drafter) if drafter else None,
        progress=False,
    )


def content(output: Path) -> dict[str, Any]:
    """Every file of a converted folder but for what tells the time: bytes, or parsed JSON."""
    found: dict[str, Any] = {}
    for path in sorted(output.rglob("*")):
        name = str(path.relative_to(output))
        if path.is_dir() or path.name == "_CHECKPOINT_METADATA":  # Orbax's time stamps
            continue
        if path.name == "manifest.json":
            data = json.loads(path.read_text())
            del data["times"]
            found[name] = data
        else:
            found[name] = path.read_bytes()
    return found


def stored_array(output: Path, item: str, name: str) -> np.ndarray:
    """An array put together from its chunk files, without any library for the format."""
    folder = output / "weights" / item / "state" / name
    meta = json.loads((folder / "zarr.json").read_text())
    assert meta["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}] or (
        meta["codecs"] == [{"name": "bytes"}]  # of one byte each: no order
    ), meta["codecs"]
    chunk = meta["chunk_grid"]["configuration"]["chunk_shape"]
    dtype = np.dtype("V2" if meta["data_type"] == "bfloat16" else meta["data_type"])
    array = np.empty(meta["shape"], dtype)
    for path in (folder / "c").rglob("*"):
        if path.is_file():
            cell = [int(part) for part in path.relative_to(folder / "c").parts]
            at = tuple(slice(i * n, (i + 1) * n) for i, n in zip(cell, chunk, strict=True))
            array[at] = np.frombuffer(path.read_bytes(), dtype).reshape(chunk)
    return array


def chunk_file(output: Path, item: str, name: str, number: int = 0) -> Path:
    """One of an array's chunk files."""
    folder = output / "weights" / item / "state" / name / "c"
    return sorted(path for path in folder.rglob("*") if path.is_file())[number]


def flip_bit(path: Path, byte: int) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def shardings(description: Any, mesh: Mesh, split: dict[str, tuple[str, ...]]) -> Any:
    """A NamedSharding a parameter: each mesh axis splits the logical axes named for it."""

    def one(param: Param) -> NamedSharding:
        spec = [
            next(
                (
                    mesh_axis
                    for mesh_axis, axes in split.items()
                    if axis in axes and not size % mesh.shape[mesh_axis]
                ),
                None,
            )
            for axis, size in zip(param.axes, param.shape, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(one, description)


def equal(a: Any, b: Any) -> bool:
    """Whether two trees of arrays hold the same bits."""

    def same(x: Any, y: Any) -> bool:
        x, y = np.asarray(x), np.asarray(y)
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()

    return jax.tree.all(jax.tree.map(same, a, b))
