"""The target against transformers' own K2.5/K2.6 class, in float32 (see golden/README.md).

Every way of running the same 200 tokens has to give the same logits, hidden states and experts:
prefill in chunks of any size, decoding one by one, a tree's rows.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_numpy import Target, read_tensors

from kimi_jax import cache as paged
from kimi_jax import step
from kimi_jax.checkpoint.read import load_model
from kimi_jax.config import ModelConfig
from kimi_jax.model import transformer
from kimi_jax.model.weights import Weights
from kimi_jax.speculation import tree as trees
from kimi_jax.speculation.tree import Tree

GOLDEN = Path(__file__).parent / "golden" / "target"
ATOL = 1e-4
PAGE_SIZE, PAGES, TABLE = 16, 65, 16  # pages of a sequence are scattered over the pool


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "outputs.npz") as data:
        return dict(data)


@functools.cache
def model() -> tuple[ModelConfig, Weights]:
    return load_model(GOLDEN / "checkpoint", dtype=jnp.float32, progress=False)


def config_dict(**text_overrides) -> dict:
    config = json.loads((GOLDEN / "checkpoint" / "config.json").read_text())
    config["text_config"].update(text_overrides)
    return config


def page_rows(sequences: int, seed: int = 0) -> jax.Array:
    """Page tables int32 [sequences, TABLE] of distinct pages in random order, page 0 left out."""
    pages = np.random.default_rng(seed).permutation(np.arange(1, PAGES))
    return jnp.asarray(pages[: sequences * TABLE].reshape(sequences, TABLE), jnp.int32)


def empty_latent(config: ModelConfig) -> jax.Array:
    """Pages full of NaN: nothing may be read that was not written."""
    cache = paged.create(config, None, num_pages=PAGES, page_size=PAGE_SIZE, dtype=jnp.float32)
    return jnp.full_like(cache.latent, jnp.nan)


class Run(NamedTuple):
    """What a way of running the sequence gave; the golden data's names and shapes."""

    logits: np.ndarray  # [T, VOCAB]
    hidden: np.ndarray  # [L, T, D]
    experts: np.ndarray  # [L_moe, T, K], ids ascending
    latent: jax.Array


@functools.partial(jax.jit, static_argnames="config")
def run_chunk(weights, latent, page_row, tokens, start, count, *, config):
    taps = tuple(range(config.num_hidden_layers))
    chunk = transformer.forward_chunk(weights, config, latent, page_row, tokens, start, count, taps)
    return transformer.unembed(weights, config, chunk.hidden), chunk


@functools.cache
def prefill(chunk_size: int, config: ModelConfig | None = None) -> Run:
    """The whole sequence in chunks; the last one is filled up with an id that must not matter."""
    config, weights = config or model()[0], model()[1]
    token_ids, page_row, latent = golden()["token_ids"], page_rows(1)[0], empty_latent(config)
    parts = []
    for start in range(0, len(token_ids), chunk_size):
        tokens = token_ids[start : start + chunk_size]
        filled = np.full(chunk_size, 7, np.int32)
        filled[: len(tokens)] = tokens
        logits, chunk = run_chunk(
            *(weights, latent, page_row, filled, start, len(tokens)), config=config
        )
        latent = chunk.latent
        real = slice(0, len(tokens))
        parts.append((logits[real], chunk.taps[:, real], chunk.experts[:, real]))
    logits, hidden, experts = zip(*jax.device_get(parts), strict=True)
    return Run(
        logits=np.concatenate(logits),
        hidden=np.concatenate(hidden, axis=1),
        experts=np.sort(np.concatenate(experts, axis=1), axis=-1),
        latent=latent,
    )


def greedy_control(page_table: jax.Array) -> step.Control:
    slots = len(page_table)

    def full(value, dtype, *shape: int) -> jax.Array:
        return jnp.full((slots, *shape), value, dtype)

    return step.Control(
        page_table=page_table,
        max_length=full(10_000, jnp.int32),
        min_length=full(0, jnp.int32),
        stop_ids=full(-1, jnp.int32, 2),
        temperature=full(0, jnp.float32),
        top_k=full(0, jnp.int32),
        top_p=full(1, jnp.float32),
        min_p=full(0, jnp.float32),
        seed=full(0, jnp.uint32, 2),
        bias_ids=full(-1, jnp.int32, 1),
        bias_values=full(0, jnp.float32, 1),
        n_live=full(0, jnp.int32),
    )


