"""The bundled model on a GPU, in bfloat16: the Pallas kernels against the reference.

  python3 -m pytest -n 0 tests/test_gpu.py      about two minutes on an H200

Skipped where there is no GPU that the kernels serve. Equality is up to near ties: where the two
likeliest tokens are within NEAR_TIE of each other, or, for whole texts, which are written by
programs of different shapes, within ROUNDING.
"""

import functools

import jax
import numpy as np
import pytest
from texts import assert_same_texts, heldout, requests

from kimi_jax import LLM
from kimi_jax.model.kernels import Kernels

NEAR_TIE = 2e-2
ROUNDING = 2**-3  # two roundings to bfloat16 of logits between 8 and 16
COUNT, TOKENS = 8, 64

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")


@functools.cache
def engine(budget: int = 0, kernels: str = "auto") -> LLM:
    return LLM(tree_budget=budget, kernels=kernels, max_num_seqs=16, max_model_len=256)


def samples():
    """No top-p: whether a token at its edge may be drawn is for a rounding to decide."""
    return requests(COUNT, TOKENS, top_p=1.0)


@functools.cache
def plain() -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine().generate(*samples())]


def test_the_kernels_run_unless_the_reference_is_asked_for():
    assert engine().setup.kernels == Kernels(int4_moe="mosaic", tree_mla="mosaic")
    assert engine(0, "reference").setup.kernels == Kernels()


@pytest.mark.parametrize("length", [1, 40, 200])
def test_teacher_forced_logits_agree_with_the_reference(length):
    text = [token for prompt in heldout()[:8] for token in prompt][:length]
    got, expected = (engine(0, kernels).logits(text) for kernels in ("auto", "reference"))
    best = np.sort(expected, axis=-1)
    margin = best[:, -1] - best[:, -2]
    same = got.argmax(axis=-1) == expected.argmax(axis=-1)
    assert np.all(same | (margin < NEAR_TIE)), margin[~same]
    assert np.linalg.norm(got - expected) < 2e-2 * np.linalg.norm(expected)


def test_decoding_agrees_with_a_teacher_forced_pass_of_the_reference():
    """Through the cache, the pages and the step's own attention, token by token."""
    prompts, params = samples()
    for prompt, ids in zip(prompts[:COUNT], plain()[:COUNT], strict=True):
        logits = engine(0, "reference").logits([*prompt, *ids])[len(prompt) - 1 : -1]
        best = np.sort(logits, axis=-1)
        margin = best[:, -1] - best[:, -2]
        same = logits.argmax(axis=-1) == np.array(ids)
        assert np.all(same | (margin < ROUNDING / 2)), margin[~same]


@pytest.mark.parametrize("budget", [4, 8, 16, 32])
def test_every_budget_gives_plain_decodings_text(budget):
    """Programs of different budgets multiply matrices of different heights, which XLA rounds
    differently. A margin is of two logits, and divided by the temperature."""
    prompts, params = samples()
    results = engine(budget).generate(prompts, params)
    texts = [result.token_ids for result in results]
    assert_same_texts(engine(), texts, plain(), prompts, params, near_tie=ROUNDING / 0.8)
    assert np.mean([result.stats.accepted_per_step for result in results[:COUNT]]) > 1.3


def test_decoding_again_gives_the_same_bits():
    again = engine().generate(*samples())
    assert [result.token_ids for result in again] == plain()
