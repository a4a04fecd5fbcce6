"""Trains the drafter on text that the packed target writes itself.

    python3 tiny/train_drafter.py --target FOLDER --out DIR --rounds 12 --steps 20000

1. Self-generation: `--rounds` x `--sequences` sequences, at `--temperatures` in turn.
2. Training: random anchors of random sequences; cross-entropy of the tokens that followed, slot k
   weighted exp(-(k-1)/4); anchors and labels lie in the generated part.
3. A quick figure: tokens a step on greedy text of held-out prompts.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import acceptance
import data
import drafter
import export_drafter
import jax
import jax.numpy as jnp
import model
import muon
import numpy as np
from export import read
from generate import generate, prompts_from
from shape import DRAFT, TINY

MUON = {"fc", "q", "k", "v", "o", "gate", "up", "down"}


def repeated_share(tokens: np.ndarray, n: int = 8) -> np.ndarray:
    """Per row, the share of n-grams that are repeats. tokens [B, L]."""
    grams = np.zeros((tokens.shape[0], tokens.shape[1] - n + 1), np.uint64)
    for i in range(n):
        grams = grams * np.uint64(6364136223846793005)
        grams += tokens[:, i : i + grams.shape[1]].astype(np.uint64) + np.uint64(1)
    grams.sort(axis=1)
    return (grams[:, 1:] == grams[:, :-1]).mean(1)


def self_generated(p, stream, temperatures, *, rounds: int, sequences: int, length: int, seed: int):
    """(tokens uint16 [N, length], prompt length int32 [N]), loops dropped."""
    temperature = jnp.asarray(np.resize(np.array(temperatures, np.float32), sequences))
    kept, lengths = [], []
    for r in range(rounds):
        key = jax.random.fold_in(jax.random.key(seed), r)
        prompts, prompt_length = prompts_from(stream, key, sequences)
        tokens = generate(p, prompts, prompt_length, temperature, key, shape=TINY, length=length)
        tokens = np.asarray(tokens).astype(np.uint16)
        keep = repeated_share(tokens) <= 0.6
        kept.append(tokens[keep])
        lengths.append(np.asarray(prompt_length)[keep])
    return jnp.asarray(np.concatenate(kept)), jnp.asarray(np.concatenate(lengths))


def loss_of(dp, p, taps, tokens, anchors, live):
    cast = {k: v.astype(jnp.bfloat16) for k, v in dp.items()}
    logits = drafter.slot_logits(cast, p, taps, tokens, anchors, TINY, DRAFT)
    slots = jnp.arange(1, DRAFT.block)
    index = anchors[..., None] + slots  # [B, A, 7]
    labels = jnp.take_along_axis(tokens, index.reshape(len(tokens), -1), 1).reshape(index.shape)
    cost = jax.nn.logsumexp(logits, -1) - model.label_logit(logits, labels)
    weight = jnp.exp(-(slots - 1) / 4.0) * live[..., None]
    hit = (logits.argmax(-1) == labels) * live[..., None]
    return (cost * weight).sum() / weight.sum(), hit.sum((0, 1)) / live.sum()


@functools.partial(jax.jit, static_argnames=("batch", "anchors", "kernel"), donate_argnums=(0, 1))
def train_step(dp, state, p, tokens, prompt_length, step, lr, *, batch, anchors, kernel):
    key = jax.random.fold_in(jax.random.key(tokens.shape[1]), step)
    k_row, k_anchor = jax.random.split(key)
    rows = jax.random.randint(k_row, (batch,), 0, tokens.shape[0])
    text, first = tokens[rows].astype(jnp.int32), jnp.maximum(prompt_length[rows] - 1, 0)
    length = text.shape[1]
    _, outputs, _ = model.forward(p, text, shape=TINY, capacity=2.5, kernel=kernel, logits=False)
    # A third of the anchors fall into the first 64 generated tokens: short contexts matter.
    u = jax.random.uniform(k_anchor, (batch, anchors))
    early = jnp.arange(anchors) % 3 == 0
    span = jnp.maximum(length - DRAFT.block - first, 1)[:, None]
    span = jnp.where(early, jnp.minimum(span, 64), span)
    at = first[:, None] + (u * span).astype(jnp.int32)
    live = at + DRAFT.block <= length
    at = jnp.minimum(at, length - DRAFT.block)
    taps = drafter.features(outputs, DRAFT)
    (loss, hits), grads = jax.value_and_grad(loss_of, has_aux=True)(dp, p, taps, text, at, live)
    dp, state, _ = muon.update(grads, state, dp, muon=MUON, lr=lr, adam_lr=0.5 * lr, decay=0.02)
    return dp, state, jnp.concatenate([loss[None], hits])


def held_out_acceptance(dp, p, prompts: np.ndarray, new_tokens: int, temperature: float) -> dict:
    """Mean tokens a step per budget on the packed target's own text. prompts [B, P]."""
    batch, size = prompts.shape
    tokens = generate(
        p,
        jnp.asarray(prompts),
        jnp.full(batch, size),
        jnp.full(batch, temperature, jnp.float32),
        jax.random.key(1),
        shape=TINY,
        length=size + new_tokens,
    )
    cast = {k: v.astype(p["embed"].dtype) for k, v in dp.items()}
    counts: dict = {}
    for chunk in np.split(np.arange(batch), range(32, batch, 32)):
        _, outputs, _ = model.forward(p, tokens[chunk], shape=TINY, logits=False)
        anchors = jnp.broadcast_to(jnp.arange(size + new_tokens), (len(chunk), size + new_tokens))
        taps = drafter.features(outputs, DRAFT)
        logp, ids = drafter.top_proposals(
            cast, p, taps, tokens[chunk], anchors, s=TINY, d=DRAFT, top=32
        )
        logp, ids = np.asarray(logp), np.asarray(ids)
        for j, row in enumerate(np.asarray(tokens)[chunk]):
            for budget in (acceptance.CHAIN, 8, 16, 32, 63):
                counts.setdefault(budget, []).extend(
                    acceptance.replay(logp[j], ids[j], row, size - 1, budget)
                )
    loops = np.mean([acceptance.loop_share(r[size:]) > 0.8 for r in np.asarray(tokens)])
    result = {str(b): round(1 + float(np.mean(c)), 3) for b, c in counts.items()}
    return result | {"loops": float(loops)}


