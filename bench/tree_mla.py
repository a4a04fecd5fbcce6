"""Is tree-masked MLA right on this GPU, and how far is it from what the GPU can do?

  python3 -m bench.tree_mla --output_json tree_mla.json    about three minutes and a half on an H200
  python3 -m bench.tree_mla --quick                        fewer checks and cells, a minute

Checked: random trees, chains and stars against float64, contexts up to 131,073, NaN in whatever
belongs to nobody, and that a row is the same bits whatever else is in the call.

Timed: wall time per call of calls chained inside one jit, median; each call reads another layer of
the cache, so that nothing is warm. The kernels' own time (CUPTI) beside it. Bytes: context,
queries, own rows and outputs, each once. Operations: two products for each row, head and token.
Floor: the larger of bytes over the read bandwidth and operations over the rate of a large bfloat16
product, both measured in the same run. Commit: accepted rows into the pages of all layers.

The work is done by a child process, section by section. One that hangs or dies is recorded, and a
new child goes on behind it.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from bench import child
from kimi_jax.pallas.tree_mla import specs

SILENCE = 60.0  # seconds without a word from the child after which it counts as hung
RUNS, REPEATS = 4, 5  # runs enqueued back to back; medians are of REPEATS of them
ERROR_BOUND = 1e-2
POOL_BYTES = 8 << 30  # of the caches of a cell, all its layers together

# us for specs.ROWS: what has to be reached, and the best of FA3-MLA and FlashMLA (vLLM 0.25.1's
# binaries, causal, no tree) on one H200.
TARGETS = {
    (8, 1, 4096): ((10, 12, 14, 17), (18, 23, 25, 30)),
    (8, 1, 32768): ((20, 24, 30, 40), (31, 39, 46, 60)),
    (8, 8, 4096): ((15, 22, 30, 46), (22, 32, 40, 55)),
    (8, 8, 32768): ((85, 125, 185, 310), (87, 132, 185, 294)),
    (8, 64, 4096): ((85, 125, 205, 335), (87, 129, 205, 319)),
    (64, 1, 4096): ((18, 28, 36, 50), (20, 30, 38, 51)),
    (64, 1, 32768): ((32, 86, 150, 250), (35, 86, 141, 229)),
}
QUICK = (
    (specs.K26_TP8, 1, 4096, 1),
    (specs.K26_TP8, 1, 4096, 9),
    (specs.K26_TP8, 1, 4096, 33),
    (specs.K26_TP8, 1, 32768, 33),
    (specs.K26_TP8, 64, 4096, 33),
)
QUICK_VARIANTS = (
    (QUICK[0], {"overlap": True}),
    (QUICK[2], {"overlap": True}),
    (QUICK[2], {"max_queries": 56}),
    (QUICK[4], {"max_queries": 72}),
    (QUICK[0], {"split": 128}),
    (QUICK[2], {"max_queries": 24}),
)
CORES = ("wgmma", "mma")
SAME_BITS = {"overlap", "max_queries"}  # changes after which a result has to be what it was
VARIANTS = (  # cells, and their rows, for which the plan is changed
    ((specs.K26_TP8, 1, 4096), (1, 9)),
    ((specs.K26_TP8, 1, 32768), (9,)),
    ((specs.K26_TP8, 64, 4096), (9, 33)),
    ((specs.K26, 1, 32768), (33,)),
)
CHANGES = (
    {"overlap": True},
    {"split": 128},
    {"split": 512},
    {"sums": "float32"},
    {"max_queries": 24},
    {"max_queries": 56},
    {"max_queries": 72},
    {"tensor_core": "mma"},
)


# ------------------------------------------------------------------ the parent


def main() -> int:
    arguments = parse()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tree_mla"))
    records: list[dict[str, Any]] = []
    done: list[str] = []
    began = time.monotonic()
    for attempt in range(12):
        log = folder / f"records-{attempt}.jsonl"
        failed = watch(log, done, began)
        found = child.read(log)
        records += found
        done += [r["section"] for r in found if r.get("done") or r.get("error")]
        if failed is None:
            break
        records.append({"section": failed, "error": "hung or died"})
        if failed == "start" and "start" in done:
            break
        done.append(failed)
        print(f"!! {failed} hung or died; going on behind it", flush=True)
    report = {
        "command": " ".join(sys.argv),
        "seconds": round(time.monotonic() - began, 1),
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
    parser.add_argument("--quick", action="store_true", help="fewer checks, cells and variants")
    parser.add_argument("--seconds", type=float, default=200, help="no variant begins after these")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--done", default="", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def watch(log: pathlib.Path, done: list[str], began: float) -> str | None:
    """A child's run, behind the sections that are done; see `child.watch`."""
    command = [sys.executable, "-m", "bench.tree_mla", *sys.argv[1:], "--child", str(log)]
    command += ["--done", "|".join(done), "--began", str(began)]
    return child.watch(command, log, silence=SILENCE)


