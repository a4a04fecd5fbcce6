"""Sums over devices: the same bits on all of them, in rank order by the reference."""

import json

import fresh_process
import jax.numpy as jnp
import pytest

from kimi_jax.pallas.reduce import api

PROGRAM = """
import functools, json, os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from kimi_jax.pallas.reduce import api

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
parts = np.random.default_rng(0).normal(size=(8, 999)).astype(np.float32)
whole = np.round(parts * 100).astype(np.int32)

def total(x, axes, how):
    spec = PartitionSpec(("a", "b"))
    sums = jax.shard_map(
        lambda part: api.all_reduce(part, axes, implementation=how),
        mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
    )
    return np.asarray(jax.jit(sums)(x))

in_order = functools.reduce(np.add, parts)
found = {}
for how in ("psum", "reference"):
    sums, counts = total(parts, ("a", "b"), how), total(whole, ("b",), how)
    found[how] = {
        "same": bool((sums == sums[0]).all()),
        "in order": bool((sums[0] == in_order).all()),
        "apart": float(np.abs(sums[0] - in_order).max()),
        "of a row": bool((counts == whole.reshape(2, 4, -1).sum(1).repeat(4, axis=0)).all()),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    return json.loads(fresh_process.run(PROGRAM))


@pytest.mark.parametrize("implementation", ["psum", "reference"])
def test_every_device_gets_the_same_bits(found, implementation):
    assert found[implementation]["same"] and found[implementation]["apart"] < 1e-5


def test_the_reference_adds_in_rank_order(found):
    assert found["reference"]["in order"]


@pytest.mark.parametrize("implementation", ["psum", "reference"])
def test_a_sum_goes_over_the_named_axes_only(found, implementation):
    assert found[implementation]["of a row"]


def test_an_implementation_that_does_not_exist_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="implementation='mosaic' does not exist; use"):
        api.choose("mosaic")


def test_partial_sums_in_bfloat16_are_refused():
    with pytest.raises(ValueError, match="partial sums are bfloat16, expected float32 or int32"):
        api.all_reduce(jnp.zeros(4, jnp.bfloat16), ("x",))
