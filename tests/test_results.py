"""The bundled model is what its RESULTS.json says, measured again by the engine's own code.

RESULTS.json was written by the recipe (tiny/evaluate.py), with a forward pass and a heap of its
own; here the shipped files go through the reader, the cache, the compiled step and the tree
builder. Both run in float32, so only near ties can differ: hence the tolerances of 2 %.
"""

import ast
import functools
import hashlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import LLM, SamplingParams, cache, step
from kimi_jax.checkpoint.read import load_drafter, load_model
from kimi_jax.llm import BUNDLED_MODEL
from kimi_jax.speculation import accept, drafter, tree

NEW_TOKENS = 128
BUDGETS = (8, 16, 32, 63)
PAGE = 16
# What the model must reach to be bundled at all.
MOST_LOSS, MOST_GREEDY_LOOPS, MOST_DEFAULT_LOOPS = 2.4, 0.25, 0.02
LEAST_TOKENS_A_STEP = {"chain": 2.8, "8": 3.2, "16": 3.4, "32": 3.7, "63": 3.9}


@functools.cache
def results() -> dict:
    return json.loads((BUNDLED_MODEL / "RESULTS.json").read_text())


@functools.cache
def heldout() -> dict:
    return json.loads((BUNDLED_MODEL / "heldout.json").read_text())


@functools.cache
def llm() -> LLM:
    return LLM(tree_budget=8, max_num_seqs=16, max_model_len=640)


@functools.cache
def greedy_texts() -> list[tuple[list[int], tuple[int, ...]]]:
    """(prompt, 128 tokens after it) for every held-out prompt."""
    prompts = [row for rows in heldout()["prompts"].values() for row in rows]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [
        (prompt, result.token_ids)
        for prompt, result in zip(prompts, llm().generate(prompts, params), strict=True)
    ]


def loop_share(texts: list[tuple[int, ...]]) -> float:
    """Share of texts of whose 8-grams over 80 % repeat an earlier one."""

    def repeated(ids: tuple[int, ...]) -> float:
        grams = [ids[i : i + 8] for i in range(len(ids) - 7)]
        return 1 - len(set(grams)) / len(grams)

    return float(np.mean([repeated(ids) > 0.8 for ids in texts]))


def test_the_published_figures_meet_the_bar():
    recorded = results()
    assert recorded["held_out_loss"]["all"] <= MOST_LOSS
    assert recorded["loop_share"]["greedy"] < MOST_GREEDY_LOOPS
    assert recorded["loop_share"]["temperature 0.7, top_p 0.95"] < MOST_DEFAULT_LOOPS
    assert recorded["chat"]["parse_share"] > 0.5
    reached = recorded["acceptance"]["greedy"]["tokens_per_step"]
    for budget, least in LEAST_TOKENS_A_STEP.items():
        assert reached[budget] >= least, budget
    curve = [reached[str(budget)] for budget in (4, 8, 12, 16, 24, 32, 48, 63)]
    assert curve == sorted(curve), "acceptance rises with the budget"


