"""The target for training: the architecture of Kimi K2.6 with parameters stacked over layers.

Matrices have the checkpoint's orientation [out, in]. ``compute`` (bfloat16 or float32) is the
precision of activations and matrix products; norms, router, softmax and logits are float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from moe import experts_by_capacity, experts_exact, route
from quant import fake_quant
from rope import cos_sin, rotate_interleaved, softmax_scale
from shape import Shape

ROUTED = ("e_gate", "e_up", "e_down")  # the INT4 matrices
NO_GRADIENT = ("router_bias",)


def init(shape: Shape, seed: int) -> dict:
    """Float32 parameters."""
    s = shape
    n, m, e, f = s.layers, s.moe_layers, s.experts, s.expert_width
    rng = np.random.default_rng(seed)

    def normal(*dims, gain=1.0):
        return jnp.asarray(rng.standard_normal(dims, np.float32) * gain * dims[-1] ** -0.5)

    ones = jnp.ones
    out_gain = (2 * s.layers) ** -0.5
    return {
        "embed": normal(s.vocab, s.hidden, gain=0.25 * s.hidden**0.5),
        "head": normal(s.vocab, s.hidden, gain=0.5),
        "norm": ones(s.hidden),
        "input_norm": ones((n, s.hidden)),
        "post_norm": ones((n, s.hidden)),
        "q_a": normal(n, s.q_rank, s.hidden),
        "q_norm": ones((n, s.q_rank)),
        "q_b": normal(n, s.heads * (s.nope + s.rope), s.q_rank),
        "kv_a": normal(n, s.latent + s.rope, s.hidden),
        "kv_norm": ones((n, s.latent)),
        "kv_b": normal(n, s.heads * (s.nope + s.value), s.latent),
        "o": normal(n, s.hidden, s.heads * s.value, gain=out_gain),
        "gate": normal(s.dense_width, s.hidden),
        "up": normal(s.dense_width, s.hidden),
        "down": normal(s.hidden, s.dense_width, gain=out_gain),
        "router": normal(m, e, s.hidden),
        "router_bias": jnp.zeros((m, e)),
        "e_gate": normal(m, e, f, s.hidden),
        "e_up": normal(m, e, f, s.hidden),
        "e_down": normal(m, e, s.hidden, f, gain=out_gain),
        "s_gate": normal(m, f, s.hidden),
        "s_up": normal(m, f, s.hidden),
        "s_down": normal(m, s.hidden, f, gain=out_gain),
    }


def rms_norm(x, weight, eps):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * weight).astype(x.dtype)


@jax.custom_vjp
def embed(table, tokens):
    """Rows of the table. The gradient is a product with one-hots: a scatter-add would serialise."""
    return table[tokens]


def _embed_forward(table, tokens):
    return table[tokens], (tokens, table.shape[0])


def _embed_backward(saved, grad):
    tokens, size = saved
    onehot = jax.nn.one_hot(tokens.reshape(-1), size, dtype=grad.dtype)
    flat = grad.reshape(-1, grad.shape[-1])
    table = jnp.einsum("tv,td->vd", onehot, flat, preferred_element_type=jnp.float32)
    return table.astype(grad.dtype), None


embed.defvjp(_embed_forward, _embed_backward)


def label_logit(logits, labels):
    """logits [..., V], labels [...] -> the labels' logits, without a gather to differentiate."""
    hit = jnp.arange(logits.shape[-1]) == labels[..., None]
    return jnp.where(hit, logits, 0).sum(-1)


def linear(x, w):
    return jnp.einsum("...d,fd->...f", x, w)


def causal_attention(q, k, v, scale, kernel: str):
    """q, k [B, S, H, NOPE+PE], v [B, S, H, V] -> [B, S, H, V]. kernel: 'cudnn' or 'xla'."""
    if kernel == "cudnn":
        pad = q.shape[-1] - v.shape[-1]
        wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, pad)))
        out = jax.nn.dot_product_attention(
            q, k, wide, scale=scale, is_causal=True, implementation="cudnn"
        )
        return out[..., : v.shape[-1]]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    p = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", p.astype(v.dtype), v)


