import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.scipy.stats import chi2

from kimi_jax import sampling
from kimi_jax.sampling import SamplingParams

# Truncation against a reference that sorts

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

truncate = jax.jit(sampling.truncate)
draw = jax.jit(sampling.draw)
apply_bias = jax.jit(sampling.apply_bias)
forbid = jax.jit(sampling.forbid)
gumbel = jax.jit(sampling.gumbel)


def rows(count, **values):
    """One value a row of each truncation parameter, 'off' unless given."""
    types = {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    return {
        name: np.broadcast_to(np.asarray(value, types.get(name, np.float32)), (count,))
        for name, value in {**OFF, **values}.items()
    }


def kept(logits, **values):
    logits = np.asarray(logits, np.float32)
    return np.asarray(truncate(logits, **rows(len(logits), **values)))


def reference_keep(logits, top_k, top_p, min_p):
    """One row, float64, by sorting; the margin says how near a rounding error could decide."""
    logits = np.asarray(logits, np.float64)
    probs = np.exp(logits - logits.max())
    keep = logits > -np.inf
    margin = np.inf
    if min_p > 0:
        keep &= probs >= min_p
        margin = min(margin, np.min(np.abs(probs - min_p)))
    if top_k > 0:
        keep &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    if top_p < 1:
        left = np.where(keep, probs, 0) / np.sum(probs[keep])
        order = np.argsort(-logits, kind="stable")
        mass = np.cumsum(left[order])
        margin = min(margin, np.min(np.abs(mass - top_p)))
        lowest = logits[order][np.searchsorted(mass, top_p)]
        keep &= logits >= lowest
    return keep, margin


finite = st.floats(-300, 300, width=32, allow_subnormal=False)
few_values = st.sampled_from([-np.inf, -3.0, -0.0, 0.0, 0.5, 0.5000001, 2.0, 30.0])
logit_rows = st.one_of(
    st.lists(finite, min_size=8, max_size=8),
    st.lists(few_values, min_size=8, max_size=8),  # ties, both zeros, -inf
    st.lists(st.integers(-4, 4).map(float), min_size=8, max_size=8),
).filter(lambda row: max(row) > -np.inf)


@given(
    row=logit_rows,
    top_k=st.integers(0, 10),
    top_p=st.one_of(st.just(1.0), st.floats(0.0009765625, 1.0, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32, allow_subnormal=False)),
)
def test_truncation_equals_a_reference_that_sorts(row, top_k, top_p, min_p):
    keep, margin = reference_keep(row, top_k, top_p, min_p)
    result = kept([row], top_k=top_k, top_p=top_p, min_p=min_p)[0]
    assert result[np.argmax(row)] > -np.inf
    if margin > 1e-5:
        assert np.array_equal(result > -np.inf, keep)
    assert np.array_equal(result[result > -np.inf], np.float32(row)[result > -np.inf])


def test_truncation_equals_the_reference_on_a_real_vocabularys_size():
    generator = np.random.default_rng(0)
    logits = (generator.standard_normal((6, 163_840)) * 3).astype(np.float32)
    values = {"top_k": [0, 1, 50, 1000, 0, 50], "top_p": [0.95, 1, 0.9, 0.5, 1, 0.3]}
    values["min_p"] = [0, 0, 0, 0.001, 0.05, 0.01]
    result = kept(logits, **values)
    for index, row in enumerate(logits):
        options = {name: column[index] for name, column in values.items()}
        keep, _ = reference_keep(row, **options)
        # The nucleus' edge is a sum of 163,840 float32 numbers: one token may fall either way.
        assert np.sum((result[index] > -np.inf) != keep) <= (2 if options["top_p"] < 1 else 0)


def test_off_keeps_everything_as_it_is():
    logits = np.array([[1.0, -np.inf, 60.0, -60.0, 0.0]], np.float32)
    assert np.array_equal(kept(logits), logits)


def test_top_k_keeps_ties_with_the_last():
    assert np.array_equal(kept([[3, 2, 2, 1]], top_k=2)[0] > -np.inf, [1, 1, 1, 0])


def test_both_zeros_are_equal():
    assert np.array_equal(kept([[0.0, -0.0, -1.0]], top_k=1)[0] > -np.inf, [1, 1, 0])


def test_the_closest_logits_are_told_apart():
    two = np.float32(2)
    logits = np.float32([[two, np.nextafter(two, np.float32(3)), np.nextafter(two, np.float32(1))]])
    assert np.array_equal(kept(logits, top_k=1)[0] > -np.inf, [0, 1, 0])
    assert np.array_equal(kept(logits, top_k=2)[0] > -np.inf, [1, 1, 0])
    assert np.array_equal(kept(logits, top_p=0.3)[0] > -np.inf, [0, 1, 0])
    assert np.array_equal(kept(-logits, top_p=0.6)[0] > -np.inf, [1, 0, 1])


def test_logits_of_any_size_have_a_nucleus():
    logits = np.log([[0.5, 0.25, 0.125, 0.125]])
    for shift in (-1e4, 1e4):
        assert np.array_equal(kept(logits + shift, top_p=0.6)[0] > -np.inf, [1, 1, 0, 0])


def test_top_p_stops_as_soon_as_the_mass_reaches_it():
    logits = np.log([[0.5, 0.25, 0.125, 0.125]])
    assert np.array_equal(kept(logits, top_p=0.5)[0] > -np.inf, [1, 0, 0, 0])
    assert np.array_equal(kept(logits, top_p=0.51)[0] > -np.inf, [1, 1, 0, 0])
    assert np.array_equal(kept(logits, top_p=0.76)[0] > -np.inf, [1, 1, 1, 1])


def test_top_p_is_of_what_top_k_left():
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    # 0.4 / 0.7 = 0.571 reaches 0.55; of the whole, 0.4 would not.
    assert np.array_equal(kept(logits, top_p=0.55, top_k=2)[0] > -np.inf, [1, 0, 0, 0])
    assert np.array_equal(kept(logits, top_p=0.55)[0] > -np.inf, [1, 1, 0, 0])


def test_min_p_is_relative_to_the_most_likely_token():
    logits = np.log([[0.5, 0.26, 0.24]])
    assert np.array_equal(kept(logits, min_p=0.5)[0] > -np.inf, [1, 1, 0])


@pytest.mark.parametrize("top_p", [1e-30, 1e-45])
def test_a_tiny_top_p_keeps_the_most_likely_token(top_p):
    assert np.array_equal(kept([[1, 3, 2]], top_p=top_p)[0] > -np.inf, [0, 1, 0])


def test_rows_do_not_see_each_other():
    generator = np.random.default_rng(1)
    logits = (generator.standard_normal((5, 33)) * 4).astype(np.float32)
    values = {"top_k": [0, 3, 0, 5, 1], "top_p": [1, 0.9, 0.5, 1, 0.7]}
    values["min_p"] = [0.1, 0, 0, 0.2, 0]
    together = kept(logits, **values)
    for index in range(5):
        one = {name: [column[index]] for name, column in values.items()}
        assert np.array_equal(kept(logits[index : index + 1], **one)[0], together[index])


def test_a_row_of_minus_inf_alone_stays_one():
    assert np.all(kept([[-np.inf] * 4], top_k=2, top_p=0.5, min_p=0.1) == -np.inf)


# Noise


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        # Random123's known-answer file kat_vectors, threefry2x32 20
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_words(key, counter, words):
    def as_words(pair):
        return jnp.uint32(pair[0]), jnp.uint32(pair[1])

    got = jax.jit(sampling.threefry2x32)(as_words(key), as_words(counter))
    assert tuple(int(word) for word in got) == words


def test_noise_is_finite_and_falls_as_the_words_grow():
    bits = np.array([0, 1, 2, 2**8, 2**24, 2**31, 2**32 - 2**9, 2**32 - 2, 2**32 - 1], np.uint32)
    noise = np.asarray(jax.jit(sampling.gumbel_from_bits)(bits))
    assert np.all(np.isfinite(noise))
    assert np.all(np.diff(noise) <= 0) and np.all(np.diff(noise[:6]) < 0)
    exact = -np.log(-np.log1p(-(bits[:6].astype(np.float64) + 0.5) * 2.0**-32))
    np.testing.assert_allclose(noise[:6], exact, rtol=2e-6, atol=2e-6)
    # The lowest noise, which draws nothing, is where float32 uniforms are coarsest.
    assert np.all((noise[6:] > -2.9) & (noise[6:] < -2.7))


def test_noise_has_gumbels_distribution():
    noise = gumbel(np.uint32([3, 4]), np.arange(200), np.arange(500, dtype=np.uint32))
    sorted_noise = np.sort(np.asarray(noise, np.float64).ravel())
    law = np.exp(-np.exp(-sorted_noise))
    distance = np.max(np.abs(law - (np.arange(len(law)) + 0.5) / len(law)))
    assert distance < 1.95 / np.sqrt(len(law))  # Kolmogorov-Smirnov at p = 0.001


def test_each_of_seed_position_and_id_changes_the_noise():
    seed = np.uint32([5, 6])
    noise = np.asarray(gumbel(seed, np.int32(7), np.uint32([8, 9])))
    assert noise[0] != noise[1]
    for other in (np.uint32([5, 7]), np.uint32([6, 6]), np.uint32([6, 5])):
        assert np.all(np.asarray(gumbel(other, np.int32(7), np.uint32([8, 9]))) != noise)
    assert np.all(np.asarray(gumbel(seed, np.int32(8), np.uint32([8, 9]))) != noise)


def test_a_slice_of_the_vocabulary_has_its_part_of_the_noise():
    seed, position = np.uint32([[1, 2], [3, 4]]), np.int32([10, 262_143])
    whole = np.asarray(gumbel(seed, position, np.arange(64, dtype=np.uint32)))
    for start in range(0, 64, 16):
        part = gumbel(seed, position, np.arange(start, start + 16, dtype=np.uint32))
        assert np.array_equal(np.asarray(part), whole[:, start : start + 16])


def test_leading_axes_of_seed_and_position_broadcast():
    seed, positions = np.uint32([[1, 2], [3, 4]]), np.int32([[5, 6, 7], [8, 9, 10]])
    ids = np.arange(11, dtype=np.uint32)
    noise = np.asarray(gumbel(seed[:, None], positions, ids))
    assert noise.shape == (2, 3, 11)
    assert np.array_equal(noise[1, 2], np.asarray(gumbel(seed[1], positions[1, 2], ids)))


# Draws

LOGITS = np.float32([2.0, 1.0, 0.5, 0.5, 0.0, -1.0, -2.0, -np.inf])


def draws(count, *, seed=(11, 12), temperature=1.0, first=0, noise=None, **values):
    """`count` draws from LOGITS at consecutive positions of one request."""
    logits = np.broadcast_to(LOGITS, (count, len(LOGITS)))
    positions = first + np.arange(count, dtype=np.int32)
    if noise is None:
        noise = gumbel(np.uint32(seed), positions, np.arange(len(LOGITS), dtype=np.uint32))
    options = rows(count, temperature=temperature, **values)
    return np.asarray(draw(logits, noise=noise, **options))


def law(temperature=1.0, **values):
    scaled = LOGITS.astype(np.float64) / temperature
    keep, _ = reference_keep(scaled, **{**OFF, **values})
    probs = np.where(keep, np.exp(scaled - scaled.max()), 0)
    return probs / probs.sum()


def p_value(observed, probs):
    """Chi-square goodness of fit of counts; an outcome of probability 0 must not occur."""
    possible = probs > 0
    if np.any(observed[~possible]):
        return 0.0
    expected = probs[possible] * observed.sum()
    statistic = np.sum((observed[possible] - expected) ** 2 / expected)
    return float(chi2.sf(statistic, possible.sum() - 1))


COUNT = 40_000
SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", [(0, 0), (11, 12)])
def test_draws_follow_the_truncated_law(options, seed):
    observed = np.bincount(draws(COUNT, seed=seed, **options), minlength=len(LOGITS))
    assert p_value(observed, law(**options)) > 1e-4


@pytest.mark.parametrize(
    "wrong", [{"temperature": 1.05}, {"top_p": 0.95}, {"top_k": 6}, {"min_p": 0.05}], ids=str
)
def test_the_chi_square_rejects_a_wrong_law(wrong):
    observed = np.bincount(draws(COUNT, **wrong), minlength=len(LOGITS))
    assert p_value(observed, law()) < 1e-4


def test_the_chi_square_rejects_other_noise():
    uniform = np.random.default_rng(0).random((COUNT, len(LOGITS)), np.float32)
    observed = np.bincount(draws(COUNT, noise=uniform), minlength=len(LOGITS))
    assert p_value(observed, law()) < 1e-4


@pytest.mark.parametrize("other", [{"first": 1}, {"seed": (12, 12)}, {"seed": (11, 13)}], ids=str)
def test_draws_of_neighbouring_positions_and_seeds_are_independent(other):
    pairs = draws(COUNT) * len(LOGITS) + draws(COUNT, **other)
    observed = np.bincount(pairs, minlength=len(LOGITS) ** 2)
    assert p_value(observed, np.outer(law(), law()).ravel()) > 1e-4


def test_a_draw_does_not_depend_on_the_batch():
    generator = np.random.default_rng(2)
    logits = (generator.standard_normal((6, 50)) * 3).astype(np.float32)
    seeds = generator.integers(0, 2**32, (6, 2), dtype=np.uint32)
    positions = np.int32([0, 5, 5, 900, 17, 3])
    values = rows(
        6,
        temperature=[1, 0, 0.7, 2, 0.6, 1],
        top_k=[0, 5, 10, 0, 2, 1],
        top_p=[0.95, 0.5, 1, 0.9, 1, 1],
    )
    ids = np.arange(50, dtype=np.uint32)

    def drawn(order):
        return np.asarray(
            draw(
                logits[order],
                noise=gumbel(seeds[order], positions[order], ids),
                **{name: column[order] for name, column in values.items()},
            )
        )

    together = drawn(np.arange(6))
    assert np.array_equal(drawn(np.arange(6)[::-1]), together[::-1])
    for index in range(6):
        assert drawn(np.array([index]))[0] == together[index]


def test_temperature_0_takes_the_lowest_of_the_most_likely_ids_whatever_the_noise():
    logits = np.float32([[1, 5, 5, 2], [0, 0, 0, 0], [-np.inf, -3, -np.inf, -3]])
    noise = np.float32([[0, 1, 20, 40]] * 3)  # would take the highest id
    result = draw(logits, noise=noise, **rows(3, temperature=0, top_k=2, top_p=0.5))
    assert result.dtype == np.int32
    assert np.array_equal(np.asarray(result), [1, 0, 1])


def test_top_k_1_equals_greedy():
    logits = np.random.default_rng(4).standard_normal((200, 30)).astype(np.float32)
    noise = gumbel(np.uint32([1, 1]), np.arange(200), np.arange(30, dtype=np.uint32))
    sampled = draw(logits, noise=noise, **rows(200, temperature=1.5, top_k=1))
    assert np.array_equal(np.asarray(sampled), np.argmax(logits, axis=-1))


def test_the_lowest_temperature_is_greedy_unless_logits_are_close():
    logits = np.random.default_rng(5).permuted(
        np.tile(np.arange(30, dtype=np.float32) * 0.1, (200, 1)), axis=1
    )
    noise = gumbel(np.uint32([1, 1]), np.arange(200), np.arange(30, dtype=np.uint32))
    sampled = draw(logits, noise=noise, **rows(200, temperature=sampling.MIN_TEMPERATURE))
    assert np.array_equal(np.asarray(sampled), np.argmax(logits, axis=-1))


def test_a_draw_from_nan_is_still_an_id_of_the_vocabulary():
    logits = np.full((1, 8), np.nan, np.float32)
    noise = np.zeros((1, 8), np.float32)
    for temperature in (0.0, 1.0):
        token = draw(logits, noise=noise, **rows(1, temperature=temperature, top_p=0.9))
        assert 0 <= int(token[0]) < 8


def test_other_values_compile_nothing():
    function = jax.jit(lambda *args, **options: sampling.draw(*args, **options))
    logits, noise = np.zeros((2, 16), np.float32), np.zeros((2, 16), np.float32)
    function(logits, noise=noise, **rows(2, temperature=0))
    function(logits, noise=noise, **rows(2, temperature=1, top_k=3, top_p=0.5, min_p=0.1))
    assert function._cache_size() == 1


# Bias, forbidden ids, log-probabilities


def test_biases_are_added_and_minus_one_is_none():
    logits = np.zeros((2, 5), np.float32)
    ids = np.int32([[1, 4, -1], [0, -1, -1]])
    values = np.float32([[2, -3, 50], [1, 60, 70]])
    biased = apply_bias(logits, ids, values)
    assert np.array_equal(np.asarray(biased), [[0, 2, 0, 0, -3], [1, 0, 0, 0, 0]])


def test_ids_of_another_shard_are_ignored():
    logits = np.zeros((1, 5), np.float32)
    ids, values = np.int32([[-4, 5, 900, 2]]), np.float32([[1, 1, 1, 1]])
    biased = apply_bias(logits, ids, values)
    assert np.array_equal(np.asarray(biased), [[0, 0, 1, 0, 0]])
    forbidden = forbid(logits, ids, np.array([True]))
    assert np.array_equal(np.asarray(forbidden), [[0, 0, -np.inf, 0, 0]])


def test_forbidden_ids_are_never_drawn_in_the_masked_rows():
    logits = np.zeros((2, 4), np.float32)
    ids = np.int32([[0, 2, -1], [0, 2, -1]])
    result = forbid(logits, ids, np.array([True, False]))
    assert np.array_equal(np.asarray(result), [[-np.inf, 0, -np.inf, 0], [0, 0, 0, 0]])


def test_logprob_is_the_log_softmax_of_the_token():
    logits = np.float32(np.random.default_rng(6).standard_normal((3, 2, 40)) * 20)
    tokens = np.int32([[0, 39], [3, 7], [11, 2]])
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.sum(np.exp(wide - wide.max(-1, keepdims=True)), -1, keepdims=True))
    expected -= wide.max(-1, keepdims=True)
    got = sampling.logprob_of(jnp.asarray(logits), jnp.asarray(tokens))
    chosen = np.take_along_axis(expected, tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(np.asarray(got), chosen, rtol=1e-5, atol=1e-5)


# Parameters


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", -1, "0 (greedy) or at least 0.001"),
        ("temperature", 0.0001, "0 (greedy) or at least 0.001"),
        ("temperature", float("nan"), "0 (greedy) or at least 0.001"),
        ("temperature", float("inf"), "0 (greedy) or at least 0.001"),
        ("temperature", "1", "0 (greedy) or at least 0.001"),
        ("temperature", True, "0 (greedy) or at least 0.001"),
        ("top_p", 0, "in (0, 1]"),
        ("top_p", 1.5, "in (0, 1]"),
        ("top_k", -1, "an integer >= 0"),
        ("top_k", 1.5, "an integer >= 0"),
        ("min_p", 1.01, "in [0, 1]"),
        ("seed", -1, "[0, 2**64)"),
        ("seed", 2**64, "[0, 2**64)"),
        ("max_tokens", 0, "an integer >= 1"),
        ("min_tokens", -1, "[0, max_tokens = inf]"),
        ("stop", "", "a non-empty string"),
        ("stop", ("a", ""), "a non-empty string"),
        ("stop", 5, "a non-empty string"),
        ("stop_token_ids", 5, "a tuple of token ids"),
        ("stop_token_ids", (-1,), "a tuple of token ids"),
        ("ignore_eos", "no", "True or False"),
        ("logprobs", -1, "[0, 20]"),
        ("logprobs", 21, "[0, 20]"),
        ("logit_bias", [1], "a dict of token id -> number"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_was_expected(field, value, expected):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith(f"{field}={value!r}: expected")
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("bias", "culprit"),
    [
        ({"7": 1.0}, "logit_bias='7'"),
        ({-7: 1.0}, "logit_bias=-7"),
        ({7: 100.5}, "logit_bias[7]=100.5"),
        ({7: float("nan")}, "logit_bias[7]=nan"),
    ],
)
def test_a_bad_bias_is_named(bias, culprit):
    with pytest.raises(ValueError) as error:
        SamplingParams(logit_bias=bias)
    assert str(error.value).startswith(culprit)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(ValueError, match=r"min_tokens=9: .*max_tokens = 8"):
        SamplingParams(max_tokens=8, min_tokens=9)


def test_ids_beyond_the_vocabulary_are_named():
    SamplingParams(stop_token_ids=(9,), logit_bias={9: 1}).check_vocabulary(10)
    with pytest.raises(ValueError, match="stop_token_ids=10.*vocabulary size 10"):
        SamplingParams(stop_token_ids=(9, 10)).check_vocabulary(10)
    with pytest.raises(ValueError, match="logit_bias=10"):
        SamplingParams(logit_bias={10: 1}).check_vocabulary(10)


def test_one_stop_string_is_a_tuple_of_one():
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_parameters_are_frozen_and_keep_their_own_bias():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


def test_presets_are_the_published_settings():
    settings = [
        (preset.temperature, preset.top_p)
        for preset in (sampling.THINKING, sampling.INSTANT, sampling.TINY, sampling.GREEDY)
    ]
    assert settings == [(1.0, 0.95), (0.6, 0.95), (0.7, 0.95), (0.0, 1.0)]
