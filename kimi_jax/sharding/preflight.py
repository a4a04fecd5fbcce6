"""Do the devices talk to each other, and how fast? `python3 -m kimi_jax.sharding.preflight`

Reductions of 1 KiB to 16 MiB over every pair of devices and over all of them, with their values
checked. They run in a process of their own under a watchdog: traffic between GPUs that the IOMMU
or PCIe access control sends astray does not fail, it hangs. The result is kept for later runs.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import logging

FOLDER_VARIABLE = "KIMI_JAX_PREFLIGHT"
"""Environment variable: folder of the results."""

SIZES = tuple(1 << power for power in range(10, 25, 2))  # bytes, both sides of 512 KiB
HANGS_AFTER = 20.0  # seconds without a result
STARTS_WITHIN = 180.0  # seconds until the first one: the process has to start, and to compile
SLOW = 5e9  # bytes a second at the largest size; PCIe 4.0 x16 reaches four times as much

HANGS = (
    "traffic hangs between devices {devices}: if they are on PCIe, the IOMMU or ACS may send their "
    "peer-to-peer traffic astray. Boot with iommu=pt, turn ACS off in the firmware or with setpci, "
    "or set NCCL_P2P_DISABLE=1 to go through host memory"
)
WRONG = "sums over devices {devices} are wrong: do not use them together; check the driver's log"
CRAWLS = (
    "traffic crawls between devices {devices} ({rate:.2f} GB/s): see `nvidia-smi topo -m`; devices "
    "below different PCIe roots may lack peer-to-peer access, and a link may be too narrow"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One all-reduce: device ids, bytes of each device's part, seconds, whether it was right."""

    devices: tuple[int, ...]
    size: int
    seconds: float
    right: bool

    @property
    def rate(self) -> float:
        """Bytes of a part that are summed per second."""
        return self.size / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a preflight found. hung: groups of devices that gave no result in time."""

    timings: tuple[Timing, ...]
    hung: tuple[tuple[int, ...], ...]

    def advice(self) -> list[str]:
        """What to do about it, a line for each group of devices that is not as it should be."""
        lines = [HANGS.format(devices=list(devices)) for devices in self.hung]
        wrong = {timing.devices for timing in self.timings if not timing.right}
        lines += [WRONG.format(devices=list(devices)) for devices in sorted(wrong)]
        lines += [
            CRAWLS.format(devices=list(timing.devices), rate=timing.rate / 1e9)
            for timing in self.timings
            if timing.size == SIZES[-1] and timing.rate < SLOW and timing.right
        ]
        return lines

    def lines(self) -> list[str]:
        """The table: a line a group, microseconds and GB/s by size."""
        rows = []
        for devices, group in itertools.groupby(self.timings, key=lambda timing: timing.devices):
            cells = [
                f"{t.size >> 10} KiB {1e6 * t.seconds:.0f} us {t.rate / 1e9:.2f}" for t in group
            ]
            rows.append(f"{list(devices)}: " + ", ".join(cells) + " GB/s")
        return rows

    def seconds(self, size: float) -> float:
        """Of a sum of `size` bytes over all devices, between and beyond the measured sizes."""
        everyone = max((timing.devices for timing in self.timings), key=len)
        of_all = [timing for timing in self.timings if timing.devices == everyone]
        sizes, times = [t.size for t in of_all], [t.seconds for t in of_all]
        if size > sizes[-1]:
            return times[-1] * size / sizes[-1]
        return float(np.interp(size, sizes, times))

    @property
    def usable(self) -> bool:
        """Whether every group answered, rightly."""
        return not self.hung and all(timing.right for timing in self.timings)


def groups(count: int) -> list[tuple[int, ...]]:
    """Every pair of devices, then all of them."""
    pairs = list(itertools.combinations(range(count), 2))
    return pairs if count < 3 else [*pairs, tuple(range(count))]


def measure(devices: Sequence[int], sizes: Sequence[int] = SIZES) -> Iterator[Timing]:
    """Times all-reduces over these devices, ids among `jax.devices()`; in this process."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    everyone = jax.devices()
    mesh = Mesh(np.array([everyone[index] for index in devices]), ("x",))
    split, whole = PartitionSpec("x"), PartitionSpec()

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=whole, check_vma=False)
    def total(x):
        return jax.lax.psum(x[0], "x")

    for size in sizes:
        length = size // 4
        # Small integers: their sums are exact in float32, in any order.
        parts = np.arange(len(devices))[:, None] + np.arange(length) % 251
        x = jax.device_put(jnp.asarray(parts, jnp.float32), NamedSharding(mesh, split))
        result = total(x)
        right = all(
            np.array_equal(shard.data, parts.sum(axis=0)) for shard in result.addressable_shards
        )
        seconds = []
        for _ in range(7):
            begin = time.perf_counter()
            jax.block_until_ready(total(x))
            seconds.append(time.perf_counter() - begin)
        middle = sorted(seconds)[len(seconds) // 2]
        yield Timing(devices=tuple(devices), size=size, seconds=middle, right=right)


def run(count: int, *, hangs_after: float = HANGS_AFTER, program: Sequence[str] = ()) -> Report:
    """Measures all groups of `count` devices in processes that are ended when they hang."""
    command = list(program) or [sys.executable, "-m", "kimi_jax.sharding.preflight", "--measure"]
    left = groups(count)
    timings: list[Timing] = []
    hung = []
    while left:
        finished = _measure_until_hang(command, left, timings, hangs_after)
        left = left[finished:]
        if left:
            hung.append(left.pop(0))
    return Report(timings=tuple(timings), hung=tuple(hung))


def _measure_until_hang(
    command: list[str], todo: list[tuple[int, ...]], timings: list[Timing], hangs_after: float
) -> int:
    """Adds to `timings`; returns how many groups were finished."""
    # Another process may have taken most of the memory, and this one needs little.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    child = subprocess.Popen(
        [*command, json.dumps(todo)], stdout=subprocess.PIPE, text=True, env=env
    )
    lines: queue.Queue[str | None] = queue.Queue()
    assert child.stdout is not None
    stream = child.stdout

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    finished, patience = 0, STARTS_WITHIN
    try:
        while finished < len(todo):
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                break
            if line is None:  # it ended, or broke: what it was at counts as not answering
                break
            entry = json.loads(line)
            patience = hangs_after
            if entry == "done":
                finished += 1
            elif entry != "started":
                timings.append(Timing(**{**entry, "devices": tuple(entry["devices"])}))
    finally:
        child.kill()
        child.wait()
        stream.close()
    return finished


