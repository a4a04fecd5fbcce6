"""The bundled model, through the engine: trees of every budget, batches and orders give one text.

Plain decoding in a batch is the yardstick. Two programs may round the same sum differently, so a
difference is forgiven where the first differing draw was a near tie: a margin under 1e-4 between
its two best scores, measured by a teacher-forced pass (float32).
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import LLM, SamplingParams, sampling
from kimi_jax.engine.request import noise_seed
from kimi_jax.llm import BUNDLED_MODEL

BUDGETS = (0, 1, 4, 7, 8, 9, 12, 16, 24, 32, 33, 48, 63)
NEAR_TIE = 1e-4


@functools.cache
def heldout() -> list[list[int]]:
    """Prompts from files that training never saw, of mixed lengths and sources."""
    by_source = json.loads((BUNDLED_MODEL / "heldout.json").read_text())["prompts"]
    longest = max(map(len, by_source.values()))
    mixed = [source[i] for i in range(longest) for source in by_source.values() if i < len(source)]
    return [prompt[: 8 + (i * 7) % 41] for i, prompt in enumerate(mixed)]


def requests(count: int, tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Each prompt twice: greedy, and at T = 0.8 with a seed of its own."""
    prompts = heldout()[:count] * 2
    params = [
        SamplingParams(
            temperature=0.0 if i < count else 0.8,
            top_p=0.95,
            seed=i,
            max_tokens=tokens,
            ignore_eos=True,
        )
        for i in range(2 * count)
    ]
    return prompts, params


@functools.cache
def engine(budget: int, slots: int = 16) -> LLM:
    return LLM(tree_budget=budget, max_num_seqs=slots, max_model_len=256)


@functools.cache
def plain(count: int, tokens: int) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine(0).generate(*requests(count, tokens))]


def margin(prompt: list[int], params: SamplingParams, ids: tuple[int, ...]) -> float:
    """Between the two best scores of the draw that follows prompt + ids."""
    tokens = [*prompt, *ids]
    logits = jnp.asarray(engine(0).logits(tokens)[-1:])
    if params.temperature:
        row = {name: jnp.array([getattr(params, name)]) for name in ("top_k", "top_p", "min_p")}
        noise = sampling.gumbel(
            jnp.asarray(noise_seed(params.seed, 0, 0), jnp.uint32),
            jnp.int32(len(tokens)),
            jnp.arange(logits.shape[-1], dtype=jnp.uint32),
        )
        logits = sampling.truncate(logits / params.temperature, **row) + noise
    best, second = np.asarray(jax.lax.top_k(logits[0], 2)[0])
    return float(best - second)


def assert_same_texts(got, expected, prompts, params) -> None:
    for i, (ids, reference) in enumerate(zip(got, expected, strict=True)):
        if ids == reference:
            continue
        where = next(
            t for t, pair in enumerate(zip(ids, reference, strict=True)) if len({*pair}) > 1
        )
        gap = margin(prompts[i], params[i], reference[:where])
        assert gap < NEAR_TIE, f"request {i} differs at token {where}, with a margin of {gap:.1e}"


@pytest.mark.parametrize("budget", BUDGETS[1:])
def test_every_budget_gives_plain_decodings_text(budget, full):
    count, tokens = (50, 128) if full else (8, 48)
    prompts, params = requests(count, tokens)
    results = engine(budget).generate(prompts, params)
    texts = [result.token_ids for result in results]
    assert_same_texts(texts, plain(count, tokens), prompts, params)
    accepted = np.mean([result.stats.accepted_per_step for result in results[:count]])
    assert accepted > 1.3, "a drafter that never helps would make this test say nothing"


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_every_batch_size_and_order_gives_the_same_text(slots, full):
    count, tokens = (24, 96) if full else (6, 32)
    prompts, params = requests(count, tokens)
    order = np.random.default_rng(slots).permutation(len(prompts))
    results = engine(8, slots).generate([prompts[i] for i in order], [params[i] for i in order])
    texts = {int(i): result.token_ids for i, result in zip(order, results, strict=True)}
    expected = [ids[:tokens] for ids in plain(count, tokens)]
    assert_same_texts([texts[i] for i in range(len(prompts))], expected, prompts, params)


def test_the_measure_of_a_near_tie_finds_the_drawn_token_best():
    """The margin's own arithmetic: what it calls best is what the engine drew."""
    prompts, params = requests(4, 16)
    for prompt, param, ids in zip(prompts, params, plain(4, 16), strict=True):
        tokens = [*prompt, *ids[:9]]
        logits = jnp.asarray(engine(0).logits(tokens)[-1:])
        noise = sampling.gumbel(
            jnp.asarray(noise_seed(param.seed, 0, 0), jnp.uint32),
            jnp.int32(len(tokens)),
            jnp.arange(logits.shape[-1], dtype=jnp.uint32),
        )
        row = {
            name: jnp.array([getattr(param, name)])
            for name in ("temperature", "top_k", "top_p", "min_p")
        }
        drawn = sampling.draw(logits, noise=noise[None], **row)
        assert int(drawn[0]) == ids[9]
