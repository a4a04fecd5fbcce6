"""A program with 8 simulated devices: converts, and loads what it made onto meshes of all kinds.

    python on_meshes.py TESTS SOURCE OUTPUT

Prints as JSON {case: what holds}.
"""

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, sys.argv[1])

import jax
import numpy as np
from conversion import converted, equal, shardings
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from kimi_jax.checkpoint import layout
from kimi_jax.checkpoint.place import by_path, bytes_per_device
from kimi_jax.checkpoint.read import open_checkpoint
from kimi_jax.model import weights as model_weights

TENSOR = ("vocab", "heads", "mlp_width", "shared_width", "expert_width")
source, output = map(Path, sys.argv[2:4])

layout.MIN_CHUNK = 1  # chunks as fine as in a large model
converted(source, output)
devices = np.array(jax.devices())
grid = devices.reshape(4, 2)
meshes = {
    "1": (Mesh(devices[:1], ("tensor",)), {"tensor": TENSOR}),
    "2": (Mesh(devices[:2], ("tensor",)), {"tensor": TENSOR}),
    "4": (Mesh(devices[:4], ("expert",)), {"expert": ("expert", "heads", "vocab")}),
    "8 tp": (Mesh(devices, ("tensor",)), {"tensor": TENSOR}),
    "8 ep": (Mesh(devices, ("expert",)), {"expert": ("expert", "heads", "vocab")}),
    "4 x 2": (Mesh(grid, ("expert", "tensor")), {"expert": ("expert",), "tensor": TENSOR}),
    "transposed": (Mesh(grid.T, ("expert", "tensor")), {"expert": ("expert",), "tensor": TENSOR}),
    "odd axes": (Mesh(grid.T, ("a", "b")), {"a": ("embed", "latent"), "b": ("qk_head",)}),
}
checkpoint = open_checkpoint(output)
published = open_checkpoint(source)
description = model_weights.describe(checkpoint.config, "bfloat16")
expected = published.load(dtype="bfloat16", progress=False)


def on_its_places(tree, places) -> bool:
    return jax.tree.all(jax.tree.map(lambda array, place: array.sharding == place, tree, places))


def planned(places) -> int:
    sizes = jax.tree.map(
        lambda param, place: np.prod(place.shard_shape(param.shape)) * param.dtype.itemsize,
        description,
        places,
    )
    return int(sum(jax.tree.leaves(sizes)))


def by_orbax(places):
    """Loaded by Orbax alone, item by item, into abstract arrays."""
    abstract = jax.tree.map(
        lambda param, place: jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=place),
        description,
        places,
    )
    found = {}
    for item in checkpoint.manifest["items"]:
        folder = layout.item_folder(output, item)
        loaded = ocp.load(str(folder), layout.abstract_item(abstract, item))
        prefix = "" if item == "top" else f"{item}."
        found |= {prefix + path: array for path, array in by_path(loaded).items()}
    return found


results = {}
for name, (mesh, split) in meshes.items():
    places = shardings(description, mesh, split)
    ours = checkpoint.load(dtype="bfloat16", shardings=places, progress=False)
    theirs = published.load(dtype="bfloat16", shardings=places, progress=False)
    orbax = by_orbax(places)
    wide = checkpoint.load(dtype="float32", shardings=places, progress=False)
    results[name] = {
        "converted equals published": equal(ours, expected),
        "published, loaded onto the mesh": equal(theirs, expected),
        "as Orbax loads it": equal(orbax, {p: by_path(expected)[p] for p in orbax})
        and set(orbax) == set(by_path(expected)),
        "on their places": on_its_places(ours, places) and on_its_places(theirs, places),
        "bytes per device": set(bytes_per_device(ours).values()) == {planned(places)}
        and len(bytes_per_device(ours)) == mesh.size,
        "float32": equal(
            jax.tree.map(lambda a, like: np.asarray(a).astype(like.dtype), wide, expected), expected
        ),
    }
mesh, split = meshes["8 tp"]
with jax.set_mesh(mesh):
    places = shardings(description, mesh, split)
    inside = checkpoint.load(dtype="bfloat16", shardings=places, progress=False)
    results["inside a mesh context"] = {"equal": equal(inside, expected)}
print(json.dumps(results))
