"""What a profiler trace says about a step: where its time went, by stage and by kernel.

  python3 -m kimi_jax.profiling DIR        the newest trace below DIR, as written by --profile_dir

Traces are JAX's own (`jax.profiler`): each event of a device names the instruction of the compiled
program that it ran, and the program's text says under which `named_scope` that instruction was
written. `keep_programs` puts the texts beside a trace, so that it can be read later; on a GPU the
events may also carry a path themselves, which serves where there is no text.

What ran inside of a CUDA graph says nothing but the kernel's name. XLA names a kernel after the
instruction that it was first made for, '.' and '-' as '_', and layers share it; a Mosaic kernel has
its own name, which is one of the scopes. A library's kernels, copies and fills have neither: they
belong to the kernel before them on their stream.
"""

import argparse
import collections
import dataclasses
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

STAGES = ("propose", "forward", "attention", "experts", "unembed", "accept", "commit")
"""Scopes of a step; the innermost one counts. "forward" is what lies between its parts."""

OTHER = "other"  # in no stage

_COMPUTATION = re.compile(r"(?:ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?(\S+) = (.*)")
_OP_NAME = re.compile(r'metadata=\{[^}]*op_name="([^"]*)"')
_CALLS = re.compile(r"calls=%?([\w.-]+)")
_OPERAND = re.compile(r"%([\w.-]+)")
_MOSAIC = "_mosaic_gpu_kernel"  # what Mosaic adds to a kernel's own name
_METADATA = re.compile(r"metadata=\{[^}]*\}")
_LONG = 4000  # characters; a line beyond has a whole kernel or a large constant in it
_CONTAINER = re.compile(r"(while|call|conditional|async)([.\-_]|$)")  # its events hold the others'
_DEVICE = "/device:GPU:"  # planes of GPUs; a CPU runs its programs in the plane of the host
_PROGRAMS = "*.hlo.txt"


