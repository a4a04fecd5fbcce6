"""How near the memory's speed are the routed experts, and are they right?

  python3 -m bench.int4_moe --output_json moe.json          about four minutes on one GPU
  python3 -m bench.int4_moe --tune --output_json tune.json  tilings beside the rule's, cell by cell
  python3 -m bench.int4_moe --quick                         the checks and three cells

Timed: the whole block (dispatch, gate and up, SwiGLU, down, weighted sum), wall time per call of
calls chained inside one jit, median; fresh choices each call and two layers of weights in turn, so
that nothing is warm. Bytes are those of the experts that the calls' rows chose, each once. Percent
is of the read bandwidth measured in the same run (a sum over 2 GiB).

The work is done by a child process, section by section. One that hangs or dies is recorded, and a
new child goes on behind it; if that was the check of the fused kernel, with a launch a phase.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench import child
from kimi_jax.pallas.int4_moe import specs

NO_START = 3  # exit code of a child that found no GPU: nothing else can be done
SILENCE = 100.0  # seconds without a word from the child after which it counts as hung
CALLS, RUNS, REPEATS = 40, 6, 5  # calls in a jit; runs enqueued back to back; medians are of these

# us: what has to be reached, what is hoped for, and what the best public kernel takes (Marlin in
# vLLM 0.25.1, CUDA graphs, same GPU), for specs.ROWS on one H200.
TARGETS = {
    "TP8 slice": {
        "must": (16, 36, 66, 108, 174, 255, 335),
        "goal": (10, 30, 56, 95, 155, 230, 300),
        "Marlin": (30, 58, 96, 152, 239, 341, 438),
    },
    "EP8 shapes": {
        "must": (64, 172, 262, 310, 345, 380, 450),
        "goal": (55, 155, 240, 285, 310, 330, 400),
        "Marlin": (79, 205, 322, 370, 501, 465, 627),
    },
}
PAIRS = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128, 159)  # M and M + 1 are compared
STEP_BOUND = 1.15  # time(M + 1) / time(M), over the same ratio of bytes
NUMERIC_ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 64, 100, 160)
ERROR_BOUND = 1e-2


# ------------------------------------------------------------------ the parent


def main() -> int:
    arguments = parse()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="int4_moe"))
    records: list[dict[str, Any]] = []
    skipped: list[str] = []
    fused = True
    started = time.monotonic()
    while True:
        log = folder / f"records-{len(skipped)}.jsonl"
        failed = watch(arguments, log, skipped, fused)
        records += child.read(log)
        if failed is None:
            break
        skipped = [r["section"] for r in records if r.get("done")] + [
            r["section"] for r in records if r.get("failed")
        ]
        records.append({"section": failed, "failed": True, "error": "hung or died"})
        skipped.append(failed)
        if failed == "start":
            break
        fused = fused and failed != "fused"
        print(f"!! {failed} hung or died; going on without it", flush=True)
        if len(skipped) > 30:
            break
    report = {
        "command": " ".join(sys.argv),
        "seconds": round(time.monotonic() - started, 1),
        "fused": fused,
        "records": records,
    }
    if arguments.output_json:
        pathlib.Path(arguments.output_json).write_text(json.dumps(report, indent=1) + "\n")
    print_tables(records)
    print(f"{report['seconds']} s")
    return int(bool(child.failures(records)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output_json", help="where the records go")
    parser.add_argument("--tune", action="store_true", help="time tilings instead of cells")
    parser.add_argument("--quick", action="store_true", help="the checks and three cells")
    parser.add_argument("--rows", type=numbers, default=specs.ROWS, help="M of the cells")
    parser.add_argument("--minutes", type=float, default=4.5, help="--tune stops after these")
    parser.add_argument("--only", default="", help="sections that begin so, comma separated")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="", help=argparse.SUPPRESS)
    parser.add_argument("--unfused", action="store_true", help="a launch for each phase")
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def watch(
    arguments: argparse.Namespace, log: pathlib.Path, skipped: list[str], fused: bool
) -> str | None:
    """A child's run, behind the sections that are to be left out; see `child.watch`."""
    command = [sys.executable, "-m", "bench.int4_moe", *sys.argv[1:]]
    command += ["--child", str(log), "--skip", ",".join(skipped)]
    command += [] if fused else ["--unfused"]
    return child.watch(command, log, silence=SILENCE, ends=(0, NO_START))