@functools.partial(jax.jit, static_argnames="plan")
def forced_step(weights, state, control, next_tokens, *, plan):
    """A decoding step whose draw is replaced by the sequence's own next token."""
    tree = step.propose(weights, None, state, control, plan=plan)
    rows = step.tree_rows(tree, state.length, control.page_table)
    taps = tuple(range(plan.model.num_hidden_layers))
    verdict = transformer.forward(weights, plan.model, state.cache.latent, rows, taps)
    outcome = step.Accepted(
        tokens=next_tokens[:, None],
        count=state.active.astype(jnp.int32),
        finish=jnp.zeros_like(next_tokens),
        rows=jnp.arange(len(next_tokens), dtype=jnp.int32)[:, None],
    )
    return step.commit(None, state, control, outcome, verdict, plan=plan), verdict


@functools.cache
def decode(*starts: int | None) -> list[Run | None]:
    """One slot per start: its context is prefilled up to there, the rest decoded one by one.

    None is a slot without a sequence. Slots of different lengths share every step; one whose
    sequence has ended goes on as an inactive slot.
    """
    config, weights = model()
    token_ids, tables = golden()["token_ids"], page_rows(len(starts))
    total, latent = len(token_ids), empty_latent(config)
    for table, start in zip(tables, starts, strict=True):
        for position in range(0, start or 0, 64):
            tokens = np.resize(token_ids[position : min(position + 64, start)], 64)
            count = min(64, start - position)
            _, chunk = run_chunk(weights, latent, table, tokens, position, count, config=config)
            latent = chunk.latent
    lengths = np.array([total if start is None else start for start in starts])
    active = np.array([start is not None for start in starts])
    state = step.State(
        cache=paged.Cache(latent=latent),
        length=jnp.asarray(np.where(active, lengths, 0), jnp.int32),
        token=jnp.asarray(np.where(active, token_ids[lengths % total], 0), jnp.int32),
        active=jnp.asarray(active),
    )
    control, plan = greedy_control(tables), step.StepPlan(model=config)
    outputs = [([], [], []) for _ in starts]
    for _ in range(total - lengths.min()):
        after = token_ids[np.minimum(lengths + 1, total - 1)]
        state, verdict = forced_step(weights, state, control, jnp.asarray(after), plan=plan)
        verdict = jax.device_get((verdict.logits, verdict.taps, verdict.experts))
        for slot in np.flatnonzero(active):
            logits, taps, experts = verdict
            parts = logits[slot], taps[:, slot], experts[:, slot]
            for kept, part in zip(outputs[slot], parts, strict=True):
                kept.append(part)
        lengths += active
        active &= lengths < total
        state = state.replace(active=jnp.asarray(active))
    return [
        Run(
            logits=np.stack(logits),
            hidden=np.stack(hidden, axis=1),
            experts=np.sort(np.stack(experts, axis=1), axis=-1),
            latent=state.cache.latent,
        )
        if logits
        else None
        for logits, hidden, experts in outputs
    ]


def assert_golden(run: Run, start: int = 0) -> None:
    """`run` covers the positions from `start` on."""
    expected = golden()
    np.testing.assert_array_equal(run.experts, expected["experts"][:, start:])
    for layer, hidden in enumerate(run.hidden):
        np.testing.assert_allclose(
            *(hidden, expected["hidden"][layer, start:]),
            rtol=0,
            atol=ATOL,
            err_msg=f"hidden state after layer {layer}",
        )
    np.testing.assert_allclose(run.logits, expected["logits"][start:], rtol=0, atol=ATOL)


def test_the_golden_files_are_the_ones_that_the_script_wrote():
    recorded = json.loads((GOLDEN / "meta.json").read_text())["sha256"]
    found = {name: hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() for name in recorded}
    assert found == recorded


def test_the_float64_reference_agrees_with_transformers():
    expected = golden()
    reference = Target(config_dict(), read_tensors(GOLDEN / "checkpoint"))
    result = reference.forward(expected["token_ids"])
    order = np.argsort(result["experts"], axis=-1)
    weights = np.take_along_axis(result["expert_weights"], order, axis=-1)
    np.testing.assert_array_equal(np.sort(result["experts"], axis=-1), expected["experts"])
    np.testing.assert_allclose(weights, expected["expert_weights"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(result["hidden"], expected["hidden"], rtol=0, atol=5e-5)
    np.testing.assert_allclose(result["logits"], expected["logits"], rtol=0, atol=5e-5)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 200])
