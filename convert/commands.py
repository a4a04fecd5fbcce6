"""The four commands: they open folders, call `kimi_jax.checkpoint`, and print."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from kimi_jax.checkpoint import converted, layout, read
from kimi_jax.checkpoint.convert import convert as convert_checkpoint
from kimi_jax.checkpoint.hf import PublishedCheckpoint
from kimi_jax.checkpoint.info import inspect
from kimi_jax.checkpoint.plan import ConversionPlan, make_plan
from kimi_jax.checkpoint.shards import CheckpointError
from kimi_jax.checkpoint.verify import verify as verify_checkpoint


def plan(flags: Any) -> int:
    plan = _plan(flags)
    print("\n".join(plan.lines()))
    plan.check()
    return 0


def convert(flags: Any) -> int:
    plan = _plan(flags)
    print("\n".join(plan.lines()), flush=True)
    plan.check()
    report = convert_checkpoint(
        plan.source, plan.output, drafter=plan.drafter, progress=flags.progress
    )
    print("\n".join(report.lines()))
    print(f"whole: {plan.output}")
    return 0


def verify(flags: Any) -> int:
    output = Path(flags.output)
    opened = [read.open_checkpoint(output)]
    drafter = output / layout.DRAFTER
    if drafter.is_dir():
        opened.append(read.open_drafter(drafter, opened[0].config))
    elif flags.drafter:
        raise CheckpointError(
            f"{output} holds no drafter to compare with {flags.drafter}; convert again with this"
            " --drafter to add it"
        )
    sources: list[PublishedCheckpoint | None] = [None, None]
    if flags.source:
        source = _published(flags.source)
        sources = [source, _drafter(flags, source)]
        if len(opened) == 2 and sources[1] is None:
            print(f"{drafter}: no --drafter is given: compared with the hashes taken then only")
    if flags.hashes and flags.hashes != "-":
        _check_hashes(Path(flags.hashes), [output, *(s.folder for s in sources if s)])
    faults = 0
    with _hashes(flags.hashes) as file:
        for checkpoint, source in zip(opened, sources, strict=False):
            if not isinstance(checkpoint, converted.ConvertedCheckpoint):
                raise CheckpointError(
                    f"{checkpoint.folder} is a published folder; give --output the converted one,"
                    " and this one as --source"
                )

            def listen(name: str, theirs: str, ours: str) -> None:
                print(theirs, ours, name, file=file)

            verdict = verify_checkpoint(
                checkpoint, source, progress=flags.progress, listener=listen if file else None
            )
            print("\n".join([str(checkpoint.folder), *verdict.lines()]))
            faults += len(verdict.faults)
    if len(opened) > 1:
        print(f"{output}, all in all: {f'NOT EQUAL: {faults} faults' if faults else 'equal'}")
    return 1 if faults else 0


def info(flags: Any) -> int:
    found = inspect(Path(flags.output or flags.source))
    print("\n".join(found.lines()))
    return 0 if found.state == "whole" else 1


def _plan(flags: Any) -> ConversionPlan:
    source = _published(flags.source)
    return make_plan(source, Path(flags.output), _drafter(flags, source))


def _published(folder: str) -> PublishedCheckpoint:
    checkpoint = read.open_checkpoint(folder)
    if not isinstance(checkpoint, PublishedCheckpoint):
        raise CheckpointError(f"{folder} is converted already; give the published folder")
    return checkpoint


def _drafter(flags: Any, source: PublishedCheckpoint) -> PublishedCheckpoint | None:
    folder = flags.drafter
    if folder is None:
        inside = source.folder / layout.DRAFTER
        folder = str(inside) if inside.is_dir() else ""  # without its files it is refused
    if not folder:
        return None
    checkpoint = read.open_drafter(folder, source.config)
    if not isinstance(checkpoint, PublishedCheckpoint):
        raise CheckpointError(f"{folder} is converted already; give the published folder")
    return checkpoint


def _check_hashes(path: Path, folders: list[Path]) -> None:
    """The file must not overwrite one of what it tells about."""
    for folder in folders:
        if folder.resolve() in path.resolve().parents:
            raise CheckpointError(
                f"--hashes={path} lies in {folder}, which is being verified; choose another place"
            )


@contextlib.contextmanager
def _hashes(path: str | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
    elif path == "-":
        yield sys.stdout
    else:
        with Path(path).open("w", encoding="utf-8") as file:
            yield file
