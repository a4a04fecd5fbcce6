"""Compiles the tree attention kernels for every GPU they serve, on a machine without one.

  python3 tests/compile_tree_mla.py
  python3 tests/compile_tree_mla.py --targets sm_120 --rows 9 --heads 8

Not part of the normal tests: it needs JAX's CUDA wheels (`pip install -e .[cuda13]`; nothing runs
on a GPU) and minutes. A line for each program: registers, spills, matrix instructions, shared and
temporary memory. Checked, exit code 1 otherwise: shared memory fits the target; the matrix
instructions are those that were meant; no page is copied (temporary memory is the units' sums and
little more); two layers compile each kernel once.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import sys
import tempfile

import without_gpu

PAGES, BATCH, LAYERS = 64, 2, 3
SLACK = 256 * 1024  # bytes of temporary memory beside the units' sums


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(without_gpu.DEVICES))
    parser.add_argument("--rows", default="1,9,33")
    parser.add_argument("--heads", default="8,64,4", help="4: the tiny model's sizes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return compile_for(arguments.child, arguments)
    return without_gpu.each(__file__, arguments.targets.split(","))


def compile_for(name: str, arguments: argparse.Namespace) -> int:
    dump = pathlib.Path(tempfile.mkdtemp(prefix=f"mosaic-{name}"))
    os.environ.update(
        MOSAIC_GPU_DUMP_TO=str(dump), MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_PTX="1"
    )
    import jax

    from kimi_jax.pallas.stream.target import KNOWN
    from kimi_jax.pallas.tree_mla import plan, specs

    mesh = without_gpu.mesh(name)
    cores = ("wgmma", "mma") if name == "sm_90" else ("mma",)
    bad = 0
    with jax.set_mesh(mesh):
        for spec in (specs.K26_TP8, specs.K26, specs.TINY):
            if str(spec.heads) not in arguments.heads.split(","):
                continue
            for rows in map(int, arguments.rows.split(",")):
                for core in cores:
                    few, many = BATCH * rows, None  # rows of a call: units of few or many queries
                    plans = {
                        plan.make(
                            KNOWN[name],
                            **dataclasses.asdict(spec),
                            max_rows=rows,
                            num_rows=num_rows,
                            tensor_core=core,
                        )
                        for num_rows in (few, many)
                    }
                    for made in plans:
                        bad += bool(one(spec, rows, made, KNOWN[name], mesh, dump))
    return int(bad > 0)


def one(spec, rows, made, target, mesh, dump: pathlib.Path) -> list[str]:
    """Compiles two layers and prints a line."""
    import functools

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from kimi_jax.pallas.tree_mla import mosaic, schedule

    core = made.tensor_core
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(dtype, *size):
        return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

    attend = jax.jit(functools.partial(mosaic.attend, made, scale=0.1, max_rows=rows))

    def layers(q, latent, *others):
        first, _ = attend(q, latent, 0, *others)
        second, _ = attend(q, latent, 1, *others)
        return first, second

    for old in dump.iterdir():
        old.unlink()
    width, num_rows = spec.rank + spec.rope, BATCH * rows
    compiled = (
        jax.jit(layers)
        .lower(
            array(jnp.bfloat16, num_rows, spec.heads, width),
            array(jnp.bfloat16, LAYERS, PAGES, spec.page_size, width),
            array(jnp.bfloat16, num_rows, width),
            array(jnp.uint32, num_rows, -(-rows // 32)),
            *[array(jnp.int32, BATCH)] * 3,
            array(jnp.int32, BATCH, PAGES),
        )
        .compile()
    )
    units = schedule.max_units(
        made,
        batch=BATCH,
        max_rows=rows,
        pool_tokens=PAGES * spec.page_size,
        max_tokens=PAGES * spec.page_size,
    )
    sums = units * made.queries * (spec.rank + 2) * 4
    reports = [path.read_text() for path in dump.glob("*.ptxas")]
    programs = "".join(path.read_text() for path in dump.glob("*.ptx"))
    wgmma, mma = programs.count("wgmma.mma_async"), programs.count("mma.sync.aligned")
    registers = [int(n) for text in reports for n in re.findall(r"Used (\d+) registers", text)]
    spills = [int(n) for text in reports for n in re.findall(r"(\d+) bytes spill stores", text)]
    temporary = compiled.memory_analysis().temp_size_in_bytes
    problems = []
    if made.shared_bytes > target.shared_bytes:
        problems.append(f"shared memory {made.shared_bytes} > {target.shared_bytes}")
    if bool(wgmma) != (core == "wgmma") or bool(mma) != (core == "mma"):
        problems.append(f"{wgmma} wgmma and {mma} mma.sync instructions for {core}")
    if temporary > LAYERS * sums + SLACK:
        problems.append(f"temporary memory {temporary}, expected about {2 * sums}")
    if len(reports) != 2:
        problems.append(f"{len(reports)} kernels compiled, expected 2")
    print(
        f"{target.name} {core:5} heads {spec.heads:2} rows {rows:2} regs {max(registers):3}"
        f" spill {max(spills):4} B  {wgmma or mma:3} instructions, {made.queries:2} queries,"
        f" shared {made.shared_bytes:6}  temp {temporary:9}  {'; '.join(problems) or 'ok'}",
        flush=True,
    )
    return problems


if __name__ == "__main__":
    sys.exit(main())
