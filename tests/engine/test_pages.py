"""Sequences that want more pages than there are."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from small_engine import OPTIONS, alone, drain, parameters, programs, tokenizer

from kimi_jax.engine.loop import Engine
from kimi_jax.engine.request import Phase, Request
from kimi_jax.sampling import SamplingParams

TIGHT = dataclasses.replace(OPTIONS, num_pages=1 + 7)  # 56 positions for all


def request(first, length, max_tokens):
    params = SamplingParams(temperature=0.8, seed=first, max_tokens=max_tokens, ignore_eos=True)
    return Request(prompt=tuple(range(first, first + length)), params=params)


def tight_engine():
    return Engine(programs(TIGHT), parameters(), tokenizer=tokenizer())


def test_sequences_that_outgrow_the_cache_together_each_give_what_they_give_alone():
    engine = tight_engine()
    requests = [request(first, 10, 30) for first in (1, 40, 80, 120, 160)]
    expected = [alone(engine, r).token_ids for r in requests]
    ids = [engine.add(r) for r in requests]
    wholes = drain(engine)
    assert [wholes[index].token_ids for index in ids] == expected
    assert engine.free_pages == TIGHT.num_pages - 1


def test_the_youngest_starts_over_when_nothing_could_go_on():
    engine = tight_engine()
    older, younger = engine.add(request(1, 20, 30)), engine.add(request(40, 20, 30))
    phases = []
    order = []
    while engine.busy:
        for output in engine.step():
            if output.finished:
                order.append(output.request_id)
        phases.append(engine.phase(younger))
    assert order == [older, younger]
    back = phases.index(Phase.WAITING)
    assert Phase.DECODE in phases[:back] and Phase.DECODE in phases[back:]


def test_a_sequence_alone_uses_every_page_and_then_ends_out_of_pages():
    engine = tight_engine()
    whole = alone(engine, request(1, 20, 100))
    # 56 positions, and the last token needs none.
    assert whole.usage.prompt_tokens + whole.usage.completion_tokens == 57
    assert (whole.finish_reason, whole.stop_reason) == ("length", "out of pages")
    assert engine.free_pages == 7


def test_a_prompt_that_fills_the_cache_gives_one_token():
    engine = tight_engine()
    whole = alone(engine, request(1, 56, 10))
    assert (len(whole.token_ids), whole.stop_reason) == (1, "out of pages")


def test_a_prompt_that_exceeds_the_cache_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="57 tokens and needs 8 cache pages of 8; the cache has 7"):
        tight_engine().add(request(1, 57, 10))


class AnyOrderOfRequests(RuleBasedStateMachine):
    """Requests added, aborted and stepped in any order: no page is lost, shared or invented."""

    def __init__(self):
        super().__init__()
        self.engine = tight_engine()
        self.running: set[int] = set()

    @rule(length=st.integers(1, 40), max_tokens=st.integers(1, 30))
    def add(self, length, max_tokens):
        self.running.add(self.engine.add(request(1, length, max_tokens)))

    @rule()
    def step(self):
        for output in self.engine.step():
            assert output.request_id in self.running
            if output.finished:
                self.running.remove(output.request_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data):
        index = data.draw(st.sampled_from(sorted(self.running)))
        assert self.engine.abort(index).finish_reason == "abort"
        self.running.remove(index)

    @invariant()
    def pages_add_up(self):
        pages = [page for held in self.engine.pages().values() for page in held]
        assert len(set(pages)) == len(pages) and 0 not in pages
        assert len(pages) + self.engine.free_pages == TIGHT.num_pages - 1
        assert set(self.engine.pages()) <= self.running
        assert self.engine.busy == bool(self.running)

    def teardown(self):
        drain(self.engine)
        assert self.engine.free_pages == TIGHT.num_pages - 1


TestAnyOrderOfRequests = AnyOrderOfRequests.TestCase
TestAnyOrderOfRequests.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
