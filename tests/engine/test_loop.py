import jax
import numpy as np
import pytest
from small_engine import (
    MODEL,
    OPTIONS,
    alone,
    drain,
    parameters,
    programs,
    teacher_forced,
    tokenizer,
)

from kimi_jax.engine.loop import Engine
from kimi_jax.engine.request import Request
from kimi_jax.sampling import SamplingParams


def prompts(number, *, longest=60, seed=0):
    rng = np.random.default_rng(seed)
    return [
        tuple(rng.integers(0, 256, rng.integers(1, longest + 1)).tolist()) for _ in range(number)
    ]


def greedy(prompt, **params):
    return Request(
        prompt=tuple(prompt), params=SamplingParams(temperature=0, ignore_eos=True, **params)
    )


PROMPT = prompts(1)[0]


def test_forty_prompts_through_four_slots_give_what_each_gives_alone(engine):
    requests = [
        Request(
            prompt=prompt,
            params=SamplingParams(
                temperature=(0, 0.8)[i % 2],
                top_p=0.95,
                seed=i,
                max_tokens=1 + i * 7 % 40,
                ignore_eos=i % 3 == 0,
            ),
        )
        for i, prompt in enumerate(prompts(40))
    ]
    expected = [alone(engine, request) for request in requests]
    ids = [engine.add(request) for request in requests]
    together = drain(engine)
    for index, whole in zip(ids, expected, strict=True):
        assert together[index].token_ids == whole.token_ids
        assert together[index].text == whole.text
        assert together[index].finish_reason == whole.finish_reason
        np.testing.assert_allclose(together[index].logprobs, whole.logprobs, atol=1e-4)
    assert {whole.finish_reason for whole in expected} == {"stop", "length"}


def test_greedy_tokens_and_logprobs_are_those_of_one_pass_over_the_whole_text(engine):
    for prompt in prompts(4, seed=1):
        whole = alone(engine, greedy(prompt, max_tokens=40))
        logits = teacher_forced((*prompt, *whole.token_ids))[len(prompt) - 1 : -1]
        assert whole.token_ids == logits.argmax(axis=-1).tolist()
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        chosen = np.take_along_axis(log_probs, np.array(whole.token_ids)[:, None], 1)[:, 0]
        np.testing.assert_allclose(whole.logprobs, chosen, atol=1e-3)


def test_the_likeliest_tokens_are_reported_to_those_that_ask(engine):
    asks = engine.add(greedy(PROMPT, max_tokens=5, logprobs=3))
    does_not = engine.add(greedy(PROMPT, max_tokens=5))
    wholes = drain(engine)
    assert wholes[does_not].top_logprobs is None
    logits = teacher_forced((*PROMPT, *wholes[asks].token_ids))[len(PROMPT) - 1 : -1]
    for row, top, token in zip(
        logits, wholes[asks].top_logprobs, wholes[asks].token_ids, strict=True
    ):
        assert list(top) == np.argsort(-row, kind="stable")[:3].tolist()
        assert next(iter(top)) == token
    first = [max(top.values()) for top in wholes[asks].top_logprobs]
    np.testing.assert_allclose(first, wholes[asks].logprobs, atol=1e-6)


def test_a_prompt_of_one_token_needs_no_prefill(engine):
    whole = alone(engine, greedy([5], max_tokens=8))
    assert whole.token_ids == teacher_forced((5, *whole.token_ids))[:-1].argmax(axis=-1).tolist()


def test_nothing_is_compiled_after_warm_up():
    engine = Engine(programs(), parameters(), tokenizer=tokenizer())
    engine.warm_up(engine.programs.plan(), engine.programs.plan(num_logprobs=5))
    before = engine.compilations
    for i, prompt in enumerate(prompts(9)):
        params = SamplingParams(
            temperature=0.5 * (i % 3), logprobs=i % 3 or None, max_tokens=9, logit_bias={i: 1.0}
        )
        engine.add(Request(prompt=prompt, params=params))
    drain(engine)
    assert engine.compilations == before


def test_the_twentieth_request_is_the_first_and_memory_stays_flat_over_a_thousand_steps(engine):
    def run():
        whole = alone(engine, Request(prompt=PROMPT[:20], params=params))
        return whole.token_ids, whole.text, sum(array.nbytes for array in jax.live_arrays())

    params = SamplingParams(temperature=0.9, seed=1, max_tokens=60, ignore_eos=True)
    results = [run() for _ in range(20)]
    assert all(result == results[0] for result in results)
    assert len(results[0][0]) * 20 > 1000


