"""Router and experts against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from reference_numpy import dequantise, route, swiglu

from kimi_jax.config import PRESETS
from kimi_jax.model import moe
from kimi_jax.model.weights import DenseMLP, Experts, MoE

CONFIG = dataclasses.replace(
    PRESETS["kimi-k2.6"], hidden_size=96, moe_intermediate_size=64, n_routed_experts=24
)
ROWS = 40


run_moe = jax.jit(moe.moe, static_argnums=1)
run_route = jax.jit(moe.route, static_argnums=1)


def all_live(x: np.ndarray) -> jax.Array:
    return jnp.ones(len(x), bool)


def error(out: jax.Array, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    return np.abs(np.asarray(out, np.float64) - expected).max() / np.abs(expected).max()


FLOAT32 = 2e-6  # a few roundings of 6e-8 over sums of 96 and 64 products


@dataclasses.dataclass
class Layer:
    """Random weights of one MoE layer: as the engine holds them and, expanded, in float64."""

    weights: MoE
    router: np.ndarray  # [E, D]
    bias: np.ndarray  # [E]
    experts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # gate, up, down
    shared: tuple[np.ndarray, np.ndarray, np.ndarray]

    def reference(self, x: np.ndarray) -> np.ndarray:
        ids, shares = self.route(x)
        out = swiglu(x, *self.shared)
        for row in range(len(x)):
            for expert, share in zip(ids[row], shares[row], strict=True):
                out[row] += share * swiglu(x[row], *self.experts[expert])
        return out

    def route(self, x: np.ndarray, config=CONFIG) -> tuple[np.ndarray, np.ndarray]:
        return route(
            x.astype(np.float64),
            self.router,
            self.bias,
            k=config.num_experts_per_tok,
            normalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )


def random_layer(
    seed: int, config=CONFIG, *, bias: np.ndarray | None = None, identical_experts: bool = False
) -> Layer:
    rng = np.random.default_rng(seed)
    count, hidden, width = (
        config.n_routed_experts,
        config.hidden_size,
        config.moe_intermediate_size,
    )

    def linear(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def packed(*shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes of two codes, low nibble first; scales that are no powers of two; the values."""
        if identical_experts:
            shape = (1, *shape[1:])
        codes = rng.integers(-8, 8, shape)
        stored = (codes + 8).astype(np.uint8)
        scales = rng.uniform(0.5, 2, (*shape[:-1], shape[-1] // 32)) * 0.22 * shape[-1] ** -0.5
        scales = scales.astype(ml_dtypes.bfloat16)
        data = stored[..., 0::2] | (stored[..., 1::2] << 4)
        parts = data, scales, dequantise(codes, scales)
        return tuple(np.repeat(part, count // shape[0], axis=0) for part in parts)

    gate_up_codes, gate_up_scales, gate_up = packed(count, 2, width, hidden)
    down_codes, down_scales, down = packed(count, hidden, width)
    router = linear(count, hidden)
    bias = 0.1 * rng.standard_normal(count) if bias is None else bias
    bias = bias.astype(np.float32)
    shared = linear(width, hidden), linear(width, hidden), linear(hidden, width)
    weights = MoE(
        router=jnp.asarray(router),
        router_bias=jnp.asarray(bias),
        experts=Experts(
            gate_up_codes=jnp.asarray(gate_up_codes),
            gate_up_scales=jnp.asarray(gate_up_scales),
            down_codes=jnp.asarray(down_codes),
            down_scales=jnp.asarray(down_scales),
        ),
        shared=DenseMLP(
            gate_up=jnp.stack([jnp.asarray(shared[0]), jnp.asarray(shared[1])]),
            down=jnp.asarray(shared[2]),
        ),
    )
    experts = [(gate_up[e, 0], gate_up[e, 1], down[e]) for e in range(count)]
    return Layer(
        weights=weights,
        router=router.astype(np.float64),
        bias=bias.astype(np.float64),
        experts=experts,
        shared=tuple(part.astype(np.float64) for part in shared),
    )


def random_rows(seed: int, rows: int = ROWS, hidden: int = CONFIG.hidden_size) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, hidden)).astype(np.float32)


def test_arbitrary_scales_agree_with_float64():
    layer, x = random_layer(0), random_rows(1)
    out, ids = run_moe(layer.weights, CONFIG, jnp.asarray(x), all_live(x))
    expected = layer.reference(x)
    assert error(out, expected) < FLOAT32
    np.testing.assert_array_equal(ids, layer.route(x)[0])
    # What a bfloat16 product of code and scale would give is far off: they have to stay apart.
    rounded = [
        tuple(part.astype(ml_dtypes.bfloat16).astype(np.float64) for part in expert)
        for expert in layer.experts
    ]
    assert error(dataclasses.replace(layer, experts=rounded).reference(x), expected) > 1e-4


def test_a_layer_of_identical_experts_is_that_expert_scaled_plus_the_shared_one():
    layer, x = random_layer(2, identical_experts=True), random_rows(3)
    out, _ = run_moe(layer.weights, CONFIG, jnp.asarray(x), all_live(x))
    scale = CONFIG.routed_scaling_factor  # the normalised weights sum to 1, whoever was chosen
    expected = scale * swiglu(x, *layer.experts[0]) + swiglu(x, *layer.shared)
    assert error(out, expected) < FLOAT32


def test_a_large_bias_decides_as_in_float64():
    # At 7 bfloat16 resolves 0.03: in that dtype most of these biases would be equal.
    experts, tokens = 384, 1000
    config = dataclasses.replace(CONFIG, n_routed_experts=experts)
    bias = (7 + 0.001 * np.arange(experts)).astype(np.float32)
    rng = np.random.default_rng(4)
    router = (rng.standard_normal((experts, 96)) * 96**-0.5).astype(np.float32)
    layer = random_layer(4)
    weights = layer.weights.replace(router=jnp.asarray(router), router_bias=jnp.asarray(bias))
    x = random_rows(5, rows=tokens)
    scores = 1 / (1 + np.exp(-x.astype(np.float64) @ router.T.astype(np.float64))) + bias
    ranked = -np.sort(-scores, axis=-1)
    # float32 resolves 5e-7 at 7: the seed has no nearer decision, so the choices must be equal.
    assert (ranked[:, 7] - ranked[:, 8]).min() > 2e-6
    ids, _ = run_route(weights, config, jnp.asarray(x), all_live(x))
    expected = np.argsort(-scores, axis=-1, kind="stable")[:, :8]
    np.testing.assert_array_equal(np.sort(ids, axis=-1), np.sort(expected, axis=-1))


@pytest.mark.parametrize("scale", [1.0, 2.827])
@pytest.mark.parametrize("normalise", [True, False])
def test_routing_weights_agree_with_float64(normalise, scale):
    config = dataclasses.replace(CONFIG, norm_topk_prob=normalise, routed_scaling_factor=scale)
    layer, x = random_layer(6), random_rows(7)
    ids, shares = run_route(layer.weights, config, jnp.asarray(x), all_live(x))
    expected_ids, expected_shares = layer.route(x, config)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(shares, expected_shares, rtol=2e-6)
    if normalise:
        np.testing.assert_allclose(np.sum(shares, axis=-1), scale, rtol=1e-6)


def test_the_bias_takes_part_in_the_choice_but_not_in_the_weights():
    layer, x = random_layer(8), random_rows(9)
    shifted = layer.weights.replace(router_bias=layer.weights.router_bias + 0.5)
    ids, shares = run_route(layer.weights, CONFIG, jnp.asarray(x), all_live(x))
    ids_shifted, shares_shifted = run_route(shifted, CONFIG, jnp.asarray(x), all_live(x))
    np.testing.assert_array_equal(np.sort(ids), np.sort(ids_shifted))
    np.testing.assert_allclose(np.sort(shares), np.sort(shares_shifted), rtol=1e-6)
    forced = layer.weights.replace(router_bias=layer.weights.router_bias.at[5].add(10.0))
    ids, _ = run_route(forced, CONFIG, jnp.asarray(x), all_live(x))
    assert (np.asarray(ids) == 5).any(axis=-1).all()


def test_equal_scores_go_to_the_lower_id():
    bias = np.zeros(CONFIG.n_routed_experts, np.float32)
    layer = random_layer(10, bias=bias)
    weights = layer.weights.replace(router=jnp.zeros_like(layer.weights.router))
    ids, shares = run_route(weights, CONFIG, jnp.ones((1, 96)), jnp.ones(1, bool))
    np.testing.assert_array_equal(ids[0], np.arange(8))
    np.testing.assert_allclose(shares[0], 2.827 / 8, rtol=1e-6)


def test_a_dead_row_reaches_no_expert_and_changes_no_other_row():
    layer, x = random_layer(11), random_rows(12)
    live = np.arange(ROWS) % 3 != 0
    whole, _ = run_moe(layer.weights, CONFIG, jnp.asarray(x), all_live(x))
    poisoned = np.where(live[:, None], x, np.float32(1e30))
    out, ids = run_moe(layer.weights, CONFIG, jnp.asarray(poisoned), jnp.asarray(live))
    np.testing.assert_array_equal(np.asarray(ids)[~live], -1)
    np.testing.assert_allclose(np.asarray(out)[live], np.asarray(whole)[live], rtol=0, atol=1e-6)


def test_bfloat16_rows_are_routed_in_float32():
    layer = random_layer(13)
    x = random_rows(14, rows=200).astype(ml_dtypes.bfloat16)
    weights = layer.weights.replace(router=layer.weights.router.astype(jnp.bfloat16))
    rounded = dataclasses.replace(layer, router=np.asarray(weights.router, np.float64))
    ids, shares = run_route(weights, CONFIG, jnp.asarray(x), all_live(x))
    expected_ids, expected_shares = rounded.route(x)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(shares, expected_shares, rtol=2e-6)
