"""A program: interrupts conversions in children of its own, and compares what a second run leaves.

    python interruptions.py TESTS random|repeated|every SOURCE DRAFTER FOLDER NUMBER

It prints JSON. Children are forked, so that what takes seconds to import is imported once.
"""

import itertools
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from conversion import content, converted
from orbax.checkpoint import v1  # noqa: F401, before any clock runs

from kimi_jax.checkpoint import convert

# Every item on its own, so that there is much to interrupt.
convert.SEAL, convert.RUN = 1, 1 << 16
source, drafter, folder = map(Path, sys.argv[3:6])
number = int(sys.argv[6])  # of kills, or the distance between two stops


CHANGES = ("open", "os.rename", "os.mkdir", "os.remove")
"""Events of Python's auditing that a conversion of small files consists of."""


def start(output: Path, prepare=lambda: None, finish=lambda: None) -> int:
    child = os.fork()
    if child:
        return child
    try:
        prepare()
        converted(source, output, drafter)
        finish()
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def ended_well(child: int) -> bool:
    return os.waitpid(child, 0)[1] == 0


def undisturbed() -> tuple[dict, int]:
    """What a run leaves, and how many events it consists of."""
    events = []
    child = start(
        folder / "undisturbed",
        prepare=lambda: sys.addaudithook(lambda event, _: event in CHANGES and events.append(1)),
        finish=lambda: (folder / "events").write_text(str(len(events))),
    )
    assert ended_well(child)
    return content(folder / "undisturbed"), int((folder / "events").read_text())


def killed(output: Path, event: int, later: float) -> bool:
    """Kills a run a moment after its n-th event; whether it was in time.

    Not after some time: how far a run has got by then is another question on every machine.
    """
    counter = itertools.count(1)

    def listen(name: str, _) -> None:
        if name in CHANGES and next(counter) == event:
            threading.Timer(later, os.kill, (os.getpid(), signal.SIGKILL)).start()

    child = start(output, prepare=lambda: sys.addaudithook(listen))
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def at_random_moments(expected: dict, events: int) -> list:
    """[killed in time, items in place then, equal after the second run] each time."""
    moments, found = random.Random(0), []
    for i in range(number):
        output = folder / f"killed {i}"
        event = int(events * (i + moments.random()) / number) + 1
        in_time = killed(output, event, later=moments.uniform(0, 0.003))
        items = len([*output.glob("**/weights/*")])
        assert ended_well(start(output))
        found.append([in_time, items, content(output) == expected])
    return found


def again_and_again(expected: dict, events: int) -> list:
    """[kills, equal in the end] of a run that is killed and killed until it gets through."""
    moments, kills = random.Random(1), 0
    while kills < number and killed(
        folder / "output", moments.randrange(events // 4, events // 2), later=0.001
    ):
        kills += 1
    assert ended_well(start(folder / "output"))
    return [kills, content(folder / "output") == expected]


def before_every_change(expected: dict, events: int) -> list:
    """[n, whole then, equal after the second run] for a process that ends at its n-th change."""
    found = []
    for n in range(1, 10_000, number):
        output = folder / f"stopped {n}"
        if ended_well(start(output, prepare=lambda n=n: stop_at(n))):
            break
        whole = (output / "manifest.json").exists()
        assert ended_well(start(output)), n
        found.append([n, whole, content(output) == expected])
    return found


def stop_at(n: int) -> None:
    """Ends this process instead of its n-th renaming."""
    left = n

    def stopping(call):
        def stopped(*arguments, **options):
            nonlocal left
            left -= 1
            if not left:
                os._exit(9)
            return call(*arguments, **options)

        return stopped

    for name in ("rename", "replace"):
        setattr(os, name, stopping(getattr(os, name)))


if __name__ == "__main__":
    study = {"random": at_random_moments, "repeated": again_and_again, "every": before_every_change}
    print(json.dumps(study[sys.argv[2]](*undisturbed())))