# Where a sequence ends


def test_max_tokens_is_exact(engine):
    for limit in (1, 2, 3, 4, 7):
        whole = alone(engine, greedy(PROMPT, max_tokens=limit))
        assert len(whole.token_ids) == whole.usage.completion_tokens == limit
        assert (whole.finish_reason, whole.stop_reason) == ("length", "max_tokens")


@pytest.mark.parametrize("left", [1, 2, 9])
def test_the_context_is_filled_to_its_last_token(engine, left):
    prompt = [9] * (OPTIONS.max_model_len - left)
    whole = alone(engine, greedy(prompt))
    assert len(whole.token_ids) == left
    assert (whole.finish_reason, whole.stop_reason) == ("length", "max_model_len")


def test_a_stop_id_is_the_last_token_and_no_text(engine):
    free = alone(engine, greedy(PROMPT, max_tokens=30)).token_ids
    for j in range(6):
        if free[j] in free[:j]:
            continue
        whole = alone(engine, greedy(PROMPT, max_tokens=30, stop_token_ids=(free[j],)))
        assert whole.token_ids == free[: j + 1]
        assert (whole.finish_reason, whole.stop_reason) == ("stop", free[j])
        assert whole.text == tokenizer().decode(free[:j], skip_special=True)
        assert len(whole.logprobs) == whole.usage.completion_tokens == j + 1


def test_both_end_tokens_of_the_model_stop_unless_they_are_ignored(engine):
    for end in MODEL.eos_token_ids:
        params = {"temperature": 0.0, "logit_bias": {end: 100.0}, "max_tokens": 4}
        stops = alone(engine, Request(prompt=PROMPT, params=SamplingParams(**params)))
        assert (stops.token_ids, stops.finish_reason) == ([end], "stop")
        runs = alone(
            engine, Request(prompt=PROMPT, params=SamplingParams(**params, ignore_eos=True))
        )
        assert (runs.token_ids, runs.finish_reason) == ([end] * 4, "length")


def test_no_stop_id_comes_within_min_tokens(engine):
    params = SamplingParams(
        temperature=0.0, logit_bias={257: 100.0, 258: 90.0}, max_tokens=9, min_tokens=5
    )
    whole = alone(engine, Request(prompt=PROMPT, params=params))
    assert not set(whole.token_ids[:5]) & {257, 258}
    assert (whole.token_ids[5:], whole.finish_reason) == ([257], "stop")


