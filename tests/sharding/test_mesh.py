"""Presets, sizes and rules: what they become, and what is refused by name."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from kimi_jax.config import DRAFTER_PRESETS, PRESETS
from kimi_jax.model import weights as target_weights
from kimi_jax.sharding import rules
from kimi_jax.sharding.layout import SINGLE, Layout
from kimi_jax.sharding.mesh import Shape, resolve
from kimi_jax.speculation import weights as drafter_weights

K26, DRAFTER = PRESETS["kimi-k2.6"], DRAFTER_PRESETS["kimi-k2.6"]


def abstract_layout(data=1, expert=1, tensor=1, **options) -> Layout:
    """A layout without devices: enough for everything but running."""
    return Layout(mesh=AbstractMesh((data, expert, tensor), rules.AXES), **options)  # type: ignore


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Shape()),
        ({"sharding": "single"}, Shape()),
        ({"sharding": "tp"}, Shape(tensor=8)),
        ({"sharding": "ep"}, Shape(expert=8)),
        ({"sharding": "mixed"}, Shape(expert=4, tensor=2)),
        ({"sharding": "data"}, Shape(data=8)),
        ({"sharding": "context"}, Shape(tensor=8, split_context=True)),
        ({"tensor_parallel_size": 4}, Shape(tensor=4)),
        ({"ep_size": 8}, Shape(expert=8)),
        ({"tensor_parallel_size": 8, "ep_size": 2}, Shape(expert=2, tensor=4)),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4}, Shape(data=4, tensor=2)),
        ({"data_parallel_size": 4}, Shape(data=4)),
        ({"data_parallel_size": 8, "ep_size": 8}, Shape(data=8, experts_over_data=True)),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 4, "ep_size": 8},
            Shape(data=4, expert=2, experts_over_data=True),
        ),
        ({"sharding": "ep", "data_parallel_size": 2}, Shape(data=2, expert=4)),
        ({"sharding": "data", "tensor_parallel_size": 2}, Shape(data=4, tensor=2)),
    ],
)
def test_a_preset_and_sizes_become_a_mesh_of_eight(asked, expected):
    assert resolve(num_devices=8, **asked) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sharding": "rows"}, "sharding='rows': expected one of auto, single"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size=16 .* needs 16 devices, .* are 8"),
        ({"data_parallel_size": 0}, "data_parallel_size=0 must be at least 1"),
        ({"tensor_parallel_size": 8, "ep_size": 3}, "ep_size=3 must divide"),
        ({"data_parallel_size": 4, "ep_size": 2}, "ep_size=2 must divide .*, or be all 4 devices"),
        ({"sharding": "single", "ep_size": 2}, "sharding=single is one device, but ep_size=2"),
        ({"sharding": "tp", "ep_size": 2}, "sharding=tp splits experts by width, but ep_size=2"),
        ({"sharding": "mixed", "ep_size": 8}, "sharding=mixed needs 1 < ep_size"),
    ],
)
def test_a_contradiction_is_refused_by_name(asked, message):
    with pytest.raises(ValueError, match=message):
        resolve(num_devices=8, **asked)


def test_an_axis_without_a_rule_is_refused():
    with pytest.raises(ValueError, match="no sharding rule for the axis 'heds'"):
        SINGLE.spec("heds")


def test_two_axes_on_one_mesh_axis_are_refused():
    with pytest.raises(ValueError, match="split twice over the mesh axis 'tensor'"):
        abstract_layout(tensor=2).spec("heads", "vocab")


def test_a_size_that_does_not_divide_is_refused_with_the_weights_name():
    config = dataclasses.replace(PRESETS["tiny-k2"], num_attention_heads=6)
    described = target_weights.describe(config, jnp.float32)
    with pytest.raises(
        ValueError, match=r"layers.0.attention.q_b .*'heads' has 6 parts.*4 devices"
    ):
        abstract_layout(tensor=4).specs(described)


def test_mesh_axes_of_one_device_split_nothing():
    specs = jax.tree.leaves(
        abstract_layout().specs(target_weights.describe(K26, jnp.bfloat16)),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
    assert set(specs) == {PartitionSpec()}


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 8, 1), (1, 4, 2), (1, 2, 4)])
def test_k26_and_its_drafter_divide_over_eight_devices(shape):
    layout = abstract_layout(*shape)
    described = target_weights.describe(K26, jnp.bfloat16)
    whole = layout.device_bytes(described) * 8 / target_weights.num_bytes(described)
    assert 1 < whole < 1.04  # q_a, kv_a, router and norms are on every device
    layout.specs(drafter_weights.describe(DRAFTER, jnp.bfloat16))


def test_experts_over_data_are_split_over_all_devices_and_attention_is_not():
    layout = abstract_layout(data=8, experts_over_data=True)
    specs = layout.specs(target_weights.describe(K26, jnp.bfloat16))
    assert specs.layers[1].mlp.experts.gate_up_codes == PartitionSpec(("data",))
    assert specs.layers[1].attention.q_b == PartitionSpec()
