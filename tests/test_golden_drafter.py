"""The drafter against a plain float64 implementation of published DFlash (see golden/README.md)."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import cache as paged
from kimi_jax import step
from kimi_jax.checkpoint.read import load_drafter, load_model
from kimi_jax.config import DrafterConfig
from kimi_jax.speculation import drafter as dflash

GOLDEN = Path(__file__).parent / "golden"
ATOL = 1e-4
PAGE_SIZE, TABLE = 8, 24  # contexts end inside pages, windows begin inside them

CASES = json.loads((GOLDEN / "drafter" / "meta.json").read_text())["cases"]

project_context = jax.jit(dflash.project_context, static_argnums=1)
propose_logits = jax.jit(dflash.propose_logits, static_argnums=1)


@functools.cache
def models():
    """(target config, target weights, drafter config, drafter weights), float32."""
    config, weights = load_model(
        GOLDEN / "target" / "checkpoint", dtype=jnp.float32, progress=False
    )
    drafter_config, drafter = load_drafter(
        GOLDEN / "drafter", config, dtype=jnp.float32, progress=False
    )
    return config, weights, drafter_config, drafter


@functools.cache
def outputs() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "drafter" / "outputs.npz") as data:
        return dict(data)


@functools.cache
def token_ids() -> np.ndarray:
    with np.load(GOLDEN / "target" / "outputs.npz") as data:
        return data["token_ids"]


def features(config: DrafterConfig) -> np.ndarray:
    """transformers' hidden states after the tapped layers: [n_taps, T, D]."""
    with np.load(GOLDEN / "target" / "outputs.npz") as data:
        return data["hidden"][list(config.target_layer_ids)]


def case_config(case: dict) -> DrafterConfig:
    return dataclasses.replace(
        models()[2],
        yarn_amplitude=case["amplitude"],
        sliding_causal=case["sliding_causal"],
        sliding_window=case["window"],
    )


def page_table(sequences: int) -> jax.Array:
    pages = np.random.default_rng(1).permutation(np.arange(1, sequences * TABLE + 1))
    return jnp.asarray(pages.reshape(sequences, TABLE), jnp.int32)


@functools.cache
def context_rows(config: DrafterConfig) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [Ld, T, KV, HD] of the whole sequence."""
    taps = features(config)
    positions = jnp.arange(taps.shape[1], dtype=jnp.int32)
    return jax.device_get(project_context(models()[3], config, taps, positions))


def context_pages(config: DrafterConfig, lengths: list[int]) -> tuple[jax.Array, ...]:
    """(page table, keys, values): each sequence's context in scattered pages, NaN elsewhere."""
    table = page_table(len(lengths))
    written = np.concatenate([np.arange(length) for length in lengths])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    pages, offsets = np.asarray(table)[owner, written // PAGE_SIZE], written % PAGE_SIZE
    filled = []
    for part in context_rows(config):
        shape = (part.shape[0], len(lengths) * TABLE + 1, PAGE_SIZE, *part.shape[2:])
        empty = np.full(shape, np.nan, np.float32)
        empty[:, pages, offsets] = part[:, written]
        filled.append(jnp.asarray(empty))
    return table, *filled


def draft(config: DrafterConfig, lengths: list[int]) -> jax.Array:
    """Logits [len(lengths), 7, VOCAB], all contexts in one batch."""
    _, target, _, drafter = models()
    table, keys, values = context_pages(config, lengths)
    return propose_logits(
        *(drafter, config, target.embed, target.lm_head, keys, values, table),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(token_ids()[lengths]),
    )


def test_the_golden_files_are_the_ones_that_the_script_wrote():
    folder = GOLDEN / "drafter"
    recorded = json.loads((folder / "meta.json").read_text())["sha256"]
    found = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in recorded}
    assert found == recorded


@pytest.mark.parametrize("name", CASES)
def test_logits_of_every_slot_at_every_context_length(name):
    case = CASES[name]
    logits = draft(case_config(case), case["contexts"])
    assert logits.dtype == jnp.float32
    for length, found, expected in zip(case["contexts"], logits, outputs()[name], strict=True):
        np.testing.assert_allclose(
            *(found, expected), rtol=0, atol=ATOL, err_msg=f"context of {length} tokens"
        )


def test_a_sequence_drafts_alone_what_it_drafts_in_a_batch():
    case = CASES["logits"]
    for length, expected in zip(case["contexts"], outputs()["logits"], strict=True):
        (found,) = draft(models()[2], [length])
        np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)


def test_the_published_configuration_means_the_first_case():
    config, case = models()[2], CASES["logits"]
    assert config == case_config(case)
    assert config.depth == 7


def test_context_keys_and_values():
    for found, name in zip(context_rows(models()[2]), ("keys", "values"), strict=True):
        expected = outputs()[name]
        length = expected.shape[1]
        np.testing.assert_allclose(found[:, :length], expected, rtol=0, atol=ATOL)


def test_context_rows_do_not_depend_on_what_is_projected_with_them():
    config, drafter = models()[2:]
    positions = jnp.arange(21, 29, dtype=jnp.int32)
    part = project_context(drafter, config, features(config)[:, 21:29], positions)
    for all_rows, some_rows in zip(context_rows(config), part, strict=True):
        np.testing.assert_allclose(all_rows[:, 21:29], some_rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [7, 64])
def test_prefilling_the_target_leaves_the_context_to_draft_from(chunk_size):
    # End to end: here the engine's own target makes the features.
    config, target, drafter_config, drafter = models()
    plan = step.StepPlan(model=config, drafter=drafter_config, budget=8)
    case = CASES["logits"]
    lengths = case["contexts"]
    cache = paged.create(
        *(config, drafter_config),
        num_pages=len(lengths) * TABLE + 1,
        page_size=PAGE_SIZE,
        dtype=jnp.float32,
    )
    state = step.State(
        cache=jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cache),
        length=jnp.zeros(len(lengths), jnp.int32),
        token=jnp.zeros(len(lengths), jnp.int32),
        active=jnp.zeros(len(lengths), bool),
    )
    table = page_table(len(lengths))
    for page_row, length in zip(table, lengths, strict=True):
        for start in range(0, length, chunk_size):
            count = min(chunk_size, length - start)
            tokens = np.resize(token_ids()[start : start + count], chunk_size)
            state = step.prefill(
                *(target, drafter, state, page_row, jnp.asarray(tokens)),
                *(jnp.int32(start), jnp.int32(count)),
                plan=plan,
            )
    logits = propose_logits(
        *(drafter, drafter_config, target.embed, target.lm_head),
        *(state.cache.draft_k, state.cache.draft_v, table),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(token_ids()[lengths]),
    )
    np.testing.assert_allclose(logits, outputs()["logits"], rtol=0, atol=ATOL)
