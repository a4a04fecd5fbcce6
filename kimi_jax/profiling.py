"""What a profiler trace says about a step: where its time went, by stage.

Traces are JAX's own (`jax.profiler`): each event of a device names the instruction of the compiled
program that it ran, and the program's text says under which `named_scope` that instruction was
written. Note that XLA leaves CUDA graphs out while a trace is taken, so on a GPU the gaps between
kernels are not those of a timed run; the kernels' own times are.
"""

import collections
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

STAGES = ("propose", "forward", "accept", "commit")

_INSTRUCTION = re.compile(r'%?(\S+) = .*metadata=\{[^}]*op_name="([^"]*)"')
_CONTAINER = re.compile(r"(while|call|conditional|async)([.\-_]|$)")  # its events hold the others'


class NoEvents(ValueError):
    """A trace in which nothing of the program can be found."""


def scopes(program_text: str) -> dict[str, str]:
    """Instruction -> path of scopes, e.g. "jit(decode_steps)/while/body/forward/layer0/dot"."""
    lines = map(_INSTRUCTION.search, program_text.splitlines())
    return {match[1]: match[2] for match in lines if match}


def stage_of(path: str) -> str:
    """The stage of a step that a path lies in, or "other"."""
    return next((part for part in path.split("/") if part in STAGES), "other")


def stage_seconds(
    folder: str | Path, module: str, program_texts: Iterable[str]
) -> dict[str, float]:
    """Seconds of device time by stage, over all calls in the newest trace below `folder`.

    Args:
      module: the programs' name, e.g. "jit_decode_steps".
      program_texts: `compiled.as_text()` of the programs of this name that may have run.

    Raises:
      NoEvents: no trace, or none of the module's instructions in it.
    """
    programs = [scopes(text) for text in program_texts]
    totals: dict[str, float] = collections.defaultdict(float)
    for events in _events(folder, module).values():
        # Programs share a name: the text that knows most of the instructions is this one's.
        known = max(programs, key=lambda program: len(program.keys() & events.keys()))
        for instruction, seconds in events.items():
            if not _CONTAINER.match(instruction):
                totals[stage_of(known.get(instruction, ""))] += seconds
    if not totals:
        raise NoEvents(f"the trace in {folder} has no event of {module}")
    return dict(totals)


def _events(folder: str | Path, module: str) -> dict[int, dict[str, float]]:
    """Seconds by instruction, by the program's id."""
    traces = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise NoEvents(f"there is no trace (*.xplane.pb) in {folder}")
    seconds: dict[int, dict[str, float]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the reader's own types
        for stats, duration in _stats(traces[-1]):
            if stats.get("hlo_module") == module and "hlo_op" in stats:
                program = seconds.setdefault(int(stats.get("program_id", 0)), {})
                name = str(stats["hlo_op"])
                program[name] = program.get(name, 0.0) + duration
    return seconds


def _stats(trace: Path) -> Iterator[tuple[dict, float]]:
    """Details and seconds of every event that has details."""
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                yield dict(event.stats), event.duration_ns * 1e-9
