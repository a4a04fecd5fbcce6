"""The step: trees change how fast text comes, never which; commits leave what one by one leaves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import cache as paged
from kimi_jax import step
from kimi_jax.config import DRAFTER_PRESETS, PRESETS
from kimi_jax.model import weights as target_weights
from kimi_jax.speculation import tree as ddtree
from kimi_jax.speculation import weights as drafter_weights

PAGE, PAGES = 16, 6  # positions a page, pages a sequence
PROMPTS = (1, 21, 40)  # lengths; a page boundary lies inside the generated part of each

TARGET = dataclasses.replace(PRESETS["tiny-k2"], num_hidden_layers=3)
DRAFTER = dataclasses.replace(
    DRAFTER_PRESETS["tiny-k2"],
    target_layer_ids=(0, 2),
    sliding_window=24,
)


@functools.cache
def weights():
    return target_weights.random(TARGET, jnp.float32, jax.random.key(0))


@functools.cache
def drafter():
    return drafter_weights.random(DRAFTER, jnp.float32, jax.random.key(1))


def prompts(lengths=PROMPTS) -> list[np.ndarray]:
    return [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in lengths]


def plan(budget: int = 0, *, sampled: bool = False) -> step.StepPlan:
    return step.StepPlan(model=TARGET, drafter=DRAFTER, budget=budget, sampled=sampled)


def control(lengths=PROMPTS, *, temperature=0.0, n_live=0, new_tokens=24) -> step.Control:
    slots = len(lengths)

    def full(value, dtype):
        return jnp.full((slots,), value, dtype)

    return step.Control(
        page_table=1 + jnp.arange(slots * PAGES, dtype=jnp.int32).reshape(slots, PAGES),
        max_length=jnp.array(lengths, jnp.int32) + new_tokens,
        min_length=full(0, jnp.int32),
        stop_ids=jnp.full((slots, 1), -1, jnp.int32),
        temperature=full(temperature, jnp.float32),
        top_k=full(0, jnp.int32),
        top_p=full(0.95, jnp.float32),
        min_p=full(0.0, jnp.float32),
        seed=jnp.stack([jnp.arange(slots), jnp.ones(slots)], axis=1).astype(jnp.uint32),
        bias_ids=jnp.full((slots, 1), -1, jnp.int32),
        bias_values=jnp.zeros((slots, 1), jnp.float32),
        n_live=full(n_live, jnp.int32),
    )


def empty_state(slots: int, fill: float = 0.0) -> step.State:
    cache = paged.create(
        TARGET, DRAFTER, num_pages=1 + slots * PAGES, page_size=PAGE, dtype=jnp.float32
    )
    return step.State(
        cache=jax.tree.map(lambda pages: jnp.full_like(pages, fill), cache),
        length=jnp.zeros(slots, jnp.int32),
        token=jnp.zeros(slots, jnp.int32),
        active=jnp.zeros(slots, bool),
    )


def prefilled(knobs: step.Control, texts=None, fill: float = 0.0, chunk: int = 16) -> step.State:
    texts = prompts() if texts is None else texts
    state = empty_state(len(texts), fill)
    for slot, text in enumerate(texts):
        for start in range(0, len(text) - 1, chunk):
            part = text[start : min(start + chunk, len(text) - 1)]
            padded = np.zeros(chunk, np.int32)
            padded[: len(part)] = part
            state = step.prefill(
                weights(),
                drafter(),
                state,
                knobs.page_table[slot],
                padded,
                start,
                len(part),
                plan=plan(),
            )
    return dataclasses.replace(
        state,
        length=jnp.array([len(text) - 1 for text in texts], jnp.int32),
        token=jnp.array([text[-1] for text in texts], jnp.int32),
        active=jnp.ones(len(texts), bool),
    )


def generate(knobs: step.Control, state: step.State, how: step.StepPlan) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in range(len(state.active))]
    while np.any(jax.device_get(state.active)):
        state, output = step.decode_steps(weights(), drafter(), state, knobs, plan=how, steps=4)
        tokens, counts = jax.device_get((output.tokens, output.count))
        for i in range(4):
            for slot, text in enumerate(texts):
                text += tokens[i, slot, : counts[i, slot]].tolist()
    return texts


@functools.cache
def plain(temperature: float) -> list[list[int]]:
    knobs = control(temperature=temperature)
    return generate(knobs, prefilled(knobs), plan(sampled=temperature > 0))


def test_greedy_text_is_the_argmax_of_a_teacher_forced_pass():
    for slot, (prompt, text) in enumerate(zip(prompts(), plain(0.0), strict=True)):
        tokens = np.concatenate([prompt, text]).astype(np.int32)
        state = empty_state(1)
        logits, _ = step.score(
            weights(),
            state.cache.latent,
            1 + jnp.arange(PAGES, dtype=jnp.int32),
            jnp.asarray(np.pad(tokens, (0, 64 - len(tokens)))),
            0,
            len(tokens),
            plan=step.StepPlan(model=TARGET),
        )
        expected = np.argmax(logits[len(prompt) - 1 : len(tokens) - 1], axis=-1)
        assert expected.tolist() == text, f"slot {slot}"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("bucket", "n_live"), [(8, 0), (8, 1), (8, 7), (8, 8), (16, 9), (16, 16)])
def test_every_tree_gives_plain_decodings_text(temperature, bucket, n_live):
    knobs = control(temperature=temperature, n_live=n_live)
    how = plan(bucket, sampled=temperature > 0)
    assert generate(knobs, prefilled(knobs), how) == plain(temperature)


def test_a_batch_gives_what_each_sequence_gives_alone():
    for slot, prompt in enumerate(prompts()):
        whole = control(temperature=0.8)
        alone = dataclasses.replace(
            control(lengths=(len(prompt),), temperature=0.8), seed=whole.seed[slot : slot + 1]
        )
        text = generate(alone, prefilled(alone, texts=[prompt]), plan(sampled=True))
        assert text == [plain(0.8)[slot]]


def test_unwritten_memory_may_hold_nan():
    knobs = control(n_live=8)
    assert generate(knobs, prefilled(knobs, fill=np.nan), plan(8)) == plain(0.0)


def test_an_inactive_slot_changes_nothing_and_is_not_changed():
    knobs = control(n_live=8)
    state = prefilled(knobs)
    state = dataclasses.replace(state, active=jnp.array([True, False, True]))
    length, token = state.length[1], state.token[1]
    pages = np.asarray(state.cache.latent[:, 1 + PAGES : 1 + 2 * PAGES])
    state, output = step.decode_steps(weights(), drafter(), state, knobs, plan=plan(8), steps=4)
    assert output.count[:, 1].tolist() == [0, 0, 0, 0]
    assert (state.length[1], state.token[1]) == (length, token)
    np.testing.assert_array_equal(state.cache.latent[:, 1 + PAGES : 1 + 2 * PAGES], pages)


def oracle_tree(anchor: jax.Array, future: list[list[int]], hit: list[int], rng) -> ddtree.Tree:
    """Trees of 16 nodes that hold the first `hit[b]` tokens of future[b], at random ranks."""
    slots, depth, width = len(future), DRAFTER.depth, 3
    ids = rng.integers(0, 256, (slots, depth, width))
    for slot in range(slots):
        for d in range(depth):
            others = rng.permutation([t for t in range(256) if t != future[slot][d]])[:width]
            ids[slot, d] = others
            if d < hit[slot]:
                ids[slot, d, rng.integers(0, 2 if d < 2 else 1)] = future[slot][d]
    values = np.log(np.array([0.5, 0.45, 0.05], np.float32))
    candidates = ddtree.Candidates(
        jnp.broadcast_to(jnp.asarray(values), ids.shape), jnp.asarray(ids, jnp.int32)
    )
    return ddtree.build(candidates, anchor, jnp.full(slots, 63), budget=63)


@pytest.mark.parametrize("hit", [[0, 0, 0], [1, 3, 2], [4, 0, 4]])
def test_a_commit_leaves_what_feeding_the_tokens_one_by_one_leaves(hit):
    knobs = control()
    future = plain(0.0)
    state = prefilled(knobs)
    tree = oracle_tree(state.token, future, hit, np.random.default_rng(sum(hit)))

    @jax.jit
    def one_step(state):
        verdict = step.forward(weights(), state, knobs, tree, plan=plan(63))
        outcome = step.accept(verdict.logits, tree, state, knobs, plan=plan(63))
        return outcome, step.commit(drafter(), state, knobs, outcome, verdict, plan=plan(63))

    outcome, committed = one_step(state)
    assert np.all(outcome.count >= np.array(hit) + 1), "the tree held these tokens"
    counts = np.asarray(outcome.count)
    for slot in range(3):
        assert outcome.tokens[slot, : counts[slot]].tolist() == future[slot][: counts[slot]]

    for slot in range(3):
        one_by_one = prefilled(knobs)
        single = dataclasses.replace(one_by_one, active=jnp.arange(3) == slot)
        for _ in range(counts[slot]):
            single, _ = step.decode_steps(weights(), drafter(), single, knobs, plan=plan(), steps=1)
        assert committed.length[slot] == single.length[slot]
        assert committed.token[slot] == single.token[slot]
        pages = slice(1 + slot * PAGES, 1 + (slot + 1) * PAGES)
        for got, expected in zip(
            jax.tree.leaves(committed.cache), jax.tree.leaves(single.cache), strict=True
        ):
            scale = np.abs(expected[:, pages]).max()
            np.testing.assert_allclose(got[:, pages], expected[:, pages], atol=1e-5 * scale)


def test_logprobs_are_those_of_a_teacher_forced_pass():
    knobs = control(temperature=0.8, n_live=8)
    how = dataclasses.replace(plan(8, sampled=True), num_logprobs=3)
    _, output = step.decode_steps(weights(), drafter(), prefilled(knobs), knobs, plan=how, steps=4)
    output = jax.device_get(output)
    prompt = prompts()[2]
    text, logprobs, top = [], [], []
    for i in range(4):
        count = output.count[i, 2]
        text += output.tokens[i, 2, :count].tolist()
        logprobs += output.logprobs[i, 2, :count].tolist()
        top += output.top_logprobs[i, 2, :count].tolist()
    tokens = np.concatenate([prompt, text]).astype(np.int32)
    logits, _ = step.score(
        weights(),
        empty_state(1).cache.latent,
        1 + jnp.arange(PAGES, dtype=jnp.int32),
        jnp.asarray(np.pad(tokens, (0, 64 - len(tokens)))),
        0,
        len(tokens),
        plan=step.StepPlan(model=TARGET),
    )
    expected = jax.nn.log_softmax(logits)[len(prompt) - 1 : len(tokens) - 1]
    np.testing.assert_allclose(
        logprobs, np.asarray(expected)[np.arange(len(text)), text], atol=1e-3
    )
    np.testing.assert_allclose(top, jax.lax.top_k(expected, 3)[0], atol=1e-3)


@functools.cache
def compiled(budget: int):
    knobs = control()
    arguments = (weights(), drafter(), empty_state(3), knobs)
    return step.decode_steps.lower(*arguments, plan=plan(budget, sampled=True), steps=4).compile()


@pytest.mark.parametrize("budget", [0, 8])
def test_a_compiled_step_never_leaves_the_device(budget):
    text = compiled(budget).as_text()
    for word in ("infeed", "outfeed", "callback", "send(", "recv(", "S(5)"):
        assert word not in text


@pytest.mark.parametrize("budget", [0, 8])
def test_the_whole_state_is_donated(budget):
    state = jax.tree.leaves(empty_state(3))
    donated = sum(leaf.nbytes for leaf in state)
    assert compiled(budget).memory_analysis().alias_size_in_bytes >= donated


def test_a_budget_without_a_drafter_is_refused():
    with pytest.raises(ValueError, match="needs a drafter"):
        step.StepPlan(model=TARGET, budget=8)
