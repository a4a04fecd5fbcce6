"""The files that say what a conversion holds: sealed with a hash of themselves.

`tensors.json` of an item proves the item, `manifest.json` the whole: it names every item's record
by hash. What depends on the clock alone is under "times", so that two conversions of one source
agree in everything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_jax.checkpoint.layout import write_json
from kimi_jax.checkpoint.shards import CheckpointError

VERSION = 1
"""Of the converted folder's layout; a reader refuses any other."""

REMEDY = "copy it again, or delete it and convert again"

_BLOCK = 1 << 22  # bytes hashed at a time


def digest(data: Mapping[str, Any]) -> str:
    """sha256 of the content, apart from "sha256" and "times"."""
    content = {key: value for key, value in data.items() if key not in ("sha256", "times")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_sealed(path: Path, data: Mapping[str, Any]) -> str:
    """Writes `data` with its hash; returns the hash."""
    seal = digest(data)
    write_json(path, {**data, "sha256": seal})
    return seal


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` wrote.

    Raises:
        CheckpointError: it is not there, or not as it was written.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        intact = data["sha256"] == digest(data)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; convert again to restore it") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); {REMEDY}") from error
    if not intact:
        raise CheckpointError(f"{path} is damaged: its sha256 does not match; {REMEDY}")
    return data


def file_sha256(path: Path) -> str:
    """sha256 of a whole file, read in blocks."""
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()