def test_prefill_in_chunks_of(chunk_size):
    assert_golden(prefill(chunk_size))


def test_decoding_one_by_one_beside_sequences_of_other_lengths():
    whole, late, nothing, middle = decode(0, 150, None, 63)
    assert nothing is None
    assert_golden(whole)
    assert_golden(late, start=150)
    assert_golden(middle, start=63)


def test_prefill_and_decoding_leave_the_same_cache():
    chunked, decoded = prefill(64).latent, decode(0, 150, None, 63)[0].latent
    tables, total = np.asarray(page_rows(4)), len(golden()["token_ids"])

    def rows(latent: jax.Array, table: np.ndarray) -> np.ndarray:
        """[L, positions, R + PE]"""
        latent = np.asarray(latent)[:, table]
        return latent.reshape(len(latent), -1, latent.shape[-1])

    reference = rows(chunked, tables[0])
    assert np.isnan(reference[:, total:]).all()
    for slot in (0, 1, 3):
        found = rows(decoded, tables[slot])
        np.testing.assert_allclose(found, reference, rtol=1e-5, atol=2e-5)
    for latent, sequences in ((chunked, tables[:1]), (decoded, tables[[0, 1, 3]])):
        nobodys = np.setdiff1d(np.arange(PAGES), sequences)
        assert np.isnan(latent[:, nobodys]).all(), "wrote outside the sequences' pages"


def test_teacher_forced_scoring():
    config, weights = model()
    token_ids, latent = golden()["token_ids"], empty_latent(model()[0])
    logits = []
    for start in range(0, len(token_ids), 50):
        tokens = jnp.asarray(token_ids[start : start + 50])
        part, latent = step.score(
            *(weights, latent, page_rows(1)[0], tokens, jnp.int32(start), jnp.int32(50)),
            plan=step.StepPlan(model=config),
        )
        logits.append(part)
    np.testing.assert_allclose(np.concatenate(logits), golden()["logits"], rtol=0, atol=ATOL)


def test_the_rows_of_a_tree_see_their_ancestors_only():
    # A chain of the sequence's own tokens, and beside each of them a wrong sibling.
    config, weights = model()
    token_ids, length, depth = golden()["token_ids"], 130, 9
    parents, depths, tokens, on_path = [-1], [0], [token_ids[length]], [0]
    for level in range(1, depth):
        parent = on_path[-1]
        for token in (token_ids[length + level] ^ 1, token_ids[length + level]):
            parents.append(parent)
            depths.append(level)
            tokens.append(token)
        on_path.append(len(tokens) - 1)
    sees = np.eye(len(tokens), dtype=bool)
    for row, parent in enumerate(parents[1:], start=1):
        sees[row] |= sees[parent]
    tree = Tree(
        tokens=jnp.asarray([tokens], jnp.int32),
        parents=jnp.asarray([parents], jnp.int32),
        depths=jnp.asarray([depths], jnp.int32),
        ancestors=trees.words(jnp.asarray(sees[None])),
        live=jnp.ones((1, len(tokens)), bool),
    )
    rows = step.tree_rows(tree, jnp.asarray([length], jnp.int32), page_rows(1))
    forward = jax.jit(transformer.forward, static_argnames=("config", "taps"))
    verdict = forward(weights, config=config, latent=prefill(64).latent, rows=rows, taps=())
    np.testing.assert_allclose(
        *(verdict.logits[np.array(on_path)], golden()["logits"][length : length + depth]),
        rtol=0,
        atol=ATOL,
    )


@pytest.mark.parametrize(
    "variant", ["no_rope_scaling", "unequal_mscale", "wide_ramp", "weights_not_normalised"]
)
def test_the_same_weights_under_another_configuration(variant):
    meta = json.loads((GOLDEN / "meta.json").read_text())
    config = ModelConfig.from_hf(config_dict(**meta["variants"][variant]))
    with np.load(GOLDEN / "variants.npz") as expected:
        logits = prefill(len(golden()["token_ids"]), config).logits[expected["positions"]]
        np.testing.assert_allclose(logits, expected[variant], rtol=0, atol=ATOL)
