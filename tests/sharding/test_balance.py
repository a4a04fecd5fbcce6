"""Placement of experts from a histogram: every expert once, loads spread, the same model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax import llm, step
from kimi_jax.config import PRESETS
from kimi_jax.model import weights as target_weights
from kimi_jax.sharding import balance
from kimi_jax.sharding.layout import SINGLE

TARGET = dataclasses.replace(PRESETS["tiny-k2"], num_hidden_layers=2)


@given(st.lists(st.integers(0, 1000), min_size=16, max_size=16), st.sampled_from([1, 2, 4, 8]))
def test_every_expert_lies_in_one_place_and_no_device_is_busier_than_it_must(counts, devices):
    table = np.array([counts, counts[::-1]])
    order = balance.placement(table, devices)
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(16), (2, 1)))
    loads = balance.load(table, devices, order)
    assert np.array_equal(loads.sum(axis=1), table.sum(axis=1))
    # Greedy: when its last expert came, the busiest device had no more than any with room.
    assert (loads.max(axis=1) <= loads.mean(axis=1) + 2 * table.max(axis=1)).all()


def test_busy_experts_that_lie_together_are_spread():
    counts = np.array([[9, 9, 9, 9, 1, 1, 1, 1]])
    order = balance.placement(counts, 4)
    assert balance.load(counts, 4).tolist() == [[18, 18, 2, 2]]
    assert balance.load(counts, 4, order).tolist() == [[10, 10, 10, 10]]
    assert balance.unevenness(balance.load(counts, 4)) == 1.8
    assert balance.unevenness(balance.load(counts, 4, order)) == 1.0


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="10 experts do not divide over 4 devices"):
        balance.placement(np.ones((1, 10)), 4)


def test_the_same_model_comes_out_wherever_experts_lie():
    text = np.random.default_rng(0).integers(0, 200, 32).astype(np.int32)

    def run(function, weights):
        latent, plan = jnp.zeros((2, 3, 16, TARGET.cache_row)), step.StepPlan(model=TARGET)
        rows, _ = function(weights, latent, jnp.array([1, 2]), text, 0, len(text), plan=plan)
        return np.asarray(rows)

    weights = target_weights.random(TARGET, jnp.float32, jax.random.key(0))
    expected, chosen = run(step.score, weights), run(step.routes, weights)
    order = np.random.default_rng(1).permutation(TARGET.n_routed_experts)[None]
    weights = balance.place(weights, order)
    np.testing.assert_allclose(run(step.score, weights), expected, atol=2e-5)
    places = run(step.routes, weights)
    assert np.array_equal(order[0][places], chosen)
    assert not np.array_equal(places, chosen)


def test_a_histogram_is_read_as_it_was_saved(tmp_path):
    counts = np.arange(32).reshape(2, 16)
    balance.save(tmp_path / "counts.json", counts)
    assert np.array_equal(balance.read(tmp_path / "counts.json", 2, 16), counts)


@pytest.mark.parametrize("content", ["", "[]", '{"expert_counts": [[1, 2]]}', '{"counts": []}'])
def test_another_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "counts.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"counts.json: expected .* 2 rows of 16 numbers"):
        balance.read(path, 2, 16)


def test_a_placement_without_experts_split_by_number_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="no experts are split by number here; use it with ep_size"
    ):
        llm._expert_order(tmp_path / "counts.json", TARGET, SINGLE)


def test_experts_in_a_kernels_own_order_are_not_moved():
    weights = target_weights.abstract(TARGET, jnp.float32)
    [dense, sparse] = weights.layers
    packed = dataclasses.replace(sparse, mlp=dataclasses.replace(sparse.mlp, experts=(1, 2)))
    weights = dataclasses.replace(weights, layers=(dense, packed))
    with pytest.raises(NotImplementedError, match="not tuple: place them before a kernel packs"):
        balance.place(weights, np.arange(16)[None])
