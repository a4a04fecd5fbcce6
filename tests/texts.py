"""Texts of the bundled model: prompts, and when two ways to decode may differ."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import LLM, SamplingParams, sampling
from kimi_jax.engine.request import noise_seed
from kimi_jax.llm import BUNDLED_MODEL


@functools.cache
def heldout() -> list[list[int]]:
    """Prompts from files that training never saw, of mixed lengths and sources."""
    by_source = json.loads((BUNDLED_MODEL / "heldout.json").read_text())["prompts"]
    longest = max(map(len, by_source.values()))
    mixed = [source[i] for i in range(longest) for source in by_source.values() if i < len(source)]
    return [prompt[: 8 + (i * 7) % 41] for i, prompt in enumerate(mixed)]


def requests(
    count: int, tokens: int, *, top_p: float = 0.95
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Each prompt twice: greedy, and at T = 0.8 with a seed of its own."""
    prompts = heldout()[:count] * 2
    params = [
        SamplingParams(
            temperature=0.0 if i < count else 0.8,
            top_p=top_p,
            seed=i,
            max_tokens=tokens,
            ignore_eos=True,
        )
        for i in range(2 * count)
    ]
    return prompts, params


def margin(llm: LLM, prompt: list[int], params: SamplingParams, ids: tuple[int, ...]) -> float:
    """Between the two best scores of the draw that follows prompt + ids."""
    tokens = [*prompt, *ids]
    logits = jnp.asarray(llm.logits(tokens)[-1:])
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


def assert_same_texts(llm: LLM, got, expected, prompts, params, *, near_tie: float) -> None:
    """Of two runs; `llm` judges how near a tie the first differing draw was."""
    for i, (ids, reference) in enumerate(zip(got, expected, strict=True)):
        if ids == reference:
            continue
        where = next(
            t for t, pair in enumerate(zip(ids, reference, strict=True)) if len({*pair}) > 1
        )
        gap = margin(llm, prompts[i], params[i], reference[:where])
        assert gap < near_tie, f"request {i} differs at token {where}, with a margin of {gap:.1e}"
