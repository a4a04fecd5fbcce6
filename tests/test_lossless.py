"""The bundled model, through the engine: trees of every budget, batches and orders give one text.

Plain decoding in a batch is the yardstick. Two programs may round the same sum differently, so a
difference is forgiven where the first differing draw was a near tie: a margin under 1e-4 between
its two best scores, measured by a teacher-forced pass (float32).
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from texts import assert_same_texts, requests

from kimi_jax import LLM, sampling
from kimi_jax.engine.request import noise_seed

BUDGETS = (0, 1, 4, 7, 8, 9, 12, 16, 24, 32, 33, 48, 63)
NEAR_TIE = 1e-4


@functools.cache
def engine(budget: int, slots: int = 16) -> LLM:
    return LLM(tree_budget=budget, max_num_seqs=slots, max_model_len=256)


@functools.cache
def plain(count: int, tokens: int) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine(0).generate(*requests(count, tokens))]


@pytest.mark.parametrize("budget", BUDGETS[1:])
def test_every_budget_gives_plain_decodings_text(budget, full):
    count, tokens = (50, 128) if full else (8, 48)
    prompts, params = requests(count, tokens)
    results = engine(budget).generate(prompts, params)
    texts = [result.token_ids for result in results]
    assert_same_texts(engine(0), texts, plain(count, tokens), prompts, params, near_tie=NEAR_TIE)
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
    got = [texts[i] for i in range(len(prompts))]
    assert_same_texts(engine(0), got, expected, prompts, params, near_tie=NEAR_TIE)


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
