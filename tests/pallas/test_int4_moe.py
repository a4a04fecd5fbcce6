"""The routed experts' kernel, emulated, against the exact answer; its tilings and its interface."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.pallas.int4_moe import api, emulate, packed, specs, tuning
from kimi_jax.pallas.int4_moe.program import LAUNCH_UNIT, MAX_ROWS, Layout, Shape, Tiling
from kimi_jax.pallas.int4_moe.specs import AWKWARD, TINY, TINY_TP8, Case, Spec
from kimi_jax.pallas.stream.target import KNOWN, SHARED_GRANULE

BOUND = 1e-2  # relative error with bfloat16 rows: the hidden values are rounded to 8 bits
SMALL = Spec(name="small", experts=4, hidden=256, width=128, choices=2)
PLAIN = Tiling(tile_rows=8, warp_blocks=2, down_units=1, slots=2)


def in_order(case: Case) -> packed.Packed:
    """The kernel's weights of a case, as NumPy arrays with a counter of their own."""
    weights = api.pack(case)
    arrays = {name: np.array(getattr(weights, name)) for name in ("gate_up", "down", "counter")}
    return dataclasses.replace(weights, **arrays)


def run(case: Case, tiling: Tiling = PLAIN, *, weights=None, num_blocks=3, **options) -> np.ndarray:
    return emulate.routed_experts(
        case.x,
        case.ids,
        case.weights,
        weights or in_order(case),
        tiling=tiling,
        num_blocks=num_blocks,
        **options,
    )


def error(out: np.ndarray, case: Case) -> float:
    expected = specs.exact(case)
    return np.linalg.norm(out - expected) / np.linalg.norm(expected)


def rows_of(case: Case, rows) -> Case:
    return dataclasses.replace(case, x=case.x[rows], ids=case.ids[rows], weights=case.weights[rows])


def tilings(spec: Spec) -> dict[str, Tiling]:
    """Small slots and full ones, so that every path is taken."""
    units = Shape(rows=1, choices=1, experts=1, hidden=spec.hidden, width=spec.width).width_units
    return {
        "least": Tiling(tile_rows=8, warp_blocks=1, down_units=1, slots=2),
        "whole width": Tiling(tile_rows=8, warp_blocks=2, down_units=units, down_tiles=4, slots=3),
        "wide tiles": Tiling(tile_rows=16, warp_blocks=4, down_units=units, down_tiles=2, slots=2),
    }


@pytest.mark.parametrize(
    ("spec", "rows", "tiling"),
    [
        (TINY, 1, "least"),
        (TINY, 5, "whole width"),
        (TINY_TP8, 9, "wide tiles"),
        (AWKWARD[0], 2, "least"),
        (AWKWARD[1], 3, "wide tiles"),
        (AWKWARD[2], 33, "wide tiles"),
        (AWKWARD[3], 4, "whole width"),
        (AWKWARD[4], 17, "least"),
    ],
    ids=lambda value: getattr(value, "name", str(value)).replace(" ", "-"),
)
def test_it_is_the_exact_sum(spec, rows, tiling):
    case = specs.draw(spec, rows, np.random.default_rng(rows))
    assert error(run(case, tilings(spec)[tiling]), case) < BOUND


def test_every_code_and_scales_from_1e_6_to_1e2_are_exact_in_float32():
    """Scales of 8 orders of magnitude within a sum: rounded to bfloat16 weights, each product
    would lose 8 bits, and the largest ones decide."""
    case = specs.draw(SMALL, 3, np.random.default_rng(1), scales=(1e-6, 1e2))
    assert set(np.unique(case.gate_up_codes & 15)) == set(range(16))
    case = dataclasses.replace(case, x=(case.x * np.float32(1e-3)).astype(case.x.dtype))
    assert error(run(case), case) < BOUND


def test_one_expert_can_take_every_row():
    case = specs.draw(SMALL, 20, np.random.default_rng(2))
    case.ids[:, 0] = 2
    case.ids[:, 1] = -1
    for tile_rows in (8, 16, 32):
        tiling = dataclasses.replace(PLAIN, tile_rows=tile_rows)
        assert error(run(case, tiling), case) < BOUND


