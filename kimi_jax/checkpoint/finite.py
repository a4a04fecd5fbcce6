"""Finding NaN and infinity in what was read, by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kimi_jax.checkpoint.shards import DTYPES, CheckpointError

_CHUNK = 1 << 20  # elements checked at a time, so that temporaries stay in the cache


def check_finite(
    path: Path, name: str, values: np.ndarray, shape: tuple[int, ...], skip: int = 0
) -> None:
    """Refuses NaN and infinity.

    Args:
        path: file or folder that the values come from, for the message.
        name: of the tensor.
        values: contiguous; all of the tensor, or a run of its elements. Integers always pass.
        shape: of the tensor.
        skip: bytes of the tensor before the values.

    Raises:
        CheckpointError: naming file, tensor, value and place.
    """
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
        where = np.unravel_index(bad + skip // flat.dtype.itemsize, shape)
        raise CheckpointError(
            f"{path}: {name!r} holds {float(flat[bad])} at {[int(i) for i in where]}; expected"
            " finite values: the file is damaged, download it again"
        )
