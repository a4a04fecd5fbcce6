"""Weights in the order that the kernels read: shapes, devices' parts, bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fresh_process import run

from kimi_jax.config import PRESETS
from kimi_jax.model import kernels, weights
from kimi_jax.model.kernels import Kernels, as_read
from kimi_jax.model.param import num_bytes
from kimi_jax.pallas.int4_moe import packed
from kimi_jax.sharding.layout import SINGLE

TINY = PRESETS["tiny-k2"]
MOSAIC = Kernels(int4_moe="mosaic")


def test_prepared_weights_are_as_described_and_lose_no_bit():
    described = weights.describe(TINY, jnp.bfloat16)
    loaded = weights.random(TINY, jnp.bfloat16, jax.random.key(0))
    before = jax.tree.map(np.asarray, loaded)
    prepared = kernels.prepare(loaded, described, MOSAIC, SINGLE)

    expected = as_read(described, MOSAIC, SINGLE)
    assert jax.tree.map(lambda p: (p.shape, p.dtype), expected) == jax.tree.map(
        lambda a: (a.shape, a.dtype), prepared
    )
    for old, new in zip(before.layers, prepared.layers, strict=True):
        if isinstance(old.mlp, weights.DenseMLP):
            continue
        for a, b in zip(
            jax.tree.leaves(old.mlp.experts), packed.unpack(new.mlp.experts), strict=True
        ):
            assert a.tobytes() == np.asarray(b).tobytes()


def test_canonical_experts_are_gone_once_they_are_packed():
    loaded = weights.random(TINY, jnp.bfloat16, jax.random.key(0))
    kernels.prepare(loaded, weights.describe(TINY, jnp.bfloat16), MOSAIC, SINGLE)
    gone = [a.is_deleted() for layer in loaded.layers for a in jax.tree.leaves(layer.mlp)]
    assert sum(gone) == 4 * TINY.num_moe_layers


def test_the_reference_reads_weights_as_they_are_loaded():
    described = weights.describe(TINY, jnp.bfloat16)
    assert as_read(described, kernels.REFERENCE, SINGLE) is described
    loaded = weights.random(TINY, jnp.bfloat16, jax.random.key(0))
    assert kernels.prepare(loaded, described, kernels.REFERENCE, SINGLE) is loaded


def test_the_real_models_order_takes_no_more_bytes():
    described = weights.describe(PRESETS["kimi-k2.6"], jnp.bfloat16)
    counters = 4 * 32 * PRESETS["kimi-k2.6"].num_moe_layers
    assert num_bytes(as_read(described, MOSAIC, SINGLE)) == num_bytes(described) + counters


def test_a_cpu_has_no_kernels():
    sizes = dict(dtype=jnp.bfloat16, page_size=64, max_rows=9, layout=SINGLE)
    assert kernels.choose("auto", TINY, **sizes) == kernels.REFERENCE
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        kernels.choose("mosaic", TINY, **sizes)


ON_EIGHT_DEVICES = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, jax.numpy as jnp, numpy as np
from kimi_jax.config import PRESETS
from kimi_jax.model import kernels, weights
from kimi_jax.pallas.int4_moe import api
from kimi_jax.sharding.mesh import make_layout, resolve

config = PRESETS["tiny-k2"]
described = weights.describe(config, jnp.bfloat16)
for sharding, sizes in (("tp", {}), ("mixed", {"ep_size": 2})):
    layout = make_layout(resolve(sharding, num_devices=8, **sizes))
    places = layout.shardings(layout.specs(described))
    loaded = weights.random(config, jnp.bfloat16, jax.random.key(0), places)
    layer = next(i for i, l in enumerate(loaded.layers) if hasattr(l.mlp, "experts"))
    parts = [
        [np.asarray(s.data) for s in leaf.addressable_shards]
        for leaf in jax.tree.leaves(loaded.layers[layer].mlp.experts)
    ]
    prepared = kernels.prepare(loaded, described, kernels.Kernels(int4_moe="mosaic"), layout)
    got = prepared.layers[layer].mlp.experts
    assert layout.specs(kernels.as_read(described, kernels.Kernels(int4_moe="mosaic"), layout))
    for device, own in enumerate(zip(*parts, strict=True)):
        alone = api.pack(weights.Experts(**dict(zip(
            ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales"), own, strict=True
        ))))
        assert (alone.hidden, alone.width) == (got.hidden, got.width)
        for name in ("gate_up", "down", "counter"):
            shard = getattr(got, name).addressable_shards[device].data
            assert np.array_equal(shard, getattr(alone, name)), (sharding, device, name)
    print(sharding, got.width)
"""


def test_each_device_packs_its_own_part():
    assert run(ON_EIGHT_DEVICES).split() == ["tp", "32", "mixed", "64"]