def test_rows_that_are_routed_nowhere_are_zero():
    case = specs.draw(SMALL, 5, np.random.default_rng(3))
    case.ids[1] = -1
    case.ids[3] = SMALL.experts  # another device's
    out = run(case)
    assert not out[[1, 3]].any()
    assert error(out, case) < BOUND
    case.ids[:] = -1
    assert not run(case).any()


def test_nan_where_nothing_is_routed_changes_nothing():
    """Dead rows, experts that no row chose, and whatever memory holds (fresh memory is NaN)."""
    case = specs.draw(SMALL, 6, np.random.default_rng(4))
    case.ids[case.ids == 1] = -1
    case.ids[4] = -1
    expected = run(case)
    case.x[4] = np.nan
    case.weights[4] = np.nan
    case.gate_up_scales[1], case.down_scales[1] = np.nan, np.inf
    assert np.array_equal(run(case), expected)


def test_a_row_with_nan_leaves_the_others_alone():
    case = specs.draw(SMALL, 6, np.random.default_rng(5))
    expected = run(case)
    case.x[2] = np.nan
    out = run(case)
    assert np.isnan(out[2]).all()
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(out[others], expected[others])


def test_a_row_is_bit_equal_whatever_else_is_in_the_batch():
    """Alone, among others, elsewhere in the batch, and where its experts have two tiles."""
    spec = dataclasses.replace(SMALL, hidden=512, choices=3)
    case = specs.draw(spec, 19, np.random.default_rng(6))
    whole = run(case)
    for rows in ([7], [7, 0], [3, 18, 7, 5], list(range(18, -1, -1))):
        assert np.array_equal(run(rows_of(case, rows)), whole[rows])


@pytest.mark.parametrize(
    ("tiling", "num_blocks"),
    [
        (Tiling(tile_rows=8, warp_blocks=1, down_units=1, down_tiles=2, slots=2), 1),
        (Tiling(tile_rows=16, warp_blocks=4, down_units=2, slots=2, stream=True), 2),
        (Tiling(tile_rows=32, warp_blocks=1, down_units=2, slots=4), 5),
    ],
)
def test_tilings_and_grids_change_no_bit(tiling, num_blocks):
    spec = dataclasses.replace(SMALL, hidden=512, width=256)
    if tiling.down_tiles > 1:
        tiling = dataclasses.replace(tiling, down_units=2)
    case = specs.draw(spec, 11, np.random.default_rng(7))
    assert np.array_equal(run(case, tiling, num_blocks=num_blocks), run(case))


@pytest.mark.parametrize("seed", range(3))
def test_the_order_in_which_things_happen_changes_no_bit(seed):
    case = specs.draw(SMALL, 9, np.random.default_rng(8))
    assert np.array_equal(run(case, seed=100 + seed), run(case))


def test_two_launches_give_what_one_gives():
    case = specs.draw(SMALL, 5, np.random.default_rng(9))
    assert np.array_equal(run(case, fused=False), run(case))


def test_the_counter_is_ready_for_the_next_launch():
    """From any multiple of its unit, over the end of int32 too, and another grid after it."""
    case = specs.draw(SMALL, 2, np.random.default_rng(10))
    weights, expected = in_order(case), run(case)
    weights.counter[0] = 2**31 - LAUNCH_UNIT
    for launch, num_blocks in enumerate((3, 2, 4)):
        assert np.array_equal(run(case, weights=weights, num_blocks=num_blocks), expected)
        assert int(weights.counter[0]) == -(2**31) + launch * LAUNCH_UNIT


def test_a_layer_of_a_stack_is_that_layer():
    cases = [specs.draw(SMALL, 3, np.random.default_rng(seed)) for seed in (11, 12)]
    layers = [in_order(case) for case in cases]
    stack = dataclasses.replace(
        layers[0],
        gate_up=np.stack([w.gate_up for w in layers]),
        down=np.stack([w.down for w in layers]),
    )
    assert np.array_equal(run(cases[1], weights=stack, layer=1), run(cases[1]))


def shape_of(spec: Spec, rows: int) -> Shape:
    return Shape(
        rows=rows,
        choices=spec.choices,
        experts=spec.experts,
        hidden=spec.hidden,
        width=spec.width,
    )


