"""The description of the target's parameters: shapes, sizes, axes, random values."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_factory import tiny_config
from fresh_process import run

from kimi_jax.config import PRESETS
from kimi_jax.model import param, weights
from kimi_jax.model.weights import DenseMLP, MoE

K26 = PRESETS["kimi-k2.6"]
CONFIG = tiny_config()


@pytest.fixture(scope="module")
def drawn():
    return weights.random(CONFIG, jnp.float32, jax.random.key(0))


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


def test_shapes_of_a_k26_layer():
    layer = weights.abstract(K26, jnp.bfloat16).layers[60]
    attention, moe = layer.attention, layer.mlp
    assert isinstance(moe, MoE)
    assert shapes(attention) == weights.Attention(
        qkv_a=((2112, 7168), "bfloat16"),
        q_a_norm=((1536,), "bfloat16"),
        kv_a_norm=((512,), "bfloat16"),
        q_b=((64, 192, 1536), "bfloat16"),
        w_uk=((64, 128, 512), "bfloat16"),
        w_uv=((64, 128, 512), "bfloat16"),
        o=((7168, 64, 128), "bfloat16"),
    )
    assert shapes(moe.experts) == weights.Experts(
        gate_up_codes=((384, 2, 2048, 3584), "uint8"),
        gate_up_scales=((384, 2, 2048, 224), "bfloat16"),
        down_codes=((384, 7168, 1024), "uint8"),
        down_scales=((384, 7168, 64), "bfloat16"),
    )
    assert shapes((moe.router, moe.router_bias)) == (
        ((384, 7168), "bfloat16"),
        ((384,), "float32"),
    )
    assert shapes(moe.shared) == DenseMLP(
        gate_up=((2, 2048, 7168), "bfloat16"), down=((7168, 2048), "bfloat16")
    )


def test_k26_has_the_published_size():
    # 554.27 GiB with the image encoder and projector (0.87) and without the unpacked shapes.
    size = weights.num_bytes(weights.abstract(K26, jnp.bfloat16)) / 2**30
    assert size == pytest.approx(554.27 - 0.87, abs=0.02)


def test_the_first_layers_are_dense():
    layers = weights.abstract(dataclasses.replace(CONFIG, first_k_dense_replace=2), "f4").layers
    assert [type(layer.mlp) for layer in layers] == [DenseMLP, DenseMLP, MoE]


def test_shared_experts_are_one_wide_mlp():
    layer = weights.abstract(dataclasses.replace(CONFIG, n_shared_experts=2), "f4").layers[1]
    assert isinstance(layer.mlp, MoE)
    assert layer.mlp.shared.down.shape == (96, 128)


def test_float32_leaves_codes_scales_and_bias_as_they_are():
    narrow = weights.abstract(CONFIG, jnp.bfloat16).layers[1].mlp
    wide = weights.abstract(CONFIG, jnp.float32).layers[1].mlp
    assert isinstance(narrow, MoE) and isinstance(wide, MoE)
    assert wide.experts == narrow.experts and wide.router_bias == narrow.router_bias
    assert (narrow.router.dtype, wide.router.dtype) == (jnp.bfloat16, jnp.float32)


def test_every_dimension_has_one_axis_name():
    tree = weights.abstract(CONFIG, jnp.bfloat16)

    def check(leaf, axes):
        assert len(axes) == len(set(axes)) == len(leaf.shape)

    jax.tree.map(check, tree, weights.logical_axes(CONFIG))


def test_axes_name_what_is_sharded_together():
    axes = weights.logical_axes(CONFIG)
    layer = axes.layers[1]
    assert axes.embed == axes.lm_head == ("vocab", "embed")
    assert layer.attention.w_uk == ("heads", "nope", "latent")
    assert layer.attention.o == ("embed", "heads", "v_head")
    assert isinstance(layer.mlp, MoE)
    experts = layer.mlp.experts
    assert experts.gate_up_codes == ("expert", "gate_up", "expert_width", "embed")
    assert experts.gate_up_codes == experts.gate_up_scales
    assert experts.down_codes == experts.down_scales == ("expert", "embed", "expert_width")


def test_axes_need_distinct_names():
    with pytest.raises(AssertionError):
        param.leaf((2, 2), ("embed", "embed"), "f4", param.Normal(std=1.0))


def test_random_weights_are_the_described_tree(drawn):
    described = weights.abstract(CONFIG, jnp.float32)
    assert shapes(drawn) == shapes(described)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(drawn) if x.dtype != "uint8")
    assert weights.num_bytes(drawn) == weights.num_bytes(described)


def test_random_weights_depend_on_the_key_only(drawn):
    again = weights.random(CONFIG, jnp.float32, jax.random.key(0))
    other = weights.random(CONFIG, jnp.float32, jax.random.key(1))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), drawn, again))
    assert not any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), drawn, other)))


def test_equal_layers_get_different_values(drawn):
    a, b = drawn.layers[1].mlp.experts, drawn.layers[2].mlp.experts
    assert float((a.gate_up_codes == b.gate_up_codes).mean()) == pytest.approx(1 / 256, abs=2e-3)


def test_codes_are_uniform(drawn):
    codes = np.asarray(drawn.layers[1].mlp.experts.gate_up_codes)
    for nibble in (codes & 15, codes >> 4):
        counts = np.bincount(nibble.reshape(-1), minlength=16)
        # Five standard deviations of a binomial count.
        assert np.abs(counts - codes.size / 16).max() < 5 * (codes.size / 16) ** 0.5


def test_float_values_are_normal_and_uncorrelated(drawn):
    embed = np.asarray(drawn.embed)
    assert embed.mean() == pytest.approx(0, abs=0.03) and embed.std() == pytest.approx(1, abs=0.02)
    assert np.mean(np.abs(embed) < 1) == pytest.approx(0.6827, abs=0.02)
    rows = np.corrcoef(embed)[np.triu_indices(len(embed), 1)]
    # Uncorrelated rows of 96 values have correlations of standard deviation 96^-0.5.
    assert rows.std() == pytest.approx(96**-0.5, rel=0.05) and abs(rows.mean()) < 0.005


@pytest.mark.parametrize("init", [param.Normal(std=1.0), param.Scales(center=1.0)])
def test_no_random_bits_give_an_infinite_value(init):
    ends = jnp.array([0, 1, 255, 2**32 - 256, 2**32 - 1], jnp.uint32)
    values = param.from_bits(init, ends)
    assert bool(jnp.isfinite(values).all()) and float(jnp.abs(values).max()) < 6


def test_projections_keep_the_variance_of_their_input(drawn):
    experts = drawn.layers[1].mlp.experts
    codes = np.asarray(experts.gate_up_codes)
    values = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1) - 8.0
    scales = np.repeat(np.asarray(experts.gate_up_scales, np.float32), 32, axis=-1)
    x = np.random.default_rng(0).standard_normal((200, CONFIG.hidden_size))
    assert np.einsum("td,eowd->teow", x, values * scales).std() == pytest.approx(1, abs=0.1)
    assert (x @ np.asarray(drawn.layers[1].mlp.router).T).std() == pytest.approx(1, abs=0.1)


def test_drawing_needs_no_memory_beyond_the_result():
    """The codes of a K2.6 layer are 5.25 GiB; a float copy of them would be 42."""
    experts = weights.describe(K26, jnp.bfloat16).layers[1].mlp.experts
    salt = jax.ShapeDtypeStruct((2,), jnp.uint32)
    for leaf in (experts.gate_up_codes, experts.gate_up_scales):
        memory = (
            jax.jit(param.values, static_argnames="param")
            .lower(salt, param=leaf)
            .compile()
            .memory_analysis()
        )
        assert memory.temp_size_in_bytes < 2**20


def test_any_sharding_draws_the_same_values():
    program = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from checkpoint_factory import tiny_config
from kimi_jax.model import weights

config = tiny_config(num_hidden_layers=2)
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
shardings = jax.tree.map(lambda _: cut, weights.abstract(config, jnp.float32))
placed = weights.random(config, jnp.float32, jax.random.key(0), shardings)
whole = weights.random(config, jnp.float32, jax.random.key(0))
for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(whole), strict=True):
    assert a.sharding == cut
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
"""
    run(f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n{program}")
