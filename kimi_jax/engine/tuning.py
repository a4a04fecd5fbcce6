"""Measured step times, kept per machine and model: what `tree_budget="auto"` decides by."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from absl import logging
from tqdm import tqdm

from kimi_jax.engine.budget import BUCKETS, StepTimes
from kimi_jax.engine.loop import Engine

FOLDER_VARIABLE = "KIMI_JAX_TUNING"
"""Environment variable: folder of the measurements."""

CONTEXT = 256  # tokens that the measured sequences have behind them
CALLS = 5


def folder() -> Path:
    """KIMI_JAX_TUNING, otherwise kimi_jax/tuning under $XDG_CACHE_HOME (~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(FOLDER_VARIABLE) or f"{base}/kimi_jax/tuning").expanduser()


def key(*parts: Any) -> str:
    """A name for a machine and a model, from whatever tells them apart."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def load(name: str, max_num_seqs: int) -> StepTimes | None:
    """The step times that were measured with so many slots, or None."""
    path = folder() / f"{name}.json"
    try:
        rows = json.loads(path.read_text(encoding="utf-8")).get(str(max_num_seqs))
        times = {(int(b), int(n)): float(seconds) for b, n, seconds in rows or ()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logging.warning("%s is ignored: %s", path, error)
        return None
    return times or None


def save(name: str, max_num_seqs: int, times: StepTimes) -> Path:
    """Adds the step times of so many slots to the file of this machine and model."""
    path = folder() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        table = {}
    table[str(max_num_seqs)] = [[*where, seconds] for where, seconds in sorted(times.items())]
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(table), encoding="utf-8")
    temporary.replace(path)
    return path


def measure(engine: Engine, buckets: Iterable[int] = BUCKETS) -> dict[tuple[int, int], float]:
    """Seconds of a step by (bucket, sequences), of sampled sequences; compiles what is missing."""
    slots = engine.options.max_num_seqs
    counts = sorted({slots, *(1 << power for power in range(slots.bit_length()))} - {0})
    counts = [count for count in counts if count <= slots]
    times = {}
    for bucket in tqdm(tuple(buckets), desc="measuring", unit="bucket"):
        plan = engine.programs.plan(budget=bucket)
        engine.warm_up(plan)
        for count in counts:
            times[bucket, count] = engine.step_seconds(plan, count, context=CONTEXT, calls=CALLS)
    return times