def print_tables(records: list[dict[str, Any]]) -> None:
    for record in records:
        if record.get("error"):
            print(f"FAILED {record['section']}: {record['error'].splitlines()[-1][:200]}")
    checks = [r for r in records if "check" in r]
    good = sum(bool(r["passed"]) for r in checks)
    print(f"\nchecks: {good} of {len(checks)} passed")
    for record in checks:
        if not record["passed"]:
            print(f"  NOT PASSED {record['check']}: {record.get('detail')}")
    ambient = [r for r in records if "bandwidth" in r]
    if ambient:
        print(f"{ambient[0]['device']}, read bandwidth {ambient[0]['bandwidth'] / 1e12:.2f} TB/s")
    header = f"{'':28} {'M':>4} {'experts':>7} {'us':>8} {'kernel':>8} {'GB/s':>6} {'%':>5}"
    print(f"{header} {'floor':>6} {'must':>5} {'goal':>5} {'Marlin':>6}  tiling")
    for record in (r for r in records if "us" in r):
        wanted = [record.get(name) or "" for name in ("must", "goal", "Marlin")]
        kernel = record.get("kernel_us")
        print(
            f"{record['name'][:28]:28} {record['rows']:4} {record['unique']:7.1f}"
            f" {record['us']:8.1f} {f'{kernel:.1f}' if kernel else '-':>8} {record['gbs']:6.0f}"
            f" {record['percent']:5.1f} {record['floor_us']:6.1f} {wanted[0]:>5} {wanted[1]:>5}"
            f" {wanted[2]:>6}  {record['tiling']}"
        )
    steps = [r for r in records if "step_ratio" in r]
    if steps:
        worst = max(steps, key=lambda r: r["step_ratio"])
        print(
            f"largest time(M+1)/time(M) over that of bytes: {worst['step_ratio']:.3f}"
            f" at M={worst['step_rows']} of {worst['step_name']} (bound {STEP_BOUND})"
        )


# ------------------------------------------------------------------ the child

Section = tuple[str, Callable[[], None]]