class NoEvents(ValueError):
    """A trace in which nothing of the program can be found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """All runs of one kernel for one stage."""

    stage: str
    name: str  # as the device knows it; the instruction's on a CPU
    calls: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """What one device did, over the whole trace."""

    kernels: tuple[Kernel, ...]  # most seconds first
    span: float  # seconds from the first event's begin to the last one's end
    busy: float  # seconds of it with at least one event running

    @property
    def idle(self) -> float:
        """Share of the span in which nothing ran."""
        return 1 - self.busy / self.span if self.span else 0.0

    @property
    def seconds(self) -> float:
        """Sum over all kernels."""
        return sum(kernel.seconds for kernel in self.kernels)

    def by_stage(self) -> dict[str, tuple[int, float]]:
        """Calls and seconds, most seconds first."""
        totals: dict[str, tuple[int, float]] = {}
        for kernel in self.kernels:
            calls, seconds = totals.get(kernel.stage, (0, 0.0))
            totals[kernel.stage] = calls + kernel.calls, seconds + kernel.seconds
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))

    def lines(self, *, kernels: int = 40, stage_bytes: Mapping[str, float] | None = None) -> str:
        """Two tables for people; stage_bytes: what each stage moved over the whole trace."""
        known = stage_bytes or {}
        rows = [f"{'stage':<12} {'ms':>9} {'share':>6} {'calls':>7} {'GB/s':>6}"]

        def row(name: str, calls: int, seconds: float, moved: float | None) -> str:
            speed = f"{moved / seconds / 1e9:6.0f}" if moved and seconds else f"{'-':>6}"
            share = seconds / self.seconds if self.seconds else 0.0
            return f"{name:<12} {1e3 * seconds:9.3f} {share:6.1%} {calls:7} {speed}"

        rows += [row(name, *cell, known.get(name)) for name, cell in self.by_stage().items()]
        rows += [row("all", sum(k.calls for k in self.kernels), self.seconds, None), ""]
        rows.append(f"{'ms':>9} {'share':>6} {'calls':>7} {'us each':>8}  stage, kernel")
        for kernel in self.kernels[:kernels]:
            rows.append(
                f"{1e3 * kernel.seconds:9.3f} {kernel.seconds / self.seconds:6.1%} "
                f"{kernel.calls:7} {1e6 * kernel.seconds / kernel.calls:8.2f}  "
                f"{kernel.stage}, {kernel.name[:80]}"
            )
        if len(self.kernels) > kernels:
            rest = sum(kernel.seconds for kernel in self.kernels[kernels:])
            rows.append(f"{1e3 * rest:9.3f} {rest / self.seconds:6.1%} in other kernels")
        rows.append(
            f"from first to last {1e3 * self.span:.3f} ms, of which idle {self.idle:.1%} "
            f"({1e3 * (self.span - self.busy):.3f} ms)"
        )
        return "\n".join(rows)


def brief(program_text: str) -> str:
    """The text without what its longest lines carry: a Mosaic call holds its kernel, 0.5 MB."""

    def short(line: str) -> str:
        if len(line) <= _LONG:
            return line
        metadata = _METADATA.search(line)
        return f"{line[: _LONG // 4]} ... {metadata[0] if metadata else ''}"

    return "\n".join(map(short, program_text.splitlines()))


def scopes(program_text: str) -> dict[str, str]:
    """Instruction -> path of scopes, e.g. "jit(decode_steps)/while/body/forward/layer0/dot".

    What XLA makes itself has no path, or one that ends above the stages (the parts of a split
    product, a layout's copies): it gets that of its body, else of the first that uses it.
    """
    found: dict[str, str] = {}
    bodies: dict[str, str] = {}  # computation -> a path in the stage of most of it
    for computation, lines in _computations(program_text):
        used: dict[str, str] = {}  # instruction -> path of its first user
        stages: dict[str, list[str]] = collections.defaultdict(list)
        for name, line in reversed(lines):  # users stand behind what they use
            match, calls = _OP_NAME.search(line), _CALLS.search(line)
            paths = [match[1] if match else "", bodies.get(calls[1], "") if calls else ""]
            paths.append(used.get(name, ""))
            path = next((path for path in paths if stage_of(path) != OTHER), paths[0])
            if path:
                found[name] = path
            if (stage := stage_of(path)) != OTHER:
                stages[stage].append(path)
                used.update(dict.fromkeys(_OPERAND.findall(line), path))
        if stages:
            bodies[computation] = max(stages.values(), key=len)[0]
    return found


def _computations(program_text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each computation with its instructions, (name, rest of the line), in the order of the text:
    what is called comes first."""
    name, lines = "", []
    for line in program_text.splitlines():
        if head := _COMPUTATION.match(line):
            yield name, lines
            name, lines = head[1], []
        elif instruction := _INSTRUCTION.match(line):
            lines.append(instruction.groups())
    yield name, lines


def stage_of(path: str) -> str:
    """The innermost stage of a step that a path lies in, or "other"."""
    return next((part for part in reversed(path.split("/")) if part in STAGES), OTHER)


class Program:
    """Where each kernel of a compiled program belongs."""

    def __init__(self, program_text: str):
        self._paths = scopes(program_text)
        self._kernels = {
            _as_kernel(name): self._paths.get(name, "")
            for _, lines in _computations(program_text)
            for name, _ in lines
        }
        for path in self._paths.values():
            for scope in path.split("/"):
                self._kernels.setdefault(f"{scope}{_MOSAIC}", path)

    def path(self, instruction: str, kernel: str) -> str | None:
        """Of an event that names one or both ("": it has none); None: the program knows neither."""
        if instruction in self._paths:
            return self._paths[instruction]
        name = _as_kernel(kernel)
        while name not in self._kernels:  # a second kernel of a name has a number behind it
            name, number = name.rpartition("_")[::2]
            if not name or not number.isdigit():
                return None
        return self._kernels[name]

    def knows(self, seen: Iterable[tuple[str, str]]) -> int:
        """How many of these (instruction, kernel)."""
        return sum(self.path(*names) is not None for names in seen)


def _as_kernel(instruction: str) -> str:
    return re.sub(r"[.\-]", "_", instruction)


def keep_programs(folder: str | Path, program_texts: Iterable[str]) -> None:
    """Puts `compiled.as_text()` of the programs that a trace is of beside it."""
    for number, text in enumerate(program_texts):
        path = Path(folder) / f"program{number}{_PROGRAMS[1:]}"
        path.write_text(brief(text), encoding="utf-8")


def read(folder: str | Path, module: str, program_texts: Iterable[str] | None = None) -> Profile:
    """The newest trace below `folder`.

    Args:
      module: the programs' name, e.g. "jit_decode_steps".
      program_texts: `compiled.as_text()` of the programs of this name that may have run; None: what
        `keep_programs` has left there.

    Raises:
      NoEvents: no trace, or none of the module's instructions in it.
    """
    if program_texts is None:
        program_texts = [path.read_text("utf-8") for path in sorted(Path(folder).rglob(_PROGRAMS))]
    programs = [Program(text) for text in program_texts] or [Program("")]
    events = [event for event in _events(folder) if event.module in (module, "")]
    if not any(event.module for event in events):
        raise NoEvents(f"the trace in {folder} has no event of {module}")
    totals: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for event, stage in _staged(events, programs):
        totals[stage, event.name].append(event.seconds)
    kernels = [
        Kernel(stage=stage, name=name, calls=len(runs), seconds=sum(runs))
        for (stage, name), runs in totals.items()
    ]
    return Profile(
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
        span=1e-9 * (max(e.end for e in events) - min(e.begin for e in events)),
        busy=1e-9 * _covered((event.begin, event.end) for event in events),
    )


def _staged(
    events: Iterable["_Event"], programs: Sequence[Program]
) -> Iterator[tuple["_Event", str]]:
    """Each event with its stage, in the order of time."""
    events = sorted(events, key=lambda event: event.begin)
    names: dict[int, set[tuple[str, str]]] = collections.defaultdict(set)
    for event in events:
        names[event.program].add((event.instruction, event.name))
    # Programs share a name: the text that knows most of the kernels is this one's.
    known = {
        number: max(programs, key=lambda program: program.knows(seen))
        for number, seen in names.items()
    }
    before: dict[str, str] = {}  # stream -> stage of its last kernel that was known
    for event in events:
        path = known[event.program].path(event.instruction, event.name)
        if path or event.path or event.instruction:
            before[event.stream] = stage_of(path or event.path)
            yield event, before[event.stream]
        else:
            yield event, before.get(event.stream, OTHER) if path is None else OTHER


def stage_seconds(
    folder: str | Path, module: str, program_texts: Iterable[str]
) -> dict[str, float]:
    """Seconds of device time by stage, over all calls in the newest trace; as for `read`."""
    stages = read(folder, module, program_texts).by_stage()
    return {stage: seconds for stage, (_, seconds) in stages.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Event:
    name: str
    module: str  # "" if the event does not say
    program: int
    instruction: str  # "" if the event does not say
    path: str
    stream: str
    begin: float  # ns; as a float of the time of day it is good to 256 of them
    seconds: float

    @property
    def end(self) -> float:
        return self.begin + 1e9 * self.seconds


def _events(folder: str | Path) -> list[_Event]:
    """What ran on the first GPU of the newest trace, or on the CPU if there is none."""
    traces = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise NoEvents(f"there is no trace (*.xplane.pb) in {folder}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the reader's own types
        planes = list(jax.profiler.ProfileData.from_file(str(traces[-1])).planes)
        devices = sorted((p for p in planes if p.name.startswith(_DEVICE)), key=lambda p: p.name)
        devices = [plane for plane in devices if any(True for _ in plane.lines)]
        return list(_of_plane(devices[0]) if devices else _of_host(planes))


def _of_plane(plane: Any) -> Iterator[_Event]:
    """Kernels, copies and fills: everything in the lines of the device's streams."""
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                yield _event(event, dict(event.stats), event.name, line.name)


def _of_host(planes: Iterable[Any]) -> Iterator[_Event]:
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                instruction = str(stats.get("hlo_op", ""))
                if instruction and not _CONTAINER.match(instruction):
                    yield _event(event, stats, instruction, line.name)


def _event(event: Any, stats: Mapping[str, Any], name: str, stream: str) -> _Event:
    return _Event(
        name=name,
        module=str(stats.get("hlo_module", "")),
        program=int(stats.get("program_id", 0)),
        instruction=str(stats.get("hlo_op", "")),
        path=str(stats.get("name", "")),
        stream=stream,
        begin=event.start_ns,
        seconds=event.duration_ns * 1e-9,
    )


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description="Where the time of a trace went.")
    parser.add_argument("folder", help="where the trace is")
    parser.add_argument("--module", default="jit_decode_steps", help="name of the program")
    parser.add_argument("--kernels", type=int, default=40, help="how many to list")
    arguments = parser.parse_args()
    try:
        print(read(arguments.folder, arguments.module).lines(kernels=arguments.kernels))
    except NoEvents as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