def test_the_files_are_the_measured_ones_and_small():
    for name, digest in results()["sha256"].items():
        folder = BUNDLED_MODEL if not name.startswith("tiny/") else BUNDLED_MODEL.parents[2]
        data = (folder / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, name
        assert results()["bytes"].get(name, len(data)) == len(data), name
    whole = sum(file.stat().st_size for file in BUNDLED_MODEL.rglob("*") if file.is_file())
    assert whole <= 18 * 2**20


def test_the_held_out_loss_is_the_recorded_one(full):
    for source, windows in heldout()["loss"].items():
        # Without --full a quarter of the windows, whose loss is another: then only the bar counts.
        windows = windows if full else windows[::4]
        losses = []
        for tokens in windows:
            log_probs = jax.nn.log_softmax(llm().logits(tokens[:-1]))
            losses.append(-np.asarray(log_probs)[np.arange(len(tokens) - 1), tokens[1:]].mean())
        if full:
            assert np.mean(losses) == pytest.approx(results()["held_out_loss"][source], rel=0.005)
        assert np.mean(losses) < MOST_LOSS + 0.1, source


def test_greedy_texts_loop_as_rarely_as_recorded():
    share = loop_share([ids for _, ids in greedy_texts()])
    assert share < MOST_GREEDY_LOOPS
    assert share == pytest.approx(results()["loop_share"]["greedy"], abs=0.03)


def test_texts_at_the_default_settings_hardly_ever_loop():
    prompts = [row for rows in heldout()["prompts"].values() for row in rows]
    params = SamplingParams(
        temperature=0.7, top_p=0.95, seed=1, max_tokens=NEW_TOKENS, ignore_eos=True
    )
    texts = [result.token_ids for result in llm().generate(prompts, params)]
    assert loop_share(texts) < MOST_DEFAULT_LOOPS


def test_the_engine_accepts_as_much_as_recorded():
    """Budget 8 as the engine counts it, steps that the end cut short included."""
    prompts = [prompt for prompt, _ in greedy_texts()]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    stats = [result.stats for result in llm().generate(prompts, params)]
    mean = NEW_TOKENS * len(stats) / sum(stat.steps for stat in stats)
    recorded = results()["acceptance"]["greedy"]["tokens_per_step"]["8"]
    assert mean == pytest.approx(recorded, rel=0.04)


@functools.cache
def replayed() -> dict[str, float]:
    """Tokens a step by budget: drafts at every anchor of the greedy texts, rounds replayed."""
    config, weights = load_model(BUNDLED_MODEL, dtype=jnp.float32)
    draft, draft_weights = load_drafter(BUNDLED_MODEL / "drafter", config, dtype=jnp.float32)
    plan = step.StepPlan(model=config, drafter=draft)
    length = len(greedy_texts()[0][0]) + NEW_TOKENS
    anchors = np.arange(length - NEW_TOKENS - 1, length - draft.block_size + 1)
    pages = 1 + jnp.arange(-(-length // PAGE), dtype=jnp.int32)

    def blank_state() -> step.State:
        return step.State(
            cache=cache.create(
                config, draft, num_pages=len(pages) + 1, page_size=PAGE, dtype=jnp.float32
            ),
            length=jnp.zeros(1, jnp.int32),
            token=jnp.zeros(1, jnp.int32),
            active=jnp.zeros(1, bool),
        )

    @jax.jit
    def accepted(state: step.State, tokens: jax.Array) -> dict[str, jax.Array]:
        logits = drafter.propose_logits(
            draft_weights,
            draft,
            weights.embed,
            weights.lm_head,
            state.cache.draft_k,
            state.cache.draft_v,
            jnp.broadcast_to(pages, (len(anchors), len(pages))),
            jnp.asarray(anchors, jnp.int32),
            tokens[anchors],
        )
        candidates = tree.top_candidates(
            jax.nn.log_softmax(logits), max(BUDGETS), forbidden=draft.mask_token_id
        )
        following = tokens[anchors[:, None] + 1 + np.arange(draft.block_size)]

        def on(shape: tree.Tree) -> jax.Array:
            drawn = jnp.take_along_axis(following, shape.depths, axis=1)
            return accept.walk(shape, drawn, depth=draft.depth).accepted

        counts = {}
        for budget in BUDGETS:
            nodes = jnp.full(len(anchors), budget)
            counts[str(budget)] = on(
                tree.build(candidates, tokens[anchors], nodes, budget=max(BUDGETS))
            )
        nodes = jnp.full(len(anchors), draft.depth)
        counts["chain"] = on(tree.chain(candidates, tokens[anchors], nodes, budget=draft.depth))
        return counts

    rounds: dict[str, list[int]] = {}
    for prompt, ids in greedy_texts():
        tokens = jnp.asarray([*prompt, *ids], jnp.int32)
        state = step.prefill(
            weights, draft_weights, blank_state(), pages, tokens, 0, length, plan=plan
        )
        for budget, counts in jax.device_get(accepted(state, tokens)).items():
            at = 0
            while at < len(counts):
                rounds.setdefault(budget, []).append(int(counts[at]))
                at += counts[at] + 1
    return {budget: 1 + float(np.mean(counts)) for budget, counts in rounds.items()}


@pytest.mark.parametrize("budget", [*LEAST_TOKENS_A_STEP])
def test_acceptance_is_the_recorded_one(budget):
    recorded = results()["acceptance"]["greedy"]["tokens_per_step"][budget]
    assert replayed()[budget] == pytest.approx(recorded, rel=0.02)
    assert replayed()[budget] >= LEAST_TOKENS_A_STEP[budget]


def test_asked_for_a_function_it_mostly_answers_with_one_that_parses():
    params = SamplingParams(temperature=0.0, max_tokens=256)
    requests = [[{"role": "user", "content": request}] for request in heldout()["chat"]]
    answers = llm().chat(requests, params)

    def parses(text: str) -> bool:
        block = re.search(r"```(?:python)?\n(.*?)```", text, re.S)
        try:
            module = ast.parse(block.group(1) if block else text)
        except (SyntaxError, ValueError):
            return False
        return any(isinstance(node, ast.FunctionDef) for node in module.body)

    share = np.mean([parses(answer.text) for answer in answers])
    assert share == pytest.approx(results()["chat"]["parse_share"], abs=0.11)
    assert share > 0.5