class Child:
    """All sections; what they find goes to the log as JSON, a line a record."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import jax

        self.arguments, self.jax = arguments, jax
        self.log = open(arguments.child, "a")  # noqa: SIM115 (lives as long as the process)
        self.section = "start"
        self.fused = not arguments.unfused
        self.cache: dict[Any, Any] = {}
        self.pool = ThreadPoolExecutor(8)
        self.one_at_a_time = threading.Lock()  # two of these kernels must not run at once

    def write(self, **record: Any) -> None:
        self.log.write(json.dumps({"section": self.section, **record}) + "\n")
        self.log.flush()

    def check(self, name: str, passed: bool, **detail: Any) -> None:
        self.write(check=name, passed=bool(passed), detail=detail)
        if not passed:
            print(f"   NOT PASSED: {name} {detail}", flush=True)

    def run(self) -> None:
        skip = set(self.arguments.skip.split(","))
        only = self.arguments.only
        for name, body in self.sections():
            unwanted = name in skip or (only and not name.startswith(tuple(only.split(","))))
            if unwanted and name != "start":
                continue
            self.section = name
            self.write(begins=True)
            began = time.monotonic()
            try:
                body()
                self.write(done=True, seconds=round(time.monotonic() - began, 2))
            except Exception as error:  # a section that fails is no reason to lose the others
                text = traceback.format_exc()
                print(text, flush=True)
                self.write(failed=True, error=f"{text}\n{type(error).__name__}: {error}")
                if name == "start":
                    sys.exit(NO_START)
            print(f"-- {name}: {time.monotonic() - began:.1f} s", flush=True)

    def sections(self) -> Iterator[Section]:
        yield "start", self.start
        yield "unfused", lambda: self.small(fused=False)
        if self.fused:
            yield "fused", lambda: self.small(fused=True)
        yield "numerics", self.numerics
        if self.arguments.tune:
            for spec in (specs.TP8, specs.EP8):
                for rows in self.arguments.rows:
                    yield f"tune {spec.name} {rows}", lambda s=spec, r=rows: self.tune(s, r)
            return
        rows = (1, 9, 33) if self.arguments.quick else self.arguments.rows
        for spec in (specs.TP8, specs.EP8) if not self.arguments.quick else (specs.TP8,):
            yield f"weights {spec.name}", lambda s=spec: self.check_packing(s)
            yield f"compile {spec.name}", lambda s=spec: self.compile_ahead(s, rows)
            for m in rows:
                yield f"{spec.name} {m}", lambda s=spec, m=m: self.cell(s, m)
            yield f"bits {spec.name}", lambda s=spec: self.bits(s, rows)
            if self.arguments.quick:
                return
            if spec == specs.EP8:
                for m in (1, 9, 17, 33):
                    yield f"EP8 rank {m}", lambda m=m: self.cell(specs.EP8_RANK, m)
            for m in (1, 9, 33):
                yield f"sm_120 {spec.name} {m}", lambda s=spec, m=m: self.cell(s, m, small=True)
            yield f"unfused {spec.name}", lambda s=spec: self.cell(s, 9, fused=False)
            yield f"steps {spec.name}", lambda s=spec: self.steps(s)
            yield f"free {spec.name}", self.forget

    # Set up.

    def start(self) -> None:
        jax = self.jax
        import jax.numpy as jnp

        from kimi_jax.pallas.stream import target

        device = jax.devices()[0]
        self.target = target.of(device)
        block = jax.jit(lambda: jnp.ones((1 << 29,), jnp.float32))()
        total = jax.jit(lambda a: jnp.sum(a))
        total(block).block_until_ready()
        times = []
        for _ in range(10):
            began = time.perf_counter()
            for _ in range(4):
                last = total(block)
            last.block_until_ready()
            times.append((time.perf_counter() - began) / 4)
        self.bandwidth = block.nbytes / float(np.median(times))
        self.write(
            device=device.device_kind,
            bandwidth=self.bandwidth,
            jax=jax.__version__,
            target=dataclasses.asdict(self.target),
            python=sys.version.split()[0],
            platform_version=device.client.platform_version,
        )
        print(f"{device.device_kind}: {self.bandwidth / 1e12:.2f} TB/s, {self.target}", flush=True)

    def forget(self) -> None:
        self.cache.clear()

    def weights(self, spec: specs.Spec) -> list[Any]:
        """Two layers in the kernel's order; the first also as canonical arrays, in `canonical`."""
        key = ("weights", spec.experts, spec.width)
        if key not in self.cache:
            import jax.numpy as jnp

            jax = self.jax
            from kimi_jax.pallas.int4_moe.packed import pack

            experts, hidden, width = spec.experts, spec.hidden, spec.width

            @jax.jit
            def canonical(seed):
                keys = jax.random.split(jax.random.key(seed), 4)
                sizes = (experts, 2, width, hidden), (experts, hidden, width)
                out = []
                for i, size in enumerate(sizes):
                    codes = jax.random.bits(keys[i], (*size[:-1], size[-1] // 2), jnp.uint8)
                    spread = jax.random.uniform(
                        keys[2 + i], (*size[:-1], size[-1] // 32), minval=0.5, maxval=1.5
                    )
                    out += [codes, (spread * 0.2 * size[-1] ** -0.5).astype(jnp.bfloat16)]
                return out

            self.canonical = canonical(0)
            packing = jax.jit(pack)
            self.cache[key] = [packing(*self.canonical), packing(*canonical(1))]
            jax.block_until_ready(self.cache[key])
        return self.cache[key]

    def routing(self, spec: specs.Spec, rows: int, calls: int) -> list[np.ndarray]:
        rng = np.random.default_rng([rows, spec.experts, spec.routed_over or 0])
        return [specs.route(spec, rows, rng) for _ in range(calls)]

    def inputs(self, spec: specs.Spec, rows: int) -> tuple[Any, Any]:
        rng = np.random.default_rng(rows)
        x = rng.standard_normal((rows, spec.hidden)).astype(specs.BF16)
        shares = rng.uniform(0.1, 1.0, (rows, spec.choices)).astype(np.float32)
        return self.jax.device_put(x), self.jax.device_put(shares)

    def tiling(self, spec: specs.Spec, rows: int, *, small: bool = False) -> Any:
        from kimi_jax.pallas.int4_moe import tuning

        return tuning.choose(self.shape(spec, rows), self.restricted(small))

    def restricted(self, small: bool) -> Any:
        """This GPU, or with the shared memory of an RTX PRO 6000."""
        from kimi_jax.pallas.stream.target import KNOWN

        if not small:
            return self.target
        return dataclasses.replace(KNOWN["sm_120"], num_cores=self.target.num_cores)

    def shape(self, spec: specs.Spec, rows: int) -> Any:
        from kimi_jax.pallas.int4_moe.program import Shape

        return Shape(
            rows=rows,
            choices=spec.choices,
            experts=spec.experts,
            hidden=spec.hidden,
            width=spec.width,
            routed_over=spec.routed_over,
        )

    def single(self, spec: specs.Spec, rows: int) -> Any:
        """One call, compiled: (x, ids, shares, packed) -> out."""
        return self.compiled(spec, rows, self.tiling(spec, rows), self.fused, 1)

    def chain(self, tiling: Any, fused: bool, calls: int) -> Any:
        from kimi_jax.pallas.int4_moe import kernel

        def run(x, shares, ids, layers):
            out = None
            for i in range(calls):
                out = kernel.routed_experts(
                    x,
                    ids[i],
                    shares,
                    layers[i % len(layers)],
                    target=self.target,
                    tiling=tiling,
                    fused=fused,
                    after=out,
                )
            return out

        return self.jax.jit(run)

    def compiled(self, spec: specs.Spec, rows: int, tiling: Any, fused: bool, calls: int) -> Any:
        key = ("compiled", spec.experts, spec.width, spec.routed_over, rows, tiling, fused, calls)
        if key not in self.cache:
            layers = self.weights(spec)[: min(calls, 2)]
            x, shares = self.inputs(spec, rows)
            ids = [np.zeros((rows, spec.choices), np.int32)] * calls
            self.cache[key] = (
                self.chain(tiling, fused, calls).lower(x, shares, ids, layers).compile()
            )
        return self.cache[key]

    def compile_ahead(self, spec: specs.Spec, rows: tuple[int, ...]) -> None:
        """In parallel what the next sections need; each of them would compile what is missing."""
        self.weights(spec)
        jobs = []
        for m in rows:
            tiling = self.tiling(spec, m)
            for calls in (1, CALLS):
                jobs.append(self.pool.submit(self.compiled, spec, m, tiling, self.fused, calls))
        for job in jobs:
            job.result()
            self.write(compiled=True)

    # Right?

    def small(self, *, fused: bool) -> None:
        """Small shapes against float64, first of all: a kernel that hangs should do so here."""
        for spec, rows in ((specs.TINY, 1), (specs.TINY, 9), (specs.TINY_TP8, 5), *zip(
            specs.AWKWARD, (2, 3, 40, 4, 17), strict=True
        )):  # fmt: skip
            case = specs.draw(spec, rows, np.random.default_rng(rows))
            error = self.error(case, fused=fused)
            self.check(f"{spec.name}, M={rows}", error < ERROR_BOUND, error=error)

    def error(self, case: specs.Case, *, fused: bool) -> float:
        out = self.evaluate(case, fused=fused)
        expected = specs.exact(case)
        return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))

    def evaluate(self, case: specs.Case, *, fused: bool) -> np.ndarray:
        from kimi_jax.pallas.int4_moe import api, kernel

        call = self.jax.jit(
            lambda x, ids, shares, packed: kernel.routed_experts(
                x, ids, shares, packed, target=self.target, fused=fused
            )
        )
        arguments = (case.x, case.ids, case.weights, self.jax.device_put(api.pack(case)))
        compiled = call.lower(*arguments).compile()
        with self.one_at_a_time:
            return np.asarray(compiled(*arguments))

    def numerics(self) -> None:
        spec = specs.Spec(name="numerics", experts=12, hidden=1024, width=512, choices=4)
        wide = dataclasses.replace(spec, width=1024)

        def one(job: tuple[str, specs.Case]) -> tuple[str, float]:
            return job[0], self.error(job[1], fused=self.fused)

        jobs = []
        for rows in NUMERIC_ROWS:
            case = specs.draw(spec if rows % 2 else wide, rows, np.random.default_rng(rows))
            jobs.append((f"M={rows}", case))
        case = specs.draw(spec, 33, np.random.default_rng(1), scales=(1e-6, 1e2))
        case.x = (case.x * np.float32(1e-3)).astype(case.x.dtype)
        jobs.append(("scales 1e-6 to 1e2", case))
        case = specs.draw(spec, 100, np.random.default_rng(2))
        case.ids[:, 0], case.ids[:, 1:] = 5, -1
        jobs.append(("one expert takes every row", case))
        for name, error in self.pool.map(one, jobs):
            self.check(name, error < ERROR_BOUND, error=error)

        case = specs.draw(spec, 24, np.random.default_rng(3))
        case.ids[case.ids == 7] = -1
        case.ids[5] = -1
        before = self.evaluate(case, fused=self.fused)
        case.x[5], case.weights[5] = np.nan, np.nan
        case.gate_up_scales[7], case.down_scales[7] = np.nan, np.nan
        after = self.evaluate(case, fused=self.fused)
        self.check("NaN in dead rows and unused experts", np.array_equal(before, after))
        case.ids[:] = -1
        self.check("nothing routed is zero", not self.evaluate(case, fused=self.fused).any())

    def check_packing(self, spec: specs.Spec) -> None:
        from kimi_jax.pallas.int4_moe.packed import unpack

        packed = self.weights(spec)[0]
        again = self.jax.jit(unpack)(packed)
        same = all(
            bool((a.view("uint8") == b.view("uint8")).all())
            for a, b in zip(again, self.canonical, strict=True)
        )
        self.check(f"{spec.name}: packing is undone bit for bit", same)

    def bits(self, spec: specs.Spec, rows: tuple[int, ...]) -> None:
        """A row's result in batches of all the sizes, in another order, and time after time."""
        most = max(rows)
        packed = self.weights(spec)[:1]
        x, shares = self.inputs(spec, most)
        ids = self.routing(spec, most, 1)[0]

        def out(index: np.ndarray) -> np.ndarray:
            call = self.single(spec, len(index))
            return np.asarray(call(x[index], shares[index], [ids[index]], packed))

        whole = out(np.arange(most))
        self.check(f"{spec.name}: finite", np.isfinite(whole).all())
        for m in rows:
            for start in {0, most - m}:
                index = np.arange(start, start + m)
                same = np.array_equal(out(index), whole[index])
                self.check(f"{spec.name}: rows {start}.. of {m} bit-equal to M={most}", same)
        order = np.random.default_rng(0).permutation(most)
        self.check(f"{spec.name}: in another order", np.array_equal(out(order), whole[order]))
        repeats = [np.array_equal(out(np.arange(most)), whole) for _ in range(20)]
        self.check(f"{spec.name}: 20 times the same", all(repeats), same=sum(repeats))
        self.check_against_reference(spec, most, x, ids, shares, whole)

    def check_against_reference(self, spec, rows, x, ids, shares, out) -> None:
        """float32 products at full precision, on the same GPU."""
        from kimi_jax.pallas.int4_moe import reference

        expected = np.asarray(
            self.jax.jit(reference.routed_experts)(x, ids, shares, *self.canonical), np.float64
        )
        error = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
        self.check(f"{spec.name}: M={rows} against float32", error < ERROR_BOUND, error=error)

    # Fast?

    def time(self, spec: specs.Spec, rows: int, tiling: Any, fused: bool) -> dict[str, float]:
        """us per call, and what the calls read."""
        call = self.compiled(spec, rows, tiling, fused, CALLS)
        ids = self.routing(spec, rows, CALLS)
        x, shares = self.inputs(spec, rows)
        arguments = (x, shares, self.jax.device_put(ids), self.weights(spec))
        call(*arguments).block_until_ready()
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            for _ in range(RUNS):
                out = call(*arguments)
            out.block_until_ready()
            times.append((time.perf_counter() - began) / (RUNS * CALLS))
        unique = float(np.mean([len(np.unique(i[i >= 0])) for i in ids]))
        seconds = float(np.median(times))
        num_bytes = unique * spec.expert_bytes()
        return {
            "us": seconds * 1e6,
            "spread_us": (max(times) - min(times)) * 1e6,
            "kernel_us": self.kernel_time(call, arguments),
            "unique": unique,
            "bytes": num_bytes,
            "gbs": num_bytes / seconds / 1e9,
            "percent": 100 * num_bytes / seconds / self.bandwidth,
            "floor_us": num_bytes / self.bandwidth * 1e6,
        }

    def kernel_time(self, call: Any, arguments: tuple[Any, ...]) -> float | None:
        """us of the kernel alone, by CUPTI; None where that fails."""
        try:
            from jax.experimental.mosaic.gpu import profiler

            _, events = profiler.measure(call, aggregate=False)(*arguments)
            times = collections.defaultdict(list)
            for name, ms in events:
                if "int4_moe" in name:
                    times[name].append(ms * 1e3)
            return sum(float(np.median(of_one)) for of_one in times.values()) or None
        except Exception:  # the wall time is what counts
            return None

    def cell(
        self, spec: specs.Spec, rows: int, *, small: bool = False, fused: bool | None = None
    ) -> None:
        fused = self.fused if fused is None else fused
        tiling = self.tiling(spec, rows, small=small)
        name = f"sm_120 tiling, {spec.name}" if small else spec.name
        name = name if fused else f"{name}, two launches"
        wanted = {}
        if spec.name == name and rows in specs.ROWS:
            place = specs.ROWS.index(rows)
            wanted = {k: v[place] for k, v in TARGETS.get(name, {}).items()}
        record = self.time(spec, rows, tiling, fused)
        self.write(name=name, rows=rows, fused=fused, tiling=brief(tiling), **record, **wanted)
        print(
            f"   {name} M={rows}: {record['us']:.1f} us, {record['gbs']:.0f} GB/s,"
            f" {record['percent']:.1f} %, floor {record['floor_us']:.1f} us {wanted}",
            flush=True,
        )

    def steps(self, spec: specs.Spec) -> None:
        """One row more must not cost more than its experts' bytes."""
        every = [m for pair in PAIRS for m in (pair, pair + 1)]
        jobs = [
            self.pool.submit(self.compiled, spec, m, self.tiling(spec, m), self.fused, CALLS)
            for m in every
        ]
        for job in jobs:
            job.result()
            self.write(compiled=True)
        for m in PAIRS:
            one, two = (self.time(spec, n, self.tiling(spec, n), self.fused) for n in (m, m + 1))
            ratio = two["us"] / one["us"] / (two["bytes"] / one["bytes"])
            record = dict(us_m=one["us"], us_m1=two["us"], tiling=brief(self.tiling(spec, m)))
            self.write(step_ratio=ratio, step_rows=m, step_name=spec.name, **record)

    def tune(self, spec: specs.Spec, rows: int) -> None:
        """The tilings around the rule's, each timed; the best ones go into tuning.MEASURED."""
        if time.monotonic() - BEGAN > self.arguments.minutes * 60:
            self.write(skipped="out of time")
            return
        tilings = list(neighbours(self, spec, rows))
        jobs = [
            (t, self.pool.submit(self.compiled, spec, rows, t, self.fused, CALLS)) for t in tilings
        ]
        found = []
        for tiling, job in jobs:
            try:
                job.result()
                record = self.time(spec, rows, tiling, self.fused)
            except Exception as error:
                self.write(error=f"{tiling}: {type(error).__name__}: {error}")
                continue
            found.append((record["us"], tiling))
            self.write(name=f"tune {spec.name}", rows=rows, tiling=brief(tiling), **record)
        found.sort(key=lambda pair: pair[0])
        rule = self.tiling(spec, rows)
        for us, tiling in found[:3]:
            mark = "  (the rule's)" if tiling == rule else ""
            print(f"   {spec.name} M={rows}: {us:.1f} us {tiling}{mark}", flush=True)
        best = found[0][1]
        over = spec.routed_over or spec.experts
        key = (rows, spec.experts, over, spec.hidden, spec.width)
        self.write(best=repr(best), key=key, us_best=found[0][0])
        for entry in list(self.cache):
            if entry[0] == "compiled":
                del self.cache[entry]


BEGAN = time.monotonic()


def neighbours(child: Child, spec: specs.Spec, rows: int) -> Iterator[Any]:
    from kimi_jax.pallas.int4_moe import tuning

    shape, rule = child.shape(spec, rows), child.tiling(spec, rows)
    yield rule
    yield dataclasses.replace(rule, stream=True)
    seen = {rule}
    for tile_rows in {rule.tile_rows, max(8, rule.tile_rows // 2), min(32, rule.tile_rows * 2)}:
        if tile_rows > 8 and tile_rows // 2 >= rows:
            continue
        for warp_blocks in {
            rule.warp_blocks,
            max(1, rule.warp_blocks // 2),
            min(8, 2 * rule.warp_blocks),
        }:
            if tile_rows != rule.tile_rows and warp_blocks != rule.warp_blocks:
                continue
            for tiling in tuning.candidates(
                shape, child.target, tile_rows=tile_rows, warp_blocks=warp_blocks
            ):
                if tiling not in seen:
                    seen.add(tiling)
                    yield tiling


def brief(tiling: Any) -> str:
    return (
        f"rows {tiling.tile_rows} blocks {tiling.warp_blocks} down"
        f" {tiling.down_tiles}x{tiling.down_units} slots {tiling.slots}"
        + (" stream" if tiling.stream else "")
    )


if __name__ == "__main__":
    options = parse()
    if options.child:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        Child(options).run()
    else:
        sys.exit(main())