def queries_and_rows(p, i, x, positions, s: Shape):
    """Of layer i: rotated q [..., H, NOPE+PE], normed latent [..., R], rotated k_pe [..., PE]."""
    q = linear(rms_norm(linear(x, p["q_a"][i]), p["q_norm"][i], s.latent_eps), p["q_b"][i])
    q = q.reshape(*x.shape[:-1], s.heads, s.nope + s.rope)
    row = linear(x, p["kv_a"][i])
    latent = rms_norm(row[..., : s.latent], p["kv_norm"][i], s.latent_eps)
    cos, sin = cos_sin(positions, s.rope, s)
    k_pe = rotate_interleaved(row[..., s.latent :], cos, sin).astype(x.dtype)
    q_pe = rotate_interleaved(q[..., s.nope :], cos[..., None, :], sin[..., None, :])
    q = jnp.concatenate([q[..., : s.nope], q_pe.astype(x.dtype)], -1)
    return q, latent, k_pe


def mlp(x, gate, up, down):
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def feed_forward(p, i, x, s: Shape, capacity: float | None):
    """x [T, D] -> ([T, D], load [E] or None)."""
    if i == 0:
        return mlp(x, p["gate"], p["up"], p["down"]), None
    j = i - 1
    chosen, weights, load = route(x, p["router"][j], p["router_bias"][j], s)
    experts = (p["e_gate"][j], p["e_up"][j], p["e_down"][j])
    if capacity is None:
        y = experts_exact(x, chosen, weights, *experts)
    else:
        y = experts_by_capacity(x, chosen, weights, *experts, capacity)
    return y + mlp(x, p["s_gate"][j], p["s_up"][j], p["s_down"][j]), load


def cast(params: dict, compute) -> dict:
    """What the engine holds: matrices in `compute`, router and its bias in float32."""
    keep = ("router", "router_bias")
    return {k: v if k in keep else v.astype(compute) for k, v in params.items()}


def quantized(params: dict, on) -> dict:
    """Routed experts fake-quantised where `on` (a traced bool) says so."""
    return params | {k: jnp.where(on, fake_quant(params[k]), params[k]) for k in ROUTED}


@functools.partial(jax.jit, static_argnames=("shape", "capacity", "kernel", "logits"))
def forward(p, tokens, *, shape: Shape, capacity=None, kernel="xla", logits=True):
    """tokens [B, S] -> (logits float32 [B, S, V] or final hidden, layers' outputs, load [m, E]).

    `p` comes from `cast`. capacity None means exact.
    """
    s = shape
    batch, length = tokens.shape
    positions = jnp.arange(length)
    h = embed(p["embed"], tokens)
    outputs, loads = [], []
    for i in range(s.layers):
        x = rms_norm(h, p["input_norm"][i], s.eps)
        q, latent, k_pe = queries_and_rows(p, i, x, positions, s)
        kv = linear(latent, p["kv_b"][i]).reshape(batch, length, s.heads, s.nope + s.value)
        k_pe = jnp.broadcast_to(k_pe[:, :, None], (batch, length, s.heads, s.rope))
        k = jnp.concatenate([kv[..., : s.nope], k_pe], -1)
        scale = softmax_scale(s.nope + s.rope, s)
        a = causal_attention(q, k, kv[..., s.nope :], scale, kernel)
        h = h + linear(a.reshape(batch, length, -1), p["o"][i])
        x = rms_norm(h, p["post_norm"][i], s.eps).reshape(batch * length, -1)
        y, load = feed_forward(p, i, x, s, capacity)
        h = h + y.reshape(h.shape)
        outputs.append(h)
        if load is not None:
            loads.append(load)
    final = rms_norm(h, p["norm"], s.eps)
    if logits:
        final = jnp.einsum("bsd,vd->bsv", final, p["head"], preferred_element_type=jnp.float32)
    return final, tuple(outputs), jnp.stack(loads)
