"""Compiles the routed experts' kernel for every GPU it serves, on a machine without one.

  python3 tests/compile_int4_moe.py                 all targets, the real model's and the tiny one's
  python3 tests/compile_int4_moe.py --targets sm_120 --rows 1,9

Not part of the normal tests: it needs JAX's CUDA wheels (`pip install -e .[cuda13]`; nothing runs
on a GPU) and minutes. A line for each program: registers, spills, shared memory, temporary memory.
Checked, exit code 1 otherwise: shared memory fits the target; the temporary memory is the hidden
rows and little more, so that no weight is copied or expanded; the compiled program has no copy;
four layers, by array or by index into a stack, compile one kernel.
"""

import argparse
import os
import pathlib
import re
import sys
import tempfile

import without_gpu

ROWS = (1, 2, 4, 9, 17, 33, 64, 128, 160, 256)
LAYERS = 4
SLACK = 64 * 1024  # bytes of temporary memory beside what the calls hand on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(without_gpu.DEVICES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--specs", default="TP8 slice,EP8 shapes,tiny-k2")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return compile_for(arguments.child, arguments)
    return without_gpu.each(__file__, arguments.targets.split(","))


def compile_for(name: str, arguments: argparse.Namespace) -> int:
    dump = tempfile.mkdtemp(prefix=f"mosaic-{name}")
    os.environ.update(MOSAIC_GPU_DUMP_TO=dump, MOSAIC_GPU_DUMP_PTXAS="1")
    import jax

    from kimi_jax.pallas.int4_moe import specs
    from kimi_jax.pallas.stream.target import KNOWN

    mesh = without_gpu.mesh(name)
    wanted = arguments.specs.split(",")
    bad = 0
    with jax.set_mesh(mesh):
        for spec in (specs.TP8, specs.EP8, specs.TINY, specs.TINY_TP8, *specs.AWKWARD):
            if spec.name not in wanted:
                continue
            for rows in map(int, arguments.rows.split(",")):
                for stacked in (False, True) if rows == 9 else (False,):
                    problems = one(spec, rows, KNOWN[name], mesh, pathlib.Path(dump), stacked)
                    bad += bool(problems)
    return int(bad > 0)


def one(spec, rows, target, mesh, dump: pathlib.Path, stacked: bool) -> list[str]:
    """Compiles LAYERS calls, each fed by the one before it, and prints a line."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from kimi_jax.pallas.int4_moe import api, tuning
    from kimi_jax.pallas.int4_moe.packed import COUNTER_WORDS, Packed
    from kimi_jax.pallas.int4_moe.program import Layout, Shape

    shape = Shape(
        rows=rows,
        choices=spec.choices,
        experts=spec.experts,
        hidden=spec.hidden,
        width=spec.width,
    )
    layout = Layout(shape=shape, tiling=tuning.choose(shape, target))
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(dtype, *size):
        return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

    leading = (LAYERS,) if stacked else ()
    gate_up = (*leading, spec.experts, shape.hidden_units, shape.gate_blocks, 288)
    down = (*leading, spec.experts, shape.down_tiles, shape.width_units, 4, 288)
    packed = Packed(
        gate_up=array(jnp.int32, *gate_up),
        down=array(jnp.int32, *down),
        counter=array(jnp.int32, COUNTER_WORDS),
        hidden=spec.hidden,
        width=spec.width,
    )

    def forward(x, ids, shares, weights):
        for layer in range(LAYERS):
            experts, index = (weights, layer) if stacked else (weights[layer], None)
            out = api.routed_experts(x, ids, shares, experts, layer=index, target=target)
            x = (x.astype(jnp.float32) + out).astype(jnp.bfloat16)
        return x

    for old in dump.iterdir():
        old.unlink()
    compiled = (
        jax.jit(forward)
        .lower(
            array(jnp.bfloat16, rows, spec.hidden),
            array(jnp.int32, rows, spec.choices),
            array(jnp.float32, rows, spec.choices),
            packed if stacked else [packed] * LAYERS,
        )
        .compile()
    )
    reports = [path.read_text() for path in dump.glob("*.ptxas")]
    registers = [int(n) for text in reports for n in re.findall(r"Used (\d+) registers", text)]
    spills = [int(n) for text in reports for n in re.findall(r"(\d+) bytes spill stores", text)]
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # Each call's hidden rows, output and next x; a layer's weights are hundreds of times as much.
    call = shape.pairs * shape.padded_width * 2 + rows * shape.padded_hidden * (4 + 2)
    allowed = LAYERS * call + SLACK
    text = compiled.as_text()
    copies = re.findall(r"= \S+ copy(?:-start)?\(", text)
    problems = []
    if layout.shared_bytes > target.shared_bytes:
        problems.append(f"shared memory {layout.shared_bytes} > {target.shared_bytes}")
    if temporary > allowed:
        problems.append(f"temporary memory: expected at most {allowed}")
    if copies:
        problems.append(f"copies: {copies[:3]}")
    if len(reports) != 1:
        problems.append(f"{len(reports)} kernels compiled, expected 1")
    where = "stack" if stacked else "arrays"
    print(
        f"{target.name} {spec.name:14} M={rows:<4} {where:6} regs {max(registers, default=0):3}"
        f" spill {max(spills, default=0):4} B  shared {layout.shared_bytes:6}"
        f"  temp {temporary:9}  {layout.tiling.tile_rows}/{layout.tiling.warp_blocks}"
        f"/{layout.tiling.down_tiles}x{layout.tiling.down_units}/{layout.tiling.slots}"
        f"  {'; '.join(problems) or 'ok'}",
        flush=True,
    )
    return problems


if __name__ == "__main__":
    sys.exit(main())
