"""Measures the shipped files and writes ``RESULTS.json`` beside them.

``python3 tiny/evaluate.py`` reads the packed target and drafter as the engine does (float32
arithmetic on bfloat16 and INT4 values) and the committed held-out set, so that anyone can repeat it
without the corpus. Definitions:

- loss: mean nats a token over windows of 512 held-out tokens, teacher-forced;
- loop: over 80 % of a continuation's 8-grams of tokens repeat an earlier one of it;
- acceptance: tokens a step (accepted + bonus) of the exact best-first tree of a budget, the root
  not counted, or of the chain of 7; steps that the end of the text would cut short are left out.
"""

import argparse
import ast
import hashlib
import json
import re
import time
from pathlib import Path

import acceptance
import drafter
import export
import export_drafter
import jax
import jax.numpy as jnp
import model
import numpy as np
from generate import generate
from paths import ASSETS, HERE, SOURCES, TOKENS
from shape import DRAFT, TINY
from special import EOS, IM_END, SPECIAL
from tokenizer import load as load_tokenizer

BUDGETS = (acceptance.CHAIN, 4, 8, 12, 16, 24, 32, 48, 63)
NEW_TOKENS = 128
SEED = 0


def held_out_loss(p, rows: dict[str, list]) -> dict[str, float]:
    sums, counts = {}, {}
    for source, sequences in rows.items():
        total = 0.0
        for chunk in np.array_split(np.array(sequences), max(len(sequences) // 8, 1)):
            tokens = jnp.asarray(chunk)
            logits, _, _ = model.forward(p, tokens[:, :-1], shape=TINY)
            logp = jax.nn.log_softmax(logits)
            total -= float(jnp.take_along_axis(logp, tokens[:, 1:, None], -1).sum())
        sums[source] = total
        counts[source] = sum(len(s) - 1 for s in sequences)
    result = {source: round(sums[source] / counts[source], 4) for source in rows}
    return result | {"all": round(sum(sums.values()) / sum(counts.values()), 4)}


def continuations(p, prompts: np.ndarray, temperature: float, top_p: float = 1.0) -> np.ndarray:
    batch, size = prompts.shape
    return np.asarray(
        generate(
            p,
            jnp.asarray(prompts, jnp.int32),
            jnp.full(batch, size),
            jnp.full(batch, temperature, jnp.float32),
            jax.random.key(SEED),
            shape=TINY,
            length=size + NEW_TOKENS,
            top_p=top_p,
        )
    )


def loop_fraction(tokens: np.ndarray, size: int) -> float:
    return float(np.mean([acceptance.loop_share(row[size:]) > 0.8 for row in tokens]))


def acceptance_table(p, dp, tokens: np.ndarray, size: int) -> tuple[dict, dict]:
    """Mean tokens a step and, for the chain, the histogram of accepted counts."""
    counts: dict = {budget: [] for budget in BUDGETS}
    for chunk in np.array_split(tokens, max(len(tokens) // 10, 1)):
        _, outputs, _ = model.forward(p, jnp.asarray(chunk), shape=TINY, logits=False)
        taps = drafter.features(outputs, DRAFT)
        last = chunk.shape[1] - DRAFT.block  # later anchors would be cut short
        anchors = jnp.broadcast_to(jnp.arange(size - 1, last + 1), (len(chunk), last + 2 - size))
        logp, ids = drafter.top_proposals(
            dp, p, taps, jnp.asarray(chunk), anchors, s=TINY, d=DRAFT, top=63
        )
        logp, ids = np.asarray(logp), np.asarray(ids)
        for i, row in enumerate(chunk):
            path = row[size - 1 :]
            for budget in BUDGETS:
                counts[budget] += acceptance.replay(logp[i], ids[i], path, 0, budget)
    means = {str(b): round(1 + float(np.mean(c)), 4) for b, c in counts.items()}
    chain = np.bincount(counts[acceptance.CHAIN], minlength=DRAFT.block).tolist()
    return means, {"chain_accepted": chain}


def chat_prompt(encoding, request: str) -> list[int]:
    def text(t: str) -> list[int]:
        return encoding.encode(t, disallowed_special=())

    c = SPECIAL
    ids = [c["<|im_user|>"], *text("user"), c["<|im_middle|>"], *text(request), IM_END]
    ids += [c["<|im_assistant|>"], *text("assistant"), c["<|im_middle|>"]]
    return [*ids, c["<think>"], c["</think>"]]


def code_of(answer: str) -> str:
    block = re.search(r"```(?:python)?\n(.*?)```", answer, re.S)
    return block.group(1) if block else answer


def parses(code: str) -> bool:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(n, ast.FunctionDef) for n in tree.body)


def chat_answers(p, requests: list[str], limit: int = 256) -> list[dict]:
    encoding = load_tokenizer()
    prompts = [chat_prompt(encoding, r) for r in requests]
    width = max(map(len, prompts))
    padded = np.array([[*q, *[0] * (width - len(q))] for q in prompts])
    lengths = np.array([len(q) for q in prompts])
    tokens = generate(
        p,
        jnp.asarray(padded, jnp.int32),
        jnp.asarray(lengths),
        jnp.zeros(len(prompts)),
        jax.random.key(SEED),
        shape=TINY,
        length=width + limit,
    )
    results = []
    for request, start, row in zip(requests, lengths, np.asarray(tokens), strict=True):
        answer = row[start : start + limit].tolist()
        ends = [answer.index(t) for t in (IM_END, EOS) if t in answer]
        answer, stopped = (answer[: min(ends)], True) if ends else (answer, False)
        text = encoding.decode(answer)
        good = parses(code_of(text))
        results.append({"request": request, "answer": text, "stopped": stopped, "parses": good})
    return results


def other_prompts(p, dp, count: int = 200) -> dict:
    """Loops and acceptance on other held-out prompts than the committed ones; needs the corpus."""
    from data import unpack

    tokens = unpack(TOKENS / "heldout.xz").astype(int)
    ranges = json.loads((TOKENS / "heldout.json").read_text())["ranges"]
    rng, rows, size = np.random.default_rng(77), [], 48
    for i in range(count):
        low, high = ranges[("stdlib", "pydocs", "pypi", "pypi")[i % 4]]
        at = rng.integers(low, high - size)
        rows.append(tokens[at : at + size])
    greedy = continuations(p, np.array(rows), 0.0)
    return {
        "prompts": count,
        "greedy loops": loop_fraction(greedy, size),
        "tokens_per_step": acceptance_table(p, dp, greedy, size)[0],
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ASSETS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--other_prompts", action="store_true", help="needs tiny/work/tokens")
    args = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    began = time.time()
    folder = args.folder
    p = export.read(folder)
    dp = export_drafter.read(folder)
    held = json.loads((ASSETS / "heldout.json").read_text())
    sources = [s for s, rows in held["prompts"].items() for _ in rows]
    prompts = np.array([row for rows in held["prompts"].values() for row in rows])
    size = prompts.shape[1]

    result: dict = {"held_out_loss": held_out_loss(p, held["loss"])}
    print(result, f"{time.time() - began:.0f} s", flush=True)
    greedy = continuations(p, prompts, 0.0)
    default = continuations(p, prompts, 0.7, top_p=0.95)
    result["loop_share"] = {
        "greedy": loop_fraction(greedy, size),
        "temperature 0.7, top_p 0.95": loop_fraction(default, size),
    }
    print(result["loop_share"], f"{time.time() - began:.0f} s", flush=True)
    sampled = continuations(p, prompts, 0.8)
    tables: dict = {}
    for name, tokens in (("greedy", greedy), ("temperature 0.8", sampled)):
        means, extra = acceptance_table(p, dp, tokens, size)
        tables[name] = {"tokens_per_step": means} | extra
        print(name, means, f"{time.time() - began:.0f} s", flush=True)
    looping = np.array([acceptance.loop_share(r[size:]) > 0.5 for r in greedy])
    means, _ = acceptance_table(p, dp, greedy[~looping], size)
    tables["greedy, texts with under half of their 8-grams repeated"] = {"tokens_per_step": means}
    for source in dict.fromkeys(sources):
        chosen = greedy[np.array(sources) == source]
        tables[f"greedy, {source}"] = {"tokens_per_step": acceptance_table(p, dp, chosen, size)[0]}
    result["acceptance"] = tables
    chat = chat_answers(p, held["chat"])
    result["chat"] = {
        "parse_share": float(np.mean([c["parses"] for c in chat])),
        "stopped_share": float(np.mean([c["stopped"] for c in chat])),
        "answers": chat,
    }
    print("parse", result["chat"]["parse_share"], "stopped", result["chat"]["stopped_share"])
    if args.other_prompts:
        result["other_prompts"] = other_prompts(p, dp)
        print(result["other_prompts"], flush=True)
    files = sorted(f for f in folder.rglob("*") if f.suffix in (".safetensors", ".model"))
    names = [f.relative_to(folder).as_posix() for f in files]
    result["method"] = {
        "arithmetic": "float32",
        "device": jax.devices()[0].platform,
        "prompts": f"{len(prompts)} of {size} held-out tokens, {NEW_TOKENS} new tokens each",
        "held_out_set": "heldout.json",
        "seed": SEED,
    }
    result["parameters"] = int(
        sum(np.prod(v.shape) for v in p.values()) + sum(np.prod(v.shape) for v in dp.values())
    )
    result["bytes"] = {n: f.stat().st_size for n, f in zip(names, files, strict=True)}
    result["sha256"] = {n: sha256(f) for n, f in zip(names, files, strict=True)}
    result["sha256"]["heldout.json"] = sha256(ASSETS / "heldout.json")
    result["sha256"]["tiny/sources.json"] = sha256(SOURCES)
    training = HERE / "training.json"
    if training.exists():
        result["training"] = json.loads(training.read_text())
    out = args.out or folder / "RESULTS.json"
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
