"""The description of the drafter's parameters."""

import jax
import jax.numpy as jnp
import pytest
from checkpoint_factory import tiny_drafter_config

from kimi_jax.config import DRAFTER_PRESETS
from kimi_jax.model.param import num_bytes
from kimi_jax.speculation import weights

CONFIG = tiny_drafter_config()


def test_the_k26_drafter_has_the_published_size():
    # 3.479 B parameters = 6.4807 GiB in bfloat16.
    tree = weights.abstract(DRAFTER_PRESETS["kimi-k2.6"], jnp.bfloat16)
    assert num_bytes(tree) / 2**30 == pytest.approx(6.4807, abs=1e-4)


def test_shapes_of_a_drafter():
    tree = weights.abstract(CONFIG, jnp.bfloat16)
    assert tree.fc.shape == (3, 96, 96)
    assert {name: leaf.shape for name, leaf in vars(tree.layers[0]).items()} == {
        "input_norm": (96,),
        "q": (4, 16, 96),
        "k": (2, 16, 96),
        "v": (2, 16, 96),
        "o": (96, 4, 16),
        "q_norm": (16,),
        "k_norm": (16,),
        "post_attention_norm": (96,),
        "gate_up": (2, 80, 96),
        "down": (96, 80),
    }


def test_every_dimension_has_one_axis_name():
    def check(leaf, axes):
        assert len(axes) == len(set(axes)) == len(leaf.shape)

    jax.tree.map(check, weights.abstract(CONFIG, jnp.bfloat16), weights.logical_axes(CONFIG))


def test_random_weights_are_the_described_tree():
    drawn = weights.random(CONFIG, jnp.bfloat16, jax.random.key(0))
    described = weights.abstract(CONFIG, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), drawn) == jax.tree.map(
        lambda x: (x.shape, x.dtype), described
    )
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(drawn))