def text_model(engine, **params):
    """Sampled bytes: text that is worth searching for stop strings."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, **params)
    return Request(prompt=PROMPT, params=params)


def test_a_stop_string_cuts_text_ids_logprobs_and_counts_alike(engine):
    free = alone(engine, text_model(engine))
    for j in (3, 10, 20):
        stop = tokenizer().decode(free.token_ids[j : j + 3], skip_special=True)
        end = free.text.index(stop)
        whole = alone(engine, text_model(engine, stop=(stop,)))
        assert (whole.finish_reason, whole.stop_reason) == ("stop", stop)
        assert whole.text == free.text[:end]
        count = len(whole.token_ids)
        assert whole.token_ids == free.token_ids[:count]
        assert stop in tokenizer().decode(whole.token_ids, skip_special=True)
        assert stop not in tokenizer().decode(whole.token_ids[:-1], skip_special=True)
        np.testing.assert_allclose(whole.logprobs, free.logprobs[:count], atol=1e-4)
        assert whole.usage.completion_tokens == count == whole.stats.steps


def test_a_slot_whose_sequence_was_cut_serves_the_next_one_rightly(engine):
    free = alone(engine, text_model(engine))
    stop = tokenizer().decode(free.token_ids[4:7], skip_special=True)
    expected = alone(engine, greedy(PROMPT, max_tokens=20)).token_ids
    alone(engine, text_model(engine, stop=(stop,)))
    assert alone(engine, greedy(PROMPT, max_tokens=20)).token_ids == expected


def test_streamed_pieces_join_to_the_decoded_tokens(engine):
    whole = alone(engine, text_model(engine, stop=("never to be found",)))
    assert whole.text == tokenizer().decode(whole.token_ids, skip_special=True)
    assert len(whole.outputs) > 10


def test_reasoning_is_what_precedes_the_close_marker(engine):
    close = tokenizer().special("</think>")
    thinking = Request(
        prompt=PROMPT,
        params=SamplingParams(temperature=0.0, max_tokens=4, logit_bias={close: 100.0}),
        thinking=True,
    )
    whole = alone(engine, thinking)
    assert (whole.reasoning, whole.usage.reasoning_tokens) == ("", 1)
    endless = Request(
        prompt=PROMPT,
        params=SamplingParams(temperature=0.0, max_tokens=4, logit_bias={65: 100.0}),
        thinking=True,
    )
    whole = alone(engine, endless)
    assert (whole.reasoning, whole.text) == ("AAAA", "")
    assert whole.usage.reasoning_tokens == whole.usage.completion_tokens == 4
    assert whole.finish_reason == "length"


# Seeds


def sampled(seed=None):
    return Request(prompt=PROMPT, params=SamplingParams(temperature=1.0, seed=seed, max_tokens=16))


def test_a_seed_gives_the_same_tokens_on_any_engine_and_at_any_index(engine):
    first, *others = [alone(engine, sampled(seed=5)).token_ids for _ in range(3)]
    assert others == [first, first]
    assert alone(engine, sampled(seed=6)).token_ids != first
    assert alone(engine, sampled(seed=5 + 2**32)).token_ids != first


def test_without_a_seed_the_index_and_the_engine_decide():
    def run():
        engine = Engine(programs(), parameters(), tokenizer=tokenizer())
        return [alone(engine, sampled()).token_ids for _ in range(2)]

    first, second = run()
    assert first != second
    assert run() == [first, second]


# Ends from outside


def test_abort_frees_slot_and_pages_and_leaves_the_others_alone(engine):
    short = [prompt[:10] for prompt in prompts(6, seed=2)]
    expected = [alone(engine, greedy(prompt, max_tokens=20)).token_ids for prompt in short]
    everything = engine.free_pages
    first, decoding, second = (engine.add(greedy(prompt, max_tokens=20)) for prompt in short[:3])
    prefilling = engine.add(greedy([3] * 100, max_tokens=20))  # more than a step writes
    waiting = [engine.add(greedy(prompt, max_tokens=20)) for prompt in short[3:]]
    begun = {output.request_id: list(output.token_ids) for output in engine.step()}
    assert set(begun) == {first, decoding, second}
    before = engine.free_pages
    outputs = [engine.abort(index) for index in (decoding, prefilling, waiting[0])]
    assert engine.free_pages > before
    assert [output.finish_reason for output in outputs] == ["abort"] * 3
    assert [output.usage.completion_tokens for output in outputs] == [3, 0, 0]
    wholes = drain(engine)
    assert engine.free_pages == everything
    kept = {first: 0, second: 2, waiting[1]: 4, waiting[2]: 5}
    assert set(wholes) == set(kept)
    for index, number in kept.items():
        assert begun.get(index, []) + wholes[index].token_ids == expected[number]


def test_abort_of_a_request_that_has_ended_is_nothing(engine):
    index = engine.add(greedy(PROMPT, max_tokens=1))
    drain(engine)
    assert engine.abort(index) is None
    assert engine.abort(12345) is None


# What is refused


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (greedy([]), "no tokens"),
        (greedy([3, 512]), "token id 512; the vocabulary has ids 0..511"),
        (greedy([-1]), "token id -1"),
        (greedy([1] * 128), r"128 tokens; the context \(max_model_len\) holds 128.*127 tokens"),
        (greedy([1], logprobs=6), "at most max_logprobs=5"),
        (greedy([1], stop_token_ids=(1, 2, 3, 4, 5)), "5 stop ids; the engine was built for"),
        (greedy([1], stop_token_ids=(512,)), "stop_token_ids=512"),
        (greedy([1], logit_bias=dict.fromkeys(range(5), 1.0)), "5 logit_bias entries"),
        (greedy([1], logit_bias={512: 1.0}), "logit_bias=512"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_name(engine, request_, message):
    with pytest.raises(ValueError, match=message):
        engine.add(request_)
    assert not engine.busy


def test_stop_strings_without_a_tokenizer_are_refused():
    engine = Engine(programs(), parameters())
    with pytest.raises(ValueError, match="need a tokenizer"):
        engine.add(greedy([1], stop="x"))
    assert alone(engine, greedy([1], max_tokens=3)).text == ""
