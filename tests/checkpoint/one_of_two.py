"""A program: one of two processes that load their halves of a model.

    python one_of_two.py TESTS FOLDER PORT NUMBER

Prints as JSON, for the ways to split the model: bytes read, bytes that this
process needs, bytes of the whole, all values right.
"""

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
sys.path.insert(0, sys.argv[1])

import jax
import numpy as np
from conversion import shardings
from jax.sharding import Mesh

from kimi_jax.checkpoint.read import open_checkpoint
from kimi_jax.model import weights as model_weights

folder, port, number = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)


def bytes_read() -> int:
    """By this process, from files and other things."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


checkpoint = open_checkpoint(folder)
description = model_weights.describe(checkpoint.config, "bfloat16")
whole = checkpoint.load(dtype="bfloat16", progress=False)
mesh = Mesh(np.array(jax.devices()), ("all",))
results = {}
for name, axes in {
    "experts": ("expert", "heads", "vocab"),
    "width": ("expert_width", "heads", "vocab", "mlp_width", "shared_width"),
}.items():
    places = shardings(description, mesh, {"all": axes})
    before = bytes_read()
    loaded = checkpoint.load(dtype="bfloat16", shardings=places, progress=False)
    read = bytes_read() - before
    right = all(
        np.array_equal(
            np.asarray(shard.data).view(np.uint8),
            np.asarray(reference)[shard.index].copy().view(np.uint8),
        )
        for array, reference in zip(jax.tree.leaves(loaded), jax.tree.leaves(whole), strict=True)
        for shard in array.addressable_shards
    )
    needed = sum(
        nbytes
        for array in jax.tree.leaves(loaded)
        for nbytes in {str(s.index): s.data.nbytes for s in array.addressable_shards}.values()
    )
    results[name] = [read, needed, checkpoint.bytes_used, right]
print(json.dumps(results))