def path(kind: str, count: int) -> Path:
    """Where the result for this host, kind and number of devices is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get(FOLDER_VARIABLE) or f"{base}/kimi_jax/preflight").expanduser()
    name = hashlib.sha256(repr((os.uname().nodename, kind, count)).encode()).hexdigest()[:16]
    return folder / f"{name}.json"


def save(report: Report, kind: str, count: int) -> Path:
    where = path(kind, count)
    where.parent.mkdir(parents=True, exist_ok=True)
    temporary = where.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(dataclasses.asdict(report)), encoding="utf-8")
    temporary.replace(where)
    return where


def load(kind: str, count: int) -> Report | None:
    """The kept result, or None if there is none that can be read."""
    try:
        kept = json.loads(path(kind, count).read_text(encoding="utf-8"))
        timings = [Timing(**{**t, "devices": tuple(t["devices"])}) for t in kept["timings"]]
        return Report(timings=tuple(timings), hung=tuple(tuple(group) for group in kept["hung"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def ensure(kind: str, count: int) -> Report:
    """The kept result for these devices of this machine, or a new one, before they work together.

    Raises:
      ValueError: traffic that hangs or goes wrong, with what to do about it.
    """
    report = load(kind, count)
    if report is None:
        logging.info("measuring the links between %d x %s, once", count, kind)
        report = run(count)
        if report.usable:  # what is not is measured again: it may have been put right
            save(report, kind, count)
    if not report.usable:
        raise ValueError("\n".join(report.advice()))
    for line in report.advice():
        logging.warning("%s", line)
    return report


def versions() -> str:
    """jax, jaxlib, and NCCL where it is installed as a package."""
    found = []
    for name in ("jax", "jaxlib", "nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def links() -> str | None:
    """NVIDIA's table of links between GPUs, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--measure"]:
        print(json.dumps("started"), flush=True)
        for devices in json.loads(arguments[1]):
            for timing in measure(devices):
                print(json.dumps(dataclasses.asdict(timing)), flush=True)
            print(json.dumps("done"), flush=True)
        return 0
    if arguments:
        print(f"unknown argument {arguments[0]!r}; there are none", file=sys.stderr)
        return 2
    import jax

    kind, count = jax.devices()[0].device_kind, jax.device_count()
    print(f"{count} x {kind}; {versions()}")
    if count < 2:
        print("one device: nothing to measure")
        return 0
    print(links() or "no table of links: nvidia-smi is not here")
    report = run(count)
    print("\n".join([*report.lines(), *report.advice()]))
    print(f"kept in {save(report, kind, count)}")
    return 0 if report.usable else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
