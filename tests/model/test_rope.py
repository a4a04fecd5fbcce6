"""Rotary tables of the real configuration against float64, over the whole context."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from reference_numpy import rotary, rotary_frequencies, softmax_scale

from kimi_jax.config import DRAFTER_PRESETS, PRESETS
from kimi_jax.model import rope, transformer

# As published; the engine's preset must say the same.
K26 = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
# Both sides of the original context, of the coarse table's rows, and the last positions; a tree's
# nodes may lie a few positions beyond.
POSITIONS = [0, 1, 511, 512, 4095, 4096, 65535, 131071, 262143, 262144 + 7]


def test_cos_and_sin_agree_with_float64_at_every_distance():
    cos, sin = transformer.rotary(PRESETS["kimi-k2.6"], jnp.array(POSITIONS, jnp.int32))
    expected = rotary(np.array(POSITIONS), 64, K26["rope_theta"], K26["rope_scaling"])
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, expected[0], rtol=0, atol=3e-7)
    np.testing.assert_allclose(sin, expected[1], rtol=0, atol=3e-7)


def test_the_drafters_tables_span_its_whole_head():
    drafter = DRAFTER_PRESETS["kimi-k2.6"]
    cos, sin = rope.cos_sin(
        jnp.array(POSITIONS, jnp.int32),
        dim=drafter.head_dim,
        theta=drafter.rope_theta,
        yarn=drafter.rope_scaling,
        max_position=drafter.max_position_embeddings,
    )
    expected = rotary(np.array(POSITIONS), 128, K26["rope_theta"], K26["rope_scaling"])
    np.testing.assert_allclose(cos, expected[0], rtol=0, atol=3e-7)
    np.testing.assert_allclose(sin, expected[1], rtol=0, atol=3e-7)


def test_frequencies_ramp_from_kept_to_interpolated_between_dimensions_8_and_20():
    yarn = PRESETS["kimi-k2.6"].rope_scaling
    frequencies = rope.inverse_frequencies(64, 50000.0, yarn)
    plain = rope.inverse_frequencies(64, 50000.0, None)
    np.testing.assert_allclose(plain, 50000.0 ** (-np.arange(32) / 32), rtol=1e-14)
    np.testing.assert_allclose(frequencies[:9], plain[:9], rtol=1e-14)
    assert (plain[9:] / frequencies[9:] > 1.01).all()
    assert (plain[:20] / frequencies[:20] < 63).all()
    np.testing.assert_allclose(frequencies[20:], plain[20:] / 64, rtol=1e-14)


@pytest.mark.parametrize(
    "changes", [{}, {"beta_fast": 1.0}, {"factor": 32.0}, {"original_max_position_embeddings": 64}]
)
def test_frequencies_agree_with_float64_for_other_members_of_the_family(changes):
    yarn = dataclasses.replace(PRESETS["kimi-k2.6"].rope_scaling, **changes)
    expected = rotary_frequencies(64, 50000.0, {**K26["rope_scaling"], **changes})
    np.testing.assert_allclose(rope.inverse_frequencies(64, 50000.0, yarn), expected, rtol=1e-14)


def test_the_softmax_scale_of_the_real_configuration():
    scale = PRESETS["kimi-k2.6"].softmax_scale
    assert scale == pytest.approx(softmax_scale(K26), rel=1e-12)
    assert scale == pytest.approx(0.1446796258, abs=5e-11)  # 192^-0.5 (0.1 ln 64 + 1)^2


def test_a_rotated_product_depends_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 64)).astype(np.float32)
    config = PRESETS["kimi-k2.6"]

    def product(rotate, query_position: int, key_position: int) -> float:
        at = jnp.array([query_position, key_position], jnp.int32)
        cos, sin = transformer.rotary(config, at)
        turned_q = rotate(jnp.asarray(q), cos[:1], sin[:1])
        turned_k = rotate(jnp.asarray(k), cos[1:], sin[1:])
        return float((turned_q * turned_k).sum())

    for rotate in (rope.rotate_interleaved, rope.rotate_half):
        near = product(rotate, 1000, 3)
        assert product(rotate, 261_997, 261_000) == pytest.approx(near, abs=2e-5)
        assert abs(product(rotate, 1001, 3) - near) > 1e-3
