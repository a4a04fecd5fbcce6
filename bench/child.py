"""Benchmark sections in a child process, which may hang or die without losing the rest."""

import json
import pathlib
import subprocess
import time
from collections.abc import Sequence
from typing import Any


def read(log: pathlib.Path) -> list[dict[str, Any]]:
    """The records that a child has written: JSON, a line each, the last one perhaps not whole."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def watch(
    command: Sequence[str], log: pathlib.Path, *, silence: float, ends: Sequence[int] = (0,)
) -> str | None:
    """Runs a child that writes to `log` until it ends, or kills it after so many silent seconds.

    None if it exited with one of `ends`, else the section that it was in ("start": none yet).
    """
    child = subprocess.Popen(command)
    log.touch()
    size, last = 0, time.monotonic()
    while child.poll() is None:
        time.sleep(0.5)
        if log.stat().st_size != size:
            size, last = log.stat().st_size, time.monotonic()
        if time.monotonic() - last > silence:
            child.kill()
    if child.returncode in ends:
        return None
    begun = [record["section"] for record in read(log) if record.get("begins")]
    return begun[-1] if begun else "start"


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """Checks that did not pass, and sections that did not end."""
    checks = [record["check"] for record in records if not record.get("passed", True)]
    return checks + [record["section"] for record in records if "error" in record]