def held_out_figures(dp, p, count: int, say) -> dict:
    """Acceptance on `count` prompts of 48 tokens from the held-out stream."""
    held = data.unpack(data.TOKENS / "heldout.xz")
    ranges = json.loads((data.TOKENS / "heldout.json").read_text())["ranges"]
    rng = np.random.default_rng(0)
    prompts = []
    for i in range(count):
        low, high = ranges[("stdlib", "pydocs", "pypi", "pypi")[i % 4]]
        at = rng.integers(low, high - 48)
        prompts.append(held[at : at + 48].astype(np.int32))
    figures = {}
    for temperature in (0.0, 0.8):
        figures[str(temperature)] = held_out_acceptance(dp, p, np.stack(prompts), 136, temperature)
        say("temperature", temperature, figures[str(temperature)])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="a target folder whose drafter to start from")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1, help="of the self-generated text")
    parser.add_argument("--kernel", choices=("cudnn", "xla"), help="attention; default: tried")
    parser.add_argument("--temperatures", default="0,0,0,0.8", help="of the sequences, in turn")
    parser.add_argument("--split", default="train")
    parser.add_argument("--long_sequences", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--decay_share", type=float, default=0.6)
    parser.add_argument("--long_every", type=int, default=10)
    parser.add_argument("--log", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=1e9, help="shorten to fit this time")
    parser.add_argument("--prompts", type=int, default=96)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.time()

    def say(*what) -> None:
        print(f"[{time.time() - began:.0f} s]", *what, flush=True)

    from train import choose_kernel

    kernel = args.kernel or choose_kernel(TINY)
    p = model.cast(read(args.target), jnp.bfloat16)
    # Chat prompts get a quarter of the sequences.
    mixture = {"stdlib": 0.12, "pydocs": 0.13, "sqlite": 0.02, "pypi": 0.48, "chat": 0.25}
    stream = data.load(args.split, mixture)
    say("loaded; attention", kernel)
    temperatures = [float(t) for t in args.temperatures.split(",")]
    short = self_generated(
        p,
        stream,
        temperatures,
        rounds=args.rounds,
        sequences=args.sequences,
        length=args.length,
        seed=args.seed,
    )
    say("self-generated", short[0].shape)
    long = None
    if args.long_sequences:
        long = self_generated(
            p, stream, temperatures, rounds=1, sequences=args.long_sequences, length=2048, seed=2
        )
        say("self-generated", long[0].shape)

    dp = export_drafter.read(args.init) if args.init else drafter.init(TINY, DRAFT, seed=0)
    state = muon.init(dp)
    step, log, mark = 0, [], time.time()
    while step < args.steps:
        lr = args.lr * min((step + 1) / 200, 1.0)
        lr *= min(1.0, max(0.02, (args.steps - step) / (args.steps * args.decay_share)))
        is_long = long is not None and step % args.long_every == args.long_every - 1
        tokens, prompt_length = long if is_long else short
        batch = max(args.batch // 4, 1) if is_long else args.batch
        dp, state, stats = train_step(
            dp,
            state,
            p,
            tokens,
            prompt_length,
            jnp.int32(step),
            jnp.float32(lr),
            batch=batch,
            anchors=args.anchors,
            kernel=kernel,
        )
        step += 1
        if step == 20:
            stats.block_until_ready()
            say("compiled")
            mark = time.time()
        if step == 120:
            stats.block_until_ready()
            each = (time.time() - mark) / 100
            args.steps = min(args.steps, step + int((args.seconds - time.time() + began) / each))
            say(f"{each * 1e3:.2f} ms/step, {args.steps} steps")
        if step % args.log == 0 or step == args.steps:
            values = [round(float(x), 3) for x in stats]
            log.append((step, values))
            say(step, "loss", values[0], "slot hits", values[1:])
    np.savez(args.out / "drafter.npz", **{k: np.asarray(v) for k, v in dp.items()})

    figures = held_out_figures(dp, p, args.prompts, say) if args.prompts else {}
    report = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    report |= {
        "blocks": args.steps * args.batch * args.anchors,
        "self_generated_tokens": int(short[0].size + (long[0].size if long else 0)),
        "seconds": time.time() - began,
        "log": log,
        "acceptance": figures,
    }
    del report["target"], report["out"], report["init"]
    (args.out / "train_drafter.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