def print_tables(records: list[dict[str, Any]]) -> None:
    print()
    for record in records:
        if "error" in record:
            print(f"FAILED {record['section']}: {record['error'].splitlines()[-1][:300]}")
    checks = [r for r in records if "check" in r]
    print(f"checks: {sum(r['passed'] for r in checks)} of {len(checks)} passed")
    for record in checks:
        if not record["passed"]:
            print(f"  NOT PASSED {record['check']}: {record['detail']}")
    for record in records:
        if "bandwidth" in record:
            print(
                f"{record['device']}: {record['bandwidth'] / 1e12:.2f} TB/s read, "
                f"{record['rate'] / 1e12:.0f} TFLOP/s"
            )
    for record in records:
        if "commit_us" in record:
            print(
                f"commit of {record['rows']} rows, {record['layers']} layers: "
                f"{record['commit_us']:.1f} us, {record['temporary']} temporary bytes"
            )
    timed = [r for r in records if "us" in r]
    changed = [r for r in timed if r["change"]]
    if changed:
        print("\nvariants: us, and relative to the plan's own")
    for record in changed:
        own = [r["us"] for r in timed if r["cell"] == record["cell"] and not r["change"]]
        ratio = f"{record['us'] / own[0]:.2f}" if own else "-"
        parts = f"kernels {shown(record['kernel_us'])}, merge {shown(record['merge_us'])}"
        print(
            f"  {record['cell']:26} {record['change']:24} {record['us']:8.1f} {ratio:>6}  {parts}"
        )
    print(
        f"\n{'heads, batch, context, rows':26} {'us':>8} {'kernels':>8} {'merge':>6} {'GB/s':>6}"
        f" {'TFLOP/s':>7} {'floor':>6} {'%':>5} {'must':>5} {'peers':>5}  plan"
    )
    for record in timed:
        if not record["change"]:
            print(
                f"{record['cell']:26} {record['us']:8.1f} {shown(record['kernel_us']):>8}"
                f" {shown(record['merge_us']):>6} {record['gbs']:6.0f} {record['tflops']:7.0f}"
                f" {record['floor_us']:6.1f} {record['percent']:5.1f} {record['must']:>5}"
                f" {record['peers']:>5}  {record['plan']}"
            )


