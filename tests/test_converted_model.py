"""A converted model computes what its source does, through the public face."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversion import converted

from kimi_jax import LLM, SamplingParams, cache
from kimi_jax.checkpoint.read import load_model
from kimi_jax.llm import BUNDLED_MODEL
from kimi_jax.model import transformer

GOLDEN = Path(__file__).parent / "golden" / "target"
MAIN = Path(__file__).parent.parent / "main.py"
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPT = "Write a Python function that reverses a string."


def test_a_converted_model_agrees_with_transformers(tmp_path):
    """The gate that conversions of this family are accepted by: KL below 1e-3, top-1 equal."""
    converted(GOLDEN / "checkpoint", tmp_path / "output")
    config, weights = load_model(tmp_path / "output", dtype=jnp.float32, progress=False)
    with np.load(GOLDEN / "outputs.npz") as data:
        tokens, expected = data["token_ids"], data["logits"].astype(np.float64)
    pages = -(-len(tokens) // 16)
    empty = cache.create(config, None, num_pages=pages + 1, page_size=16, dtype=jnp.float32)
    page_row = jnp.arange(1, pages + 1, dtype=jnp.int32)

    @jax.jit
    def logits(weights, latent):
        chunk = transformer.forward_chunk(
            weights, config, latent, page_row, tokens, 0, len(tokens), ()
        )
        return transformer.unembed(weights, config, chunk.hidden)

    found = np.asarray(logits(weights, empty.latent), np.float64)
    ours, theirs = (x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in (found, expected))
    divergence = (np.exp(theirs) * (theirs - ours)).sum(axis=-1)
    assert divergence.max() < 1e-3
    assert np.array_equal(found.argmax(axis=-1), expected.argmax(axis=-1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    output = tmp_path_factory.mktemp("tiny") / "converted"
    converted(BUNDLED_MODEL, output, BUNDLED_MODEL / "drafter")
    return output


@pytest.fixture(scope="module")
def answers(tiny):
    """Of the bundled model and of its conversion: (logits, chat with its drafter)."""
    chat = [{"role": "user", "content": PROMPT}]
    found = []
    for folder in (BUNDLED_MODEL, tiny):
        llm = LLM(folder, max_num_seqs=1, tree_budget=8)
        assert llm.setup.drafter is not None
        [result] = llm.chat(chat, GREEDY)
        found.append((llm.logits(list(range(40, 60))), result))
    return found


def test_converted_and_published_folders_give_equal_logits(answers):
    (published, _), (ours, _) = answers
    assert published.any()
    assert np.array_equal(published, ours)


def test_the_bundled_model_converts_and_generates_the_same_text(answers):
    """With its drafter, and asked as a chat: it is known for what it is, wherever it lies."""
    published, ours = ((r.text, r.token_ids, r.logprobs) for _, r in answers)
    assert published == ours
    assert len(ours[1]) > 5


def test_the_command_line_takes_a_converted_folder(tiny, answers, tmp_path):
    out = tmp_path / "out.json"
    arguments = [f"--model={tiny}", f"--prompt={PROMPT}", "--temperature=0"]
    arguments += [f"--max_tokens={GREEDY.max_tokens}", "--max_num_seqs=1", "--tree_budget=8"]
    done = subprocess.run(
        [sys.executable, str(MAIN), *arguments, f"--output_json={out}"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [entry] = json.loads(out.read_text())
    assert entry["text"] == answers[1][1].text
    assert done.stdout.strip() == entry["text"].strip()
    for phase in ("read", "arrange", "place"):  # where the time of loading went
        assert f"{phase} " in done.stderr
