"""Trains the target: warm-up, constant rate, linear decay; INT4-aware in the last part.

    python3 tiny/train.py --steps 12000 --out DIR     # phases: 512-token windows, then long ones

Prints one line every `--log` steps; writes ``target.npz`` (float32 masters and the router's bias).
"""

import argparse
import functools
import json
import time
from pathlib import Path

import data
import jax
import jax.numpy as jnp
import model
import muon
import numpy as np
from shape import TINY

MUON = {
    *("q_a", "q_b", "kv_a", "kv_b", "o", "gate", "up", "down"),
    *("e_gate", "e_up", "e_down", "s_gate", "s_up", "s_down"),
}


def loss_of(params, tokens, qat, shape, capacity, kernel, compute=jnp.bfloat16):
    p = model.cast(model.quantized(params, qat), compute)
    hidden, _, load = model.forward(
        p, tokens[:, :-1], shape=shape, capacity=capacity, kernel=kernel, logits=False
    )
    logits = jnp.einsum("bsd,vd->bsv", hidden, p["head"], preferred_element_type=jnp.float32)
    top = jax.nn.logsumexp(logits, -1)
    label = model.label_logit(logits, tokens[:, 1:])
    loss = jnp.mean(top - label)
    return loss + 1e-5 * jnp.mean(top * top), (loss, load)


@functools.partial(
    jax.jit,
    static_argnames=("shape", "batch", "length", "capacity", "kernel", "decay"),
    donate_argnums=(0, 1),
)
def train_step(
    params, state, stream, step, lr, gamma, qat, *, shape, batch, length, capacity, kernel, decay
):
    key = jax.random.fold_in(jax.random.key(length), step)
    tokens = data.windows(stream, data.window_starts(stream, key, batch, length + 1), length + 1)
    grads, (loss, load) = jax.grad(loss_of, has_aux=True)(
        params, tokens, qat, shape, capacity, kernel
    )
    bias = params["router_bias"]
    params, state, norm = muon.update(
        grads, state, params, muon=MUON, lr=lr, adam_lr=0.5 * lr, decay=decay
    )
    # Auxiliary-loss-free balance: the bias only takes part in the choice.
    bias = bias + gamma * jnp.sign(1.0 / shape.experts - load)
    params["router_bias"] = bias - bias.mean(-1, keepdims=True)
    imbalance = load.max() * shape.experts
    return params, state, jnp.stack([loss, norm, imbalance])


def learning_rate(step: int, args) -> float:
    """Warm-up, constant, then linear to 2 % over the last `args.decay_share` of all steps."""
    total = args.steps + args.long_steps
    decay_from = total * (1 - args.decay_share)
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    if step < decay_from:
        return args.lr
    return args.lr * max(0.02, (total - step) / (total - decay_from))


def held_out_loss(params, quantize, stream_tokens, shape, length=512, rows=16):
    """Exact mean loss over the held-out stream's first rows; params as trained."""
    p = model.cast(model.quantized(params, jnp.asarray(quantize)), jnp.bfloat16)
    index = np.linspace(0, len(stream_tokens) - length - 1, rows).astype(int)
    tokens = jnp.asarray(np.stack([stream_tokens[i : i + length + 1] for i in index]), jnp.int32)
    logits, _, _ = model.forward(p, tokens[:, :-1], shape=shape)
    logp = jax.nn.log_softmax(logits)
    return -float(jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean())


def choose_kernel(shape) -> str:
    """cuDNN's fused attention where it works, else XLA's."""
    try:
        x = jnp.ones((1, 128, shape.heads, shape.nope + shape.rope), jnp.bfloat16)
        f = functools.partial(model.causal_attention, scale=1.0, kernel="cudnn")
        jax.block_until_ready(jax.grad(lambda q: f(q, x, x[..., : shape.value]).sum())(x))
        return "cudnn"
    except Exception as error:
        print("cudnn attention not used:", str(error)[:300].replace("\n", " "), flush=True)
        return "xla"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--long_steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--long_length", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--decay_share", type=float, default=0.5)
    parser.add_argument("--qat_share", type=float, default=0.15)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--capacity", type=float, default=1.4)
    parser.add_argument("--gamma", type=float, default=3e-3)
    parser.add_argument("--log", type=int, default=250)
    parser.add_argument("--seconds", type=float, default=1e9, help="shorten to fit this time")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.time()

    stream = data.load("train")
    heldout = json.loads((data.TOKENS / "heldout.json").read_text())["ranges"]
    held_tokens = data.unpack(data.TOKENS / "heldout.xz")
    shape = TINY
    kernel = choose_kernel(shape)
    params = model.init(shape, seed=0)
    state = muon.init(params)
    print(f"data and init {time.time() - began:.0f} s; attention {kernel}", flush=True)

    def step_of(step: int):
        long = step >= args.steps
        length = args.long_length if long else args.length
        return dict(
            batch=args.batch * args.length // length,
            length=length,
            capacity=args.capacity,
            kernel=kernel,
            shape=shape,
            decay=args.weight_decay,
        )

    step, mark, log = 0, time.time(), []
    while step < args.steps + args.long_steps:
        total = args.steps + args.long_steps
        qat = step >= total * (1 - args.qat_share)
        gamma = args.gamma * max(0.0, 1 - step / (0.95 * total))
        lr = learning_rate(step, args)
        params, state, stats = train_step(
            params,
            state,
            stream,
            jnp.int32(step),
            jnp.float32(lr),
            jnp.float32(gamma),
            jnp.asarray(qat),
            **step_of(step),
        )
        step += 1
        if step == 20:  # compiled: measure, and fit the schedule to the time given
            stats.block_until_ready()
            print(f"compiled {time.time() - began:.0f} s", flush=True)
            mark = time.time()
        if step == 120:
            stats.block_until_ready()
            each = (time.time() - mark) / 100
            room = int((args.seconds - (time.time() - began)) / each)
            if step + room < total:
                args.steps = max(step + room - args.long_steps, step)
            print(f"{each * 1e3:.2f} ms/step, {args.steps}+{args.long_steps} steps", flush=True)
            mark = time.time()
        if step % args.log == 0 or step == args.steps + args.long_steps:
            loss, norm, imbalance = (float(x) for x in stats)
            log.append((step, loss))
            rate = args.batch * args.length * args.log / max(time.time() - mark, 1e-9) / 1e6
            mark = time.time()
            print(
                f"{step} loss {loss:.3f} norm {norm:.2f} max load {imbalance:.2f} "
                f"lr {lr:.5f} {rate:.2f} M tok/s, {time.time() - began:.0f} s",
                flush=True,
            )
        if step % (args.log * 8) == 0 or step == args.steps + args.long_steps:
            losses = {
                name: held_out_loss(params, qat, held_tokens[a:b], shape)
                for name, (a, b) in heldout.items()
            }
            print("  held out:", {k: round(v, 3) for k, v in losses.items()}, flush=True)
            mark = time.time()
    np.savez(args.out / "target.npz", **{k: np.asarray(v) for k, v in params.items()})
    seconds = time.time() - began
    report = vars(args) | {"seconds": seconds, "log": log, "out": "", "kernel": kernel}
    (args.out / "train.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(f"done in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