def shown(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


# ------------------------------------------------------------------ the child

Cell = tuple[specs.Spec, int, int, int]  # spec, batch, context, rows


def name_of(cell: Cell) -> str:
    spec, batch, context, rows = cell
    return f"{spec.heads}, {batch}, {context}, {rows}"


class Child:
    """All sections; what they find goes to the log as JSON, a line a record."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import jax
        import jax.numpy as jnp

        self.arguments, self.jax, self.jnp = arguments, jax, jnp
        self.log = open(arguments.child, "a")  # noqa: SIM115 (lives as long as the process)
        self.section = "start"
        self.done = set(arguments.done.split("|"))
        self.compilers, self.checkers = ThreadPoolExecutor(8), ThreadPoolExecutor(6)
        self.jobs: dict[Any, Future] = {}
        self.caches: dict[Any, Any] = {}
        self.outputs: dict[Cell, np.ndarray] = {}

    def write(self, **record: Any) -> None:
        self.log.write(json.dumps({"section": self.section, **record}) + "\n")
        self.log.flush()

    def check(self, name: str, passed: bool, **detail: Any) -> None:
        self.write(check=name, passed=bool(passed), detail=detail)
        print(f"   {'ok' if passed else 'NOT PASSED'}: {name} {detail}", flush=True)

    def run(self) -> None:
        for name, body in self.sections():
            if name in self.done and name not in ("start", "compile", "compile variants"):
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
                self.write(error=f"{text}\n{type(error).__name__}: {str(error)[:300]}")
                if name == "start" or "CUDA" in str(error) or "INTERNAL" in str(error):
                    os._exit(1)  # after an error of the device, only a new process works
            print(f"-- {name}: {time.monotonic() - began:.1f} s", flush=True)

    def sections(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "start", self.start
        for core in CORES:
            yield f"small {core}", functools.partial(self.small, core)
        cells = [(*cell, rows) for cell in specs.CELLS for rows in specs.ROWS]
        if self.arguments.quick:
            cells = list(QUICK)
        yield "compile", functools.partial(self.compile_ahead, [(cell, {}) for cell in cells])
        if self.arguments.quick:
            yield "compile variants", functools.partial(self.compile_ahead, QUICK_VARIANTS)
        for core in CORES[:1] if self.arguments.quick else CORES:
            yield f"numerics {core}", functools.partial(self.numerics, core)
            yield f"bits {core}", functools.partial(self.bits, core)
        for cell in cells:
            yield section_of(cell, {}), functools.partial(self.measure, cell, {})
        if self.arguments.quick:
            for cell, change in QUICK_VARIANTS:
                yield section_of(cell, change), functools.partial(self.measure, cell, change)
            return
        variants = [
            ((*cell, n), change) for cell, rows in VARIANTS for n in rows for change in CHANGES
        ]
        variants.sort(key=lambda pair: CHANGES.index(pair[1]))  # the more telling changes first
        yield "compile variants", functools.partial(self.compile_ahead, variants)
        yield "commit", self.commit
        for cell, change in variants:
            yield section_of(cell, change), functools.partial(self.measure_variant, cell, change)

    # Set up.

    def start(self) -> None:
        jax, jnp = self.jax, self.jnp
        from kimi_jax.pallas.stream import target

        device = jax.devices()[0]
        if device.platform != "gpu":
            raise SystemExit(f"bench.tree_mla needs a GPU, the default device is {device}")
        self.target = target.of(device)
        block = jax.jit(lambda: jnp.ones((1 << 29,), jnp.float32))()
        self.bandwidth = block.nbytes / self.seconds(jax.jit(jnp.sum), block)
        del block
        square = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
        product = jax.jit(lambda a: a @ a)
        self.rate = 2 * 8192**3 / self.seconds(product, square)
        self.write(
            device=device.device_kind,
            bandwidth=self.bandwidth,
            rate=self.rate,
            jax=jax.__version__,
            python=sys.version.split()[0],
            platform_version=device.client.platform_version,
            target=dataclasses.asdict(self.target),
        )
        print(f"   {self.bandwidth / 1e12:.2f} TB/s, {self.rate / 1e12:.0f} TFLOP/s", flush=True)

    def seconds(self, call: Any, *operands: Any) -> float:
        """Median wall time of a call, several enqueued at once."""
        self.jax.block_until_ready(call(*operands))
        self.jax.block_until_ready(call(*operands))
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            for _ in range(RUNS):
                last = call(*operands)
            self.jax.block_until_ready(last)
            times.append((time.perf_counter() - began) / RUNS)
        return float(np.median(times))

    # Right?

    @functools.cache  # noqa: B019 (as long as the process)
    def program(self, made: Any, scale: float, max_rows: int) -> Any:
        from kimi_jax.pallas.tree_mla import mosaic

        attend = functools.partial(mosaic.attend, made, scale=scale, max_rows=max_rows)
        return self.jax.jit(attend)

    def evaluate(self, case: specs.Case, **change: Any) -> tuple[np.ndarray, np.ndarray]:
        from kimi_jax.pallas.tree_mla import plan

        q, latent, *others = case.operands()
        sizes = {"rank": case.spec.rank, "max_rows": case.max_rows}
        made = plan.of_shapes(self.target, q, latent, **sizes, **change)
        out, lse = self.program(made, case.scale, case.max_rows)(q, latent, *others)
        return np.asarray(out.astype(self.jnp.float32)), np.asarray(lse)

    def compare_all(self, jobs: list[tuple[str, specs.Case, dict[str, Any]]]) -> None:
        list(self.checkers.map(lambda job: self.compare(job[0], job[1], **job[2]), jobs))

    def compare(self, name: str, case: specs.Case, **change: Any) -> None:
        out, lse = self.evaluate(case, **change)
        truth, true_lse = specs.exact(case)
        error = specs.relative_error(out, truth)
        finite = np.isfinite(true_lse)
        same = bool((np.isneginf(lse) == np.isneginf(true_lse)).all())
        off = float(np.abs(lse[finite] - true_lse[finite]).max()) if finite.any() else 0.0
        passed = error < ERROR_BOUND and off < ERROR_BOUND and same
        self.check(f"{name} {text_of(change)}", passed, error=error, lse=off, nothing=same)

    def small(self, core: str) -> None:
        """Small cases first: a kernel that hangs should do so here."""
        change, quick = {"tensor_core": core}, self.arguments.quick
        one = specs.make(specs.TINY, [1], [5], seed=0, max_rows=1)
        if not quick:
            self.compare("tiny model, one row", one, **change)
        tp8 = specs.make(specs.K26_TP8, [9, 5], [200, 64], seed=2, dead=[2, 0])
        self.compare("TP8", tp8, **change)
        if quick and core == "mma":
            return
        rows, lengths = [1, 9, 33, 5, 0, 17], [0, 1, 15, 16, 17, 300]
        mixed = specs.make(specs.TINY, rows, lengths, seed=1, gap=1, dead=[1, 3, 0, 0, 0, 1])
        jobs = [("tiny model, mixed", mixed, {**change, "split": 128})]
        for i, spec in enumerate(specs.AWKWARD):
            if core == "wgmma" or i == 1 and not quick:
                case = specs.make(spec, [3, 40, 1], [0, 130, 65], seed=i, gap=i)
                jobs.append((f"awkward {i}", case, {**change, "split": 128}))
        self.compare_all(jobs)

    def numerics(self, core: str) -> None:
        change, quick = {"tensor_core": core}, self.arguments.quick
        parents = (specs.random_tree, specs.chain, specs.star)
        jobs = []
        far = specs.make(specs.K26_TP8, [9, 9, 1], [0, 131_072, 64], seed=3, layers=1, gap=2)
        jobs.append(("TP8, contexts 0, 131072 and 64", far, change))
        if not quick:
            jobs.append(("64 heads", specs.make(specs.K26, [3, 9], [700, 64], seed=4), change))
        many = (1, 2, 7, 8, 9, 17, 33, 64) if core == "wgmma" else (9, 33)
        for i, rows in enumerate((33,) if quick else many):
            tree = parents[i % 3]
            sizes = [rows, max(rows // 2, 1)], [4095, 130]
            case = specs.make(specs.K26_TP8, *sizes, seed=i, parents=tree)
            jobs.append((f"TP8, {rows} rows, {tree.__name__}, 4095", case, change))
        for length, rows in () if quick else ((65_537, 9), (131_073, 5)):
            case = specs.make(specs.K26_TP8, [rows], [length], seed=length, layers=1)
            jobs.append((f"TP8, {rows} rows, {length}", case, change))
        self.compare_all(jobs)

    def bits(self, core: str) -> None:
        def same(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
            return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))

        alone = specs.make(specs.K26_TP8, [9], [3000], seed=5, layers=1)
        company = specs.make(
            specs.K26_TP8, [33, 9, 17, 1], [5000, 3000, 0, 64], seed=6, layers=1, gap=1
        )
        table = np.zeros_like(company.page_table)
        table[:] = company.page_table
        used = alone.page_table.shape[1]
        table[1, :used] = alone.page_table[0] + company.latent.shape[1]
        place = slice(int(company.row_start[1]), int(company.row_start[1]) + 9)
        q, own, words = company.q.copy(), company.own.copy(), company.ancestors.copy()
        q[place], own[place] = alone.q, alone.own
        words[place] = 0
        words[place, : alone.ancestors.shape[1]] = alone.ancestors
        together = dataclasses.replace(
            company,
            q=q,
            own=own,
            ancestors=words,
            page_table=table,
            latent=np.concatenate([company.latent, alone.latent], axis=1),
        )
        first = dataclasses.replace(
            alone,
            q=alone.q[:1],
            own=alone.own[:1],
            ancestors=alone.ancestors[:1],
            row_count=np.ones(1, np.int32),
            max_rows=1,
        )

        def start(case: specs.Case, **change: Any) -> Future:
            return self.checkers.submit(self.evaluate, case, tensor_core=core, **change)

        tiled = {
            n: start(alone, max_queries=n) for n in ((24,) if self.arguments.quick else (8, 24))
        }
        pending = start(together), start(first)
        out, lse = start(alone).result()
        repeats = [start(alone).result() for _ in range(20)]
        self.check(f"{core}: the same every time", all(same((out, lse), r) for r in repeats))
        there, root = (future.result() for future in pending)
        self.check(f"{core}: the same in company", same((out, lse), [x[place] for x in there]))
        self.check(f"{core}: a root without its tree", same((out[:1], lse[:1]), root))
        for queries, future in tiled.items():
            name = f"{core}: the same, {queries} queries a unit"
            self.check(name, same((out, lse), future.result()))

    # Fast?

    def plan(self, cell: Cell, change: dict[str, Any]) -> Any:
        from kimi_jax.pallas.tree_mla import plan

        spec, batch, _, rows = cell
        sizes = {**dataclasses.asdict(spec), "max_rows": rows, "num_rows": batch * rows}
        return plan.make(self.target, **sizes, **change)

    def calls_of(self, cell: Cell) -> int:
        """Short calls need a longer chain: the time to start a program must not show.

        As many as Kimi K2.6 has layers: the schedule is made once a step.
        """
        spec, batch, context, rows = cell
        return 20 if batch * context * rows * spec.heads > 2_000_000 else 61

    def layers_of(self, cell: Cell) -> int:
        spec, batch, context, _ = cell
        tokens = batch * context + spec.page_size
        return min(self.calls_of(cell), POOL_BYTES // (tokens * (spec.rank + spec.rope) * 2))

    def chain(self, cell: Cell, change: dict[str, Any]) -> Any:
        from kimi_jax.pallas.tree_mla import mosaic

        made, layers, calls = self.plan(cell, change), self.layers_of(cell), self.calls_of(cell)
        attend = self.jax.jit(functools.partial(mosaic.attend, made), static_argnames=(
            "scale", "max_rows",
        ))  # fmt: skip

        def run(q, latent, *others):
            out = self.jnp.zeros((*q.shape[:2], cell[0].rank), q.dtype)  # one program, not two
            for i in range(calls):
                out, _ = attend(
                    q, latent, i % layers, *others, scale=0.08, max_rows=cell[3], after=out
                )
            return out

        return self.jax.jit(run)

    def shapes(self, cell: Cell) -> tuple[Any, ...]:
        """Shapes of q, latent, own, ancestors, row_start, row_count, length, page_table."""
        spec, batch, context, rows = cell
        struct, jnp = self.jax.ShapeDtypeStruct, self.jnp
        width, pages = spec.rank + spec.rope, batch * context // spec.page_size
        latent = (self.layers_of(cell), pages + 1, spec.page_size, width)
        return (
            struct((batch * rows, spec.heads, width), jnp.bfloat16),
            struct(latent, jnp.bfloat16),
            struct((batch * rows, width), jnp.bfloat16),
            struct((batch * rows, -(-rows // 32)), jnp.uint32),
            *[struct((batch,), jnp.int32)] * 3,
            struct((batch, context // spec.page_size), jnp.int32),
        )

    def operands(self, cell: Cell) -> tuple[Any, ...]:
        jax, jnp = self.jax, self.jnp
        spec, batch, context, rows = cell
        q, latent, own, words, *_ = self.shapes(cell)
        rng = np.random.default_rng(rows)
        trees = [
            specs.ancestors(specs.random_tree(rng, rows), words.shape[1]) for _ in range(batch)
        ]
        if latent.shape not in self.caches:  # one cache at a time: they are large
            self.caches.clear()
            normal = jax.jit(
                functools.partial(jax.random.normal, shape=latent.shape, dtype=q.dtype)
            )
            self.caches[latent.shape] = normal(jax.random.key(1))
        table = 1 + rng.permutation(latent.shape[1] - 1)
        return (
            jax.random.normal(jax.random.key(2), q.shape, q.dtype),
            self.caches[latent.shape],
            jax.random.normal(jax.random.key(3), own.shape, own.dtype),
            jnp.asarray(np.concatenate(trees)),
            jnp.arange(batch, dtype=jnp.int32) * rows,
            jnp.full((batch,), rows, jnp.int32),
            jnp.full((batch,), context, jnp.int32),
            jnp.asarray(table.reshape(batch, -1).astype(np.int32)),
        )

    def compile_ahead(self, wanted: list[tuple[Cell, dict[str, Any]]]) -> None:
        """Begins to compile, in parallel; `measure` takes what is ready or waits for it."""
        self.jobs |= {
            (cell, text_of(change)): self.compilers.submit(self.compiled, cell, change)
            for cell, change in wanted
            if section_of(cell, change) not in self.done
        }

    def compiled(self, cell: Cell, change: dict[str, Any]) -> Any:
        if change and self.late():
            return None
        program = self.chain(cell, change).lower(*self.shapes(cell)).compile()
        self.write(compiled=f"{name_of(cell)} {text_of(change)}")
        return program

    def late(self) -> bool:
        return time.monotonic() - self.arguments.began > self.arguments.seconds

    def measure_variant(self, cell: Cell, change: dict[str, Any]) -> None:
        if not self.late() and self.plan(cell, change) != self.plan(cell, {}):
            self.measure(cell, change)

    def measure(self, cell: Cell, change: dict[str, Any]) -> None:
        job = self.jobs.pop((cell, text_of(change)), None)
        call = job.result() if job else self.compiled(cell, change)
        if call is None:  # out of time
            return
        spec, batch, context, rows = cell
        operands, calls = self.operands(cell), self.calls_of(cell)
        seconds = self.seconds(call, *operands) / calls
        self.same_as_before(cell, change, call(*operands))
        queries = batch * rows * spec.heads
        width = spec.rank + spec.rope
        num_bytes = 2 * (
            batch * context * width + queries * (width + spec.rank) + batch * rows * width
        )
        operations = 2 * queries * (context + rows) * (width + spec.rank)
        floor = max(num_bytes / self.bandwidth, operations / self.rate)
        place = specs.ROWS.index(rows)
        must, peers = (t[place] for t in TARGETS[spec.heads, batch, context])
        kernel_us, merge_us = self.kernel_times(call, operands, calls)
        made = self.plan(cell, change)
        record = {
            "us": seconds * 1e6,
            "kernel_us": kernel_us,
            "merge_us": merge_us,
            "bytes": num_bytes,
            "operations": operations,
            "gbs": num_bytes / seconds / 1e9,
            "tflops": operations / seconds / 1e12,
            "floor_us": floor * 1e6,
            "percent": 100 * floor / seconds,
            "must": must,
            "peers": peers,
        }
        text = f"{made.queries} queries, split {made.split}, {made.slots} slots, {made.tensor_core}"
        self.write(
            cell=name_of(cell),
            change=text_of(change),
            plan=text,
            details=dataclasses.asdict(made),
            **record,
        )
        print(
            f"   {name_of(cell)} {text_of(change)}: {record['us']:.1f} us, floor "
            f"{record['floor_us']:.1f}, must {must}, peers {peers}",
            flush=True,
        )

    def same_as_before(self, cell: Cell, change: dict[str, Any], out: Any) -> None:
        out = np.asarray(out.astype(self.jnp.float32))
        if not change:
            self.outputs[cell] = out
        elif change.keys() <= SAME_BITS and cell in self.outputs:
            same = np.array_equal(out, self.outputs[cell])
            self.check(f"{name_of(cell)}: the same, {text_of(change)}", same)

    def kernel_times(self, call: Any, operands: tuple[Any, ...], calls: int) -> tuple[Any, Any]:
        """us a call of both kernels, and of the merge alone, by CUPTI; None where that fails."""
        try:
            from jax.experimental.mosaic.gpu import profiler

            _, events = profiler.measure(call, aggregate=False)(*operands)
            both = [ms for name, ms in events if "tree_mla" in name]
            merge = [ms for name, ms in events if "tree_mla_merge" in name]
            return sum(both) / calls * 1e3, sum(merge) / calls * 1e3
        except Exception as error:  # the wall time is what counts
            print(f"   no kernel times: {type(error).__name__}: {error}", flush=True)
            return None, None

    def commit(self) -> None:
        """Accepted rows of a step into the pages, for all layers of Kimi K2.6, in place."""
        from kimi_jax import cache

        jax, jnp = self.jax, self.jnp
        layers, pages, page_size, width, calls = 61, 1024, 64, 576, 20
        self.caches.clear()

        @functools.partial(jax.jit, donate_argnums=0)
        def run(latent, rows, page_ids, offsets, valid):
            for i in range(calls):
                latent = cache.write_rows(latent, rows, page_ids[i], offsets[i], valid)
            return latent

        for batch in (1, 8, 64):
            num = batch * 8
            rng = np.random.default_rng(batch)
            latent = jnp.zeros((layers, pages, page_size, width), jnp.bfloat16)
            rows = jax.random.normal(jax.random.key(0), (layers, num, width), jnp.bfloat16)
            others = (
                rows,
                jnp.asarray(rng.integers(0, pages, (calls, num))),
                jnp.asarray(rng.integers(0, page_size, (calls, num))),
                jnp.arange(num) % 8 < 4,
            )
            call = run.lower(latent, *others).compile()
            latent = call(latent, *others)
            latent.block_until_ready()
            times = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                for _ in range(RUNS):
                    latent = call(latent, *others)
                latent.block_until_ready()
                times.append((time.perf_counter() - began) / (RUNS * calls))
            temporary = call.memory_analysis().temp_size_in_bytes
            self.write(
                commit_us=float(np.median(times)) * 1e6,
                rows=num // 2,
                layers=layers,
                temporary=temporary,
            )
            self.check("commit in place", temporary < latent.nbytes // 8, temporary=temporary)


def section_of(cell: Cell, change: dict[str, Any]) -> str:
    return f"variant {name_of(cell)} {text_of(change)}" if change else f"cell {name_of(cell)}"


def text_of(change: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in change.items())


if __name__ == "__main__":
    options = parse()
    if options.child:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        Child(options).run()
    else:
        sys.exit(main())
