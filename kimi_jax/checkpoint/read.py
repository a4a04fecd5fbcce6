"""Opens and loads a checkpoint folder of either kind; what lies in it decides.

A Hugging Face folder has safetensors files (`hf.py`), a converted one a manifest (`converted.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_jax.checkpoint import converted, hf, layout
from kimi_jax.checkpoint.base import Checkpoint
from kimi_jax.checkpoint.shards import CheckpointError
from kimi_jax.config import DrafterConfig, ModelConfig
from kimi_jax.model import weights as model_weights
from kimi_jax.speculation import weights as drafter_weights

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "load_drafter",
    "load_model",
    "open_checkpoint",
    "open_drafter",
]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Opens a target's folder; reads configuration, index and headers, or the manifest, only.

    Raises:
        CheckpointError: something is missing, truncated, unexpected, or of another shape or dtype;
            or a conversion into this folder was never finished.
        ValueError: the configuration is not supported (see `ModelConfig.from_hf`).
    """
    folder = _existing(folder)
    if converted.is_converted(folder):
        return converted.open_model(folder)
    return hf.open_model(folder)


def open_drafter(folder: str | Path, target: ModelConfig) -> Checkpoint:
    """Opens the folder of a drafter for `target`; see `open_checkpoint`.

    Raises:
        CheckpointError: as `open_checkpoint`.
        ValueError: the configuration is not supported, or does not fit the target.
    """
    folder = _existing(folder)
    config = DrafterConfig.from_hf(folder)
    try:
        config.check_against(target)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if converted.is_converted(folder):
        return converted.open_drafter(folder)
    return hf.open_drafter(folder)


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
    if converted.is_unfinished(folder):
        output = f"--output={folder}"
        if folder.name == layout.DRAFTER and converted.is_begun(folder.parent):
            output = f"--drafter=... --output={folder.parent}"
        raise CheckpointError(
            f"{folder}: a conversion into this folder was not finished; run it again:"
            f" python3 -m convert convert --source=... {output}"
        )
    if not (folder / "config.json").is_file():
        state = "has no config.json" if folder.is_dir() else "is not a folder"
        raise CheckpointError(
            f"{folder} {state}; expected a converted checkpoint, or a Hugging Face folder with"
            " config.json and safetensors files"
        )
    return folder
