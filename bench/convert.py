"""Is converting as fast as copying, and loading the result as fast as reading?

    python3 bench/convert.py --folder=/scratch/room --output_json=convert.json

Makes a checkpoint of two layers at K2.6's dimensions with few experts (6 GB), then, round by round
and with the source in the page cache: `cp` and `sync` of its files; conversion of the same files,
hashing included. The ratio of the two speeds, in each round, is the result. Then verifying, and
loading both folders onto the default device. Needs twice the checkpoint's size of disk.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses

import jax

from kimi_jax.checkpoint import hf, names
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.place import Seconds
from kimi_jax.checkpoint.read import open_checkpoint
from kimi_jax.checkpoint.verify import verify
from kimi_jax.config import PRESETS, ModelConfig, to_hf

SIZES = {"BF16": 2, "F32": 4, "I32": 4}
FINITE = {"BF16": 0xBFFFBFFFBFFFBFFF, "F32": 0xBFFFFFFFBFFFFFFF, "I32": 0xFFFFFFFFFFFFFFFF}
"""Bits of 64 random ones that leave finite numbers."""


def configuration(experts: int, vocab: int) -> ModelConfig:
    """K2.6 with a dense layer, a layer of experts, and fewer of them."""
    special = {
        "bos_token_id": vocab - 256,
        "eos_token_ids": (vocab - 255, vocab - 254),
        "pad_token_id": vocab - 1,
        "vocab_size": vocab,
    }
    return dataclasses.replace(
        PRESETS["kimi-k2.6"],
        num_hidden_layers=2,
        n_routed_experts=experts,
        num_experts_per_tok=min(8, experts),
        **special,
    )


def write_source(folder: Path, config: ModelConfig, shards: int) -> int:
    """Random weights under the published names; returns their bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    rng = np.random.default_rng(0)
    table = names.model_tensors(config)
    order = sorted(table, key=lambda name: (not name.startswith("model.layers."), name))
    total = sum(np.prod(e.shape) * SIZES[e.dtypes[0]] for e in table.values())
    weight_map, number, begun = {}, 0, []
    groups: list[list[str]] = [[]]
    for name in order:
        nbytes = int(np.prod(table[name].shape)) * SIZES[table[name].dtypes[0]]
        if groups[-1] and sum(begun) + nbytes > 1.2 * total / shards:
            groups.append([])
            begun = []
        groups[-1].append(name)
        begun.append(nbytes)
    for number, group in enumerate(groups):
        path = folder / f"model-{number + 1:05d}-of-{len(groups):06d}.safetensors"
        header, end = {}, 0
        for name in group:
            expected = table[name]
            nbytes = int(np.prod(expected.shape)) * SIZES[expected.dtypes[0]]
            header["language_model." + name] = {
                "dtype": expected.dtypes[0],
                "shape": expected.shape,
                "data_offsets": [end, end + nbytes],
            }
            end += nbytes
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in group:
                expected = table[name]
                if expected.value is not None:
                    file.write(np.array(expected.value, np.int32).tobytes())
                    continue
                left = int(np.prod(expected.shape)) * SIZES[expected.dtypes[0]]
                while left:
                    block = rng.integers(0, 1 << 64, -(-min(left, 1 << 24) // 8), np.uint64)
                    block &= np.uint64(FINITE[expected.dtypes[0]])
                    left -= file.write(block.tobytes()[:left])
        weight_map |= dict.fromkeys(header, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.iterdir())


def warm(folder: Path) -> None:
    """Reads every file, so that the page cache holds it."""
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def touch_memory(nbytes: int) -> None:
    """Takes memory for what comes, and lets it go.

    A virtual machine gives memory that is free for a few seconds back to its host, and getting it
    again can take longer than writing it. Copy and conversion both begin without that.
    """
    program = f"import numpy; numpy.empty({nbytes}, numpy.uint8)[::4096] = 1"
    subprocess.run([sys.executable, "-c", program], check=True)


def peak_memory() -> int:
    """Bytes of this process."""
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return 1024 * int(match[1])


def copy_seconds(source: Path, target: Path) -> float:
    """`cp` and `sync`."""
    os.sync()
    start = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    os.sync()
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="room for twice the size")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=163840)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output_json", type=Path)
    args = parser.parse_args()
    source, output = args.folder / "source", args.folder / "converted"
    shutil.rmtree(source, ignore_errors=True)
    shutil.rmtree(output, ignore_errors=True)
    nbytes = write_source(source, configuration(args.experts, args.vocab), args.shards)
    print(f"{nbytes / 1e9:.2f} GB in {len([*source.glob('*.safetensors')])} files")
    from orbax.checkpoint import v1  # noqa: F401, imported before any clock runs

    room = nbytes + (3 << 30)  # the files, and buffers
    rounds = []
    for number in range(args.rounds):
        shutil.rmtree(output, ignore_errors=True)
        warm(source)
        touch_memory(room)
        copied = copy_seconds(source, args.folder / "copy")
        warm(source)
        os.sync()
        touch_memory(room)
        worked = time.process_time()
        report = convert(hf.open_model(source), output, progress=False)
        worked = time.process_time() - worked
        rounds.append(
            {
                "convert_cpu_s": worked,
                "load_average": os.getloadavg()[0],  # of the machine; above its cores: disturbed
                "cp_sync_s": copied,
                "convert_s": report.total_seconds,
                "ratio": copied / report.total_seconds,
                "read_s": report.read_seconds,
                "hash_s": report.hash_seconds,
                "write_s": report.write_seconds,
                "bytes_read_over_size": report.bytes_read
                / sum(path.stat().st_size for path in source.glob("*.safetensors")),
            }
        )
        print(
            f"round {number}: cp + sync {copied:.2f} s ({nbytes / 1e6 / copied:,.0f} MB/s), convert"
            f" {report.total_seconds:.2f} s ({nbytes / 1e6 / report.total_seconds:,.0f} MB/s):"
            f" {copied / report.total_seconds:.0%} of cp; read {report.read_seconds:.1f} s, hash"
            f" {report.hash_seconds:.1f} s, write {report.write_seconds:.1f} s; processor"
            f" {worked:.1f} s, load average {os.getloadavg()[0]:.1f}"
        )
    peak = peak_memory()
    verdict = verify(open_checkpoint(output), progress=False)
    assert verdict.good, verdict.faults
    loads = {}
    for kind, folder in (("published", source), ("converted", output)):
        warm(source) if kind == "published" else None
        seconds = Seconds()
        weights = open_checkpoint(folder).load(dtype="bfloat16", progress=False, seconds=seconds)
        del weights
        loads[kind] = vars(seconds)
        print(f"load {kind}: {seconds.line(nbytes)}")
    result = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "jax": jax.__version__,
        "bytes": nbytes,
        "rounds": rounds,
        "ratio_median": statistics.median(r["ratio"] for r in rounds),
        "peak_rss_bytes": peak,
        "verify_s": verdict.output_seconds,
        "load_s": loads,
    }
    print(
        f"median {result['ratio_median']:.0%} of cp + sync; peak memory {peak / 2**30:.2f} GiB;"
        f" verify {nbytes / 1e6 / verdict.output_seconds:,.0f} MB/s"
    )
    if args.output_json:
        args.output_json.write_text(json.dumps(result, indent=1))
    shutil.rmtree(source)
    shutil.rmtree(output)


if __name__ == "__main__":
    main()