@pytest.mark.parametrize("name", KNOWN)
def test_every_shape_gets_a_tiling_that_fits_every_gpu(name):
    target = KNOWN[name]
    for spec in (*specs.REAL, *specs.OTHER_REAL, TINY, TINY_TP8, *AWKWARD):
        for rows in (1, 2, 3, 8, 9, 33, 64, 128, 160, MAX_ROWS):
            shape = shape_of(spec, rows)
            layout = Layout(shape=shape, tiling=tuning.choose(shape, target))
            used = -(-layout.shared_bytes // SHARED_GRANULE) * SHARED_GRANULE
            assert used <= target.shared_bytes, (spec.name, rows)


def test_the_order_over_k_follows_from_the_experts_alone():
    for spec in (*specs.REAL, *specs.OTHER_REAL):
        slices = {shape_of(spec, rows).k_slices for rows in (1, 9, 64, MAX_ROWS)}
        assert len(slices) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(tile_rows=4), "tile_rows=4: expected 8, 16 or 32"),
        (dict(warp_blocks=3), "warp_blocks=3"),
        (dict(slots=1), "needs at least 2"),
        (dict(tile_rows=32, down_tiles=2), "down_tiles=2: expected 1 to 1"),
    ],
)
def test_a_tiling_that_cannot_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **values)


def test_a_tiling_has_to_suit_its_shape():
    with pytest.raises(ValueError, match="down_units=4 does not divide the 2 units"):
        Layout(shape=shape_of(TINY, 1), tiling=dataclasses.replace(PLAIN, down_units=4))
    with pytest.raises(ValueError, match="needs all 2 units"):
        Layout(shape=shape_of(TINY, 1), tiling=dataclasses.replace(PLAIN, down_tiles=2))


def test_on_a_cpu_auto_is_the_reference():
    case = specs.draw(SMALL, 3, np.random.default_rng(13))
    experts = types.SimpleNamespace(**{k: jnp.asarray(v) for k, v in vars(case).items()})
    assert api.choose() == "reference"
    out = api.routed_experts(experts.x, case.ids, case.weights, experts)
    assert error(np.asarray(out), case) < 1e-5


def test_the_kernel_is_refused_where_there_is_no_gpu():
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, this process has 'cpu'"):
        api.choose("mosaic")
    assert api.choose("mosaic", target=KNOWN["sm_120"]) == "mosaic"


def test_an_unknown_implementation_is_named():
    with pytest.raises(NotImplementedError, match="'cuda' does not exist"):
        api.choose("cuda")  # type: ignore[arg-type]


def test_experts_and_implementation_have_to_agree():
    case = specs.draw(SMALL, 1, np.random.default_rng(14))
    weights = api.pack(case)
    call = (jnp.asarray(case.x), case.ids, case.weights)
    with pytest.raises(ValueError, match="needs experts in the kernel's order"):
        api.routed_experts(*call, case, implementation="mosaic")
    with pytest.raises(ValueError, match="needs canonical experts"):
        api.routed_experts(*call, weights, implementation="reference")
    with pytest.raises(NotImplementedError, match="rows of float32"):
        api.routed_experts(call[0].astype(jnp.float32), *call[1:], weights)
    with pytest.raises(ValueError, match="layer=3 with weights of shape"):
        api.routed_experts(*call, weights, layer=3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 100, 128), "hidden size 100 is not a multiple of 32"),
        ((4, 256, 16), "expert width 16 is not a multiple of 32"),
        ((1 << 16, 256, 128), "65536 experts"),
    ],
)
def test_sizes_that_the_kernel_cannot_serve_are_named(sizes, message):
    with pytest.raises(NotImplementedError, match=message):
        api.check(*sizes)


def test_packing_a_layer_is_undone_bit_for_bit():
    case = specs.draw(TINY_TP8, 1, np.random.default_rng(15))
    again = packed.unpack(api.pack(case))
    for name, array in zip(
        ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales"), again, strict=True
    ):
        assert np.asarray(array).tobytes() == getattr(case, name).tobytes()


def test_a_gpu_is_known_by_its_capability():
    from kimi_jax.pallas.stream import target

    device = types.SimpleNamespace(compute_capability="9.0", core_count=114)
    assert target.of(device).num_cores == 114  # type: ignore[arg-type]
    assert target.of(device).name == "sm_90"  # type: ignore[arg-type]
    old = types.SimpleNamespace(compute_capability="8.0", core_count=108)
    with pytest.raises(NotImplementedError, match="compute capability 8.0 is not supported"):
        target.of(old)  # type: ignore[arg-type]
