"""The closing phase of the target: short dialogues, and unlikelihood on the model's own loops.

    python3 tiny/unloop.py --folder PACKED --out DIR --rounds 5

Each round the model continues prompts of the training text, mostly greedily. Rows that loop give
the negatives: a token that completes an 8-gram seen before in the continuation costs
-log(1 - p) (Welleck et al. 2019). The usual loss on text runs beside it. Routed experts stay
fake-quantised throughout, so the packed weights are what is being trained.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import data
import export
import jax
import jax.numpy as jnp
import model
import muon
import numpy as np
from generate import generate, prompts_from
from shape import TINY
from special import EOS, IM_END
from train import MUON, choose_kernel, loss_of

# Shares of sampled tokens of the closing phase, and of the prompts that the model continues.
CLOSING = {
    "stdlib": 0.07,
    "pydocs": 0.07,
    "sqlite": 0.02,
    "pypi": 0.52,
    "chat": 0.08,
    "short": 0.20,
    "primer": 0.04,
}
PROMPTS = {"stdlib": 0.2, "pydocs": 0.2, "sqlite": 0.05, "pypi": 0.3, "short": 0.25}
NEW_TOKENS = 129  # with the prompt 193: fused attention wants inputs of a multiple of 64
LONGEST_PROMPT = 64


def repeats(tokens: np.ndarray, prompt_length: np.ndarray, n: int = 8) -> np.ndarray:
    """bool [B, L]: the n-gram that ends here occurred before in the same continuation.

    Nothing is marked after an end token: what follows is another text.
    """
    marked = np.zeros(tokens.shape, bool)
    for b, row in enumerate(tokens.tolist()):
        seen = set()
        for end in range(int(prompt_length[b]) + n, len(row) + 1):
            if row[end - 1] in (IM_END, EOS):
                break
            gram = tuple(row[end - n : end])
            marked[b, end - 1] = gram in seen
            seen.add(gram)
    return marked


@functools.partial(
    jax.jit,
    static_argnames=("shape", "batch", "length", "loop_rows", "capacity", "kernel", "compute"),
    donate_argnums=(0, 1),
)
def step_on(
    params,
    state,
    stream,
    loops,
    marked,
    number,
    lr,
    alpha,
    *,
    shape,
    batch,
    length,
    loop_rows,
    capacity,
    kernel,
    compute,
):
    k_text, k_rows = jax.random.split(jax.random.fold_in(jax.random.key(77), number))
    text = data.windows(stream, data.window_starts(stream, k_text, batch, length + 1), length + 1)
    rows = jax.random.randint(k_rows, (loop_rows,), 0, loops.shape[0])
    loop, mark = loops[rows], marked[rows, 1:]

    def loss(params):
        total, (plain, _) = loss_of(params, text, True, shape, capacity, kernel, compute)
        p = model.cast(model.quantized(params, True), compute)
        logits, _, _ = model.forward(
            p, loop[:, :-1], shape=shape, capacity=2.0, kernel=kernel, logits=True
        )
        logp = jax.nn.log_softmax(logits)
        taken = jnp.take_along_axis(logp, loop[:, 1:, None], -1)[..., 0]
        cost = -jnp.log(jnp.maximum(-jnp.expm1(jnp.minimum(taken, -1e-5)), 1e-5))
        unlikely = (cost * mark).sum() / jnp.maximum(mark.sum(), 1)
        return total + alpha * unlikely, (plain, unlikely)

    grads, stats = jax.grad(loss, has_aux=True)(params)
    bias = params["router_bias"]
    params, state, _ = muon.update(
        grads, state, params, muon=MUON, lr=lr, adam_lr=0.5 * lr, decay=0.1
    )
    params["router_bias"] = bias  # frozen
    return params, state, jnp.stack(stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=600, help="most steps a round")
    parser.add_argument("--sequences", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--loop_rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--alpha", type=float, default=0.7)
    parser.add_argument("--later_steps", type=int, help="a round after the first; default: timed")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--decode_capacity", type=float, help="faster text on a CPU")
    parser.add_argument("--kernel", choices=("cudnn", "xla"), help="attention; default: tried")
    parser.add_argument("--log", type=int, default=125)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    shape, compute = TINY, jnp.dtype(args.compute)
    kernel = args.kernel or choose_kernel(TINY)
    params = export.read(args.folder, shape)
    state = muon.init(params)
    text = data.load("closing", CLOSING)
    prompt_text = data.load("closing", PROMPTS, tokens=text.tokens)
    temperature = jnp.asarray(np.resize(np.array([0, 0, 0, 0.7], np.float32), args.sequences))
    greedy = np.asarray(temperature) == 0
    total = args.steps + (args.rounds - 1) * (args.later_steps or args.steps)
    number, log = 0, []
    steps, mark = args.later_steps or args.steps, time.time()
    pool_tokens, pool_marked = [], []
    for r in range(args.rounds + 1):
        p = model.cast(export.engine_view(params), compute)
        key = jax.random.fold_in(jax.random.key(5), r)
        prompts, size = prompts_from(prompt_text, key, args.sequences, longest=LONGEST_PROMPT)
        size = jnp.maximum(size, 16)
        tokens = generate(
            p,
            prompts,
            size,
            temperature,
            key,
            shape=shape,
            length=LONGEST_PROMPT + NEW_TOKENS,
            capacity=args.decode_capacity,
        )
        tokens, size = np.asarray(tokens), np.asarray(size)
        marked = repeats(tokens, size)
        share = marked.sum(1) / (tokens.shape[1] - size - 7)
        figures = {
            "greedy loops": float((share[greedy] > 0.8).mean()),
            "greedy half loops": float((share[greedy] > 0.4).mean()),
            "0.7 loops": float((share[~greedy] > 0.8).mean()),
        }
        log.append(figures)
        print(f"[{time.time() - began:.0f} s] round {r}", figures, flush=True)
        if r == args.rounds:
            break
        bad = np.flatnonzero(marked.sum(1) >= 12)
        pool_tokens, pool_marked = pool_tokens[-1:], pool_marked[-1:]  # this round and the last
        pool_tokens.append(tokens[np.resize(bad, args.sequences // 4)])
        pool_marked.append(marked[np.resize(bad, args.sequences // 4)])
        # Once loops are rare, a gentle push keeps them so.
        alpha = args.alpha if figures["greedy loops"] > 0.06 else 0.3 * args.alpha
        loops = jnp.asarray(np.concatenate([pool_tokens[0], pool_tokens[-1]]), jnp.int32)
        marks = jnp.asarray(np.concatenate([pool_marked[0], pool_marked[-1]]))
        for _ in range(args.steps if r == 0 else steps):
            lr = args.lr * min((number + 1) / 30, 1.0, max(0.03, 1.5 * (1 - number / total)))
            params, state, stats = step_on(
                params,
                state,
                text,
                loops,
                marks,
                jnp.int32(number),
                jnp.float32(lr),
                jnp.float32(alpha),
                shape=shape,
                batch=args.batch,
                length=args.length,
                loop_rows=args.loop_rows,
                capacity=1.6,
                kernel=kernel,
                compute=compute,
            )
            number += 1
            if number == 30:
                stats.block_until_ready()
                mark = time.time()
            if number == 130 and not args.later_steps:  # fit the other rounds to the time given
                stats.block_until_ready()
                each = (time.time() - mark) / 100
                room = args.seconds - (time.time() - began) - 3.5 * args.rounds
                steps = min(args.steps, int(room / each / args.rounds))
                total = args.steps + (args.rounds - 1) * steps
                print(f"{each * 1e3:.1f} ms/step, {total} steps", flush=True)
            if number == 1 or number % args.log == 0:
                loss, unlikely = (round(float(x), 3) for x in stats)
                print(
                    f"[{time.time() - began:.0f} s] {number} loss {loss} unlikelihood {unlikely}",
                    flush=True,
                )
    export.write(params, args.out / "packed", shape)
    report = {k: v for k, v in vars(args).items() if k not in ("folder", "out")}
    report |= {"total_steps": number, "rounds_log": log, "run_seconds": time.time() - began}
    (args.out / "unloop.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
