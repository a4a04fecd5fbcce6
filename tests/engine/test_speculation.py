"""Trees through the engine: the same tokens, sooner."""

import concurrent.futures
import dataclasses
import logging as std_logging

import pytest
from small_engine import LIKELY, alone, drain, speculating_engine

from kimi_jax.engine import tuning
from kimi_jax.engine.budget import AutoBudget, FixedBudget
from kimi_jax.engine.request import Request
from kimi_jax.sampling import SamplingParams


def request(number, **params):
    defaults = {"temperature": (0.0, 0.9)[number % 2], "seed": number, "max_tokens": 30}
    return Request(
        prompt=tuple(range(number + 1, 3 * number + 9)),
        params=SamplingParams(**{**defaults, "ignore_eos": True, **params}),
    )


@pytest.fixture(scope="module")
def plain():
    """What plain decoding gives: 6 requests, by number."""
    engine = speculating_engine(FixedBudget(0))
    return [alone(engine, request(number)) for number in range(6)]


@pytest.mark.parametrize("budget", [FixedBudget(1), FixedBudget(5), FixedBudget(8), AutoBudget()])
def test_every_budget_gives_what_plain_decoding_gives(plain, budget):
    engine = speculating_engine(budget)
    ids = [engine.add(request(number)) for number in range(6)]
    wholes = drain(engine)
    assert [wholes[index].token_ids for index in ids] == [whole.token_ids for whole in plain]


def test_drafts_that_fit_save_steps(plain):
    engine = speculating_engine(FixedBudget(8))
    steps = sum(alone(engine, request(number)).stats.steps for number in range(6))
    assert steps < 0.85 * sum(whole.stats.steps for whole in plain)


def test_emitted_tokens_are_steps_and_accepted_drafts(plain):
    engine = speculating_engine(FixedBudget(8))
    stats = alone(engine, request(1)).stats
    assert stats.steps + stats.spec_decode_accepted_tokens == 30
    assert sum(stats.accepted_histogram) == stats.steps == stats.spec_decode_num_drafts
    assert stats.spec_decode_acceptance_length == pytest.approx(30 / stats.steps)
    assert stats.accepted_per_step == pytest.approx(30 / stats.steps)
    assert 0 < stats.spec_decode_draft_tokens <= 8 * stats.steps
    rates = stats.spec_decode_per_position_acceptance_rates
    assert len(rates) == 3 and list(rates) == sorted(rates, reverse=True)
    assert sum(rates) == pytest.approx(stats.spec_decode_accepted_tokens / stats.steps)
    assert all(whole.stats.spec_decode_num_drafts == 0 for whole in plain)


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_tokens_inside_an_accepted_block_is_exact(plain, limit):
    whole = alone(speculating_engine(FixedBudget(8)), request(0, max_tokens=limit))
    assert whole.token_ids == plain[0].token_ids[:limit]
    assert whole.usage.completion_tokens == limit and whole.finish_reason == "length"


def test_a_stop_id_inside_an_accepted_block_ends_there(plain):
    engine = speculating_engine(FixedBudget(8))
    for number, whole in enumerate(plain):
        for stop in set(whole.token_ids[3:]):
            first = whole.token_ids.index(stop)
            cut = alone(engine, request(number, stop_token_ids=(stop,)))
            assert cut.token_ids == whole.token_ids[: first + 1]
            assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_a_stop_string_inside_an_accepted_block_cuts_ids_logprobs_and_counts(plain):
    engine = speculating_engine(FixedBudget(8))
    for number, whole in enumerate(plain):
        stop = whole.text[6:8]
        cut = alone(engine, request(number, stop=stop))
        count = len(cut.token_ids)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.token_ids == whole.token_ids[:count]
        assert len(cut.logprobs) == cut.usage.completion_tokens == count
        assert cut.stats.steps + cut.stats.spec_decode_accepted_tokens == count


def test_min_tokens_holds_inside_a_block():
    params = {"stop_token_ids": LIKELY[:1], "min_tokens": 7, "max_tokens": 20}
    base = alone(speculating_engine(FixedBudget(0)), request(0, **params))
    whole = alone(speculating_engine(FixedBudget(8)), request(0, **params))
    assert whole.token_ids == base.token_ids
    assert LIKELY[0] not in whole.token_ids[:7]


@pytest.mark.parametrize("left", [1, 2, 3, 5])
def test_the_context_is_filled_to_its_last_token(left):
    engine = speculating_engine(FixedBudget(8))
    whole = alone(
        engine,
        dataclasses.replace(
            request(0, max_tokens=None), prompt=tuple(range(engine.options.max_model_len - left))
        ),
    )
    assert len(whole.token_ids) == left and whole.stop_reason == "max_model_len"


def test_nothing_is_compiled_after_warm_up_whatever_the_budget_does():
    budget = AutoBudget()
    engine = speculating_engine(budget)
    engine.warm_up(*(engine.programs.plan(budget=bucket) for bucket in budget.buckets))
    before = engine.compilations
    for number in range(6):
        engine.add(request(number))
    drain(engine)
    assert engine.compilations == before


def test_generation_does_not_wait_for_the_programs_with_trees(plain, monkeypatch):
    budget = AutoBudget()
    engine = speculating_engine(budget)
    first, second = (engine.programs.plan(budget=bucket) for bucket in budget.buckets)
    engine.warm_up(first)
    takes_for_ever = concurrent.futures.Future()
    monkeypatch.setitem(engine.programs._futures, second, takes_for_ever)
    whole = alone(engine, request(0))
    assert whole.token_ids == plain[0].token_ids
    assert whole.stats.spec_decode_num_drafts == 0


def test_a_drafter_that_never_helps_is_reported_once(caplog):
    engine = speculating_engine(FixedBudget(8))
    with caplog.at_level(std_logging.WARNING, logger="absl"):
        for number in range(4):
            alone(engine, request(number, logit_bias={5: 100.0}))
    assert caplog.text.count("the drafter has not helped once in") == 1


def test_step_times_are_measured_kept_and_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv(tuning.FOLDER_VARIABLE, str(tmp_path))
    engine = speculating_engine(FixedBudget(8))
    free = engine.free_pages
    times = tuning.measure(engine, buckets=(0, 8))
    assert set(times) == {(bucket, n) for bucket in (0, 8) for n in (1, 2, 4)}
    assert all(seconds > 0 for seconds in times.values())
    assert engine.free_pages == free and not engine.busy
    name = tuning.key("machine", "model")
    assert tuning.load(name, 4) is None
    tuning.save(name, 4, times)
    tuning.save(name, 1, {(0, 1): 0.5})
    assert tuning.load(name, 4) == times and tuning.load(name, 1) == {(0, 1): 0.5}
    assert tuning.load(tuning.key("another machine", "model"), 4) is None
    assert AutoBudget(tuning.load(name, 4)).buckets == (0, 8)
    expected = alone(speculating_engine(FixedBudget(0)), request(1)).token_ids
    assert alone(engine, request(1)).token_ids == expected


def test_a_damaged_table_of_step_times_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv(tuning.FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "x.json").write_text("{")
    assert tuning.load("x", 4) is None
