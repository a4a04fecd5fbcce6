"""The routed experts: sigmoid router, capacity dispatch to train, all experts to be exact.

In training each expert takes at most C tokens of the batch. Both directions of dispatch and combine
are gathers (a scatter-add would serialise): slot -> token one way, token -> slot the other.
"""

import functools

import jax
import jax.numpy as jnp


def route(x, router, bias, shape):
    """x [T, D] -> expert ids [T, K], weights float32 [T, K], load [E] (share of the choices)."""
    logits = jnp.dot(x.astype(jnp.float32), router.T, precision="highest")
    scores = jax.nn.sigmoid(logits)
    choice = jax.lax.stop_gradient(scores) + bias
    picks = []
    for _ in range(shape.top_k):  # top-k by repeated argmax: a sort is slow on a GPU
        picks.append(choice.argmax(-1))
        choice = jnp.where(jnp.arange(shape.experts) == picks[-1][:, None], -jnp.inf, choice)
    chosen = jnp.stack(picks, -1)
    onehot = jax.nn.one_hot(chosen, shape.experts, dtype=jnp.float32)
    weights = jnp.einsum("te,tke->tk", scores, onehot)
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20) * shape.routed_scale
    return chosen, weights, onehot.mean((0, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=())
def _dispatch(x, token_of_slot, slot_of_pair):
    return x.at[token_of_slot].get(mode="fill", fill_value=0)


def _dispatch_forward(x, token_of_slot, slot_of_pair):
    return _dispatch(x, token_of_slot, slot_of_pair), slot_of_pair


def _dispatch_backward(slot_of_pair, grad):
    taken = grad.at[slot_of_pair].get(mode="fill", fill_value=0)  # [T, K, D]
    return taken.sum(1, dtype=jnp.float32).astype(grad.dtype), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _combine(y, weights, token_of_slot, slot_of_pair, pair_of_slot):
    taken = y.at[slot_of_pair].get(mode="fill", fill_value=0)
    return jnp.einsum("tkd,tk->td", taken.astype(jnp.float32), weights).astype(y.dtype)


def _combine_forward(y, weights, token_of_slot, slot_of_pair, pair_of_slot):
    out = _combine(y, weights, token_of_slot, slot_of_pair, pair_of_slot)
    return out, (y, weights, token_of_slot, slot_of_pair, pair_of_slot)


def _combine_backward(saved, grad):
    y, weights, token_of_slot, slot_of_pair, pair_of_slot = saved
    weight_of_slot = weights.reshape(-1).at[pair_of_slot].get(mode="fill", fill_value=0)
    grad_y = grad.at[token_of_slot].get(mode="fill", fill_value=0).astype(jnp.float32)
    grad_y = (grad_y * weight_of_slot[:, None]).astype(y.dtype)
    taken = y.at[slot_of_pair].get(mode="fill", fill_value=0)
    grad_w = jnp.einsum("tkd,td->tk", taken.astype(jnp.float32), grad.astype(jnp.float32))
    return grad_y, grad_w, None, None, None


_combine.defvjp(_combine_forward, _combine_backward)


def rank_within(flat, experts: int, block: int = 256):
    """Of each pair, how many earlier pairs chose the same expert. flat int32 [N] -> int32 [N].

    Counts inside blocks come from a product with a triangle of ones, exact in bfloat16 x float32.
    """
    padded = jnp.pad(flat, (0, -len(flat) % block), constant_values=experts)
    onehot = jax.nn.one_hot(padded.reshape(-1, block), experts, dtype=jnp.bfloat16)
    earlier = jnp.tril(jnp.ones((block, block), jnp.bfloat16), -1)
    inside = jnp.einsum("ij,bje->bie", earlier, onehot, preferred_element_type=jnp.float32)
    totals = onehot.sum(1, dtype=jnp.float32)
    before = jnp.cumsum(totals, 0) - totals
    rank = ((inside + before[:, None]) * onehot).sum(-1)
    return rank.reshape(-1)[: len(flat)].astype(jnp.int32)


def experts_by_capacity(x, chosen, weights, gate, up, down, capacity_factor: float):
    """x [T, D]; gate, up [E, F, D]; down [E, D, F] -> [T, D]. Tokens over capacity are dropped."""
    tokens, k = chosen.shape
    experts = gate.shape[0]
    capacity = -(-int(tokens * k / experts * capacity_factor) // 64) * 64
    flat = chosen.reshape(-1)
    rank = rank_within(flat, experts)
    slot_of_pair = jnp.where(rank < capacity, flat * capacity + rank, experts * capacity)
    pairs = tokens * k
    pair_of_slot = jnp.full(experts * capacity, pairs)
    pair_of_slot = pair_of_slot.at[slot_of_pair].set(
        jnp.arange(pairs), mode="drop", unique_indices=True
    )
    token_of_slot = jnp.where(pair_of_slot < pairs, pair_of_slot // k, tokens)
    slot_of_pair = slot_of_pair.reshape(tokens, k)

    xs = _dispatch(x, token_of_slot, slot_of_pair).reshape(experts, capacity, -1)
    gated = jnp.einsum("ecd,efd->ecf", xs, jnp.concatenate([gate, up], 1))
    g, u = jnp.split(gated, 2, -1)
    y = jnp.einsum("ecf,edf->ecd", jax.nn.silu(g) * u, down).reshape(experts * capacity, -1)
    return _combine(y, weights, token_of_slot, slot_of_pair, pair_of_slot)


def experts_exact(x, chosen, weights, gate, up, down):
    """The same without capacity: every expert on every token, unchosen ones weighted 0."""
    full = jnp.zeros((x.shape[0], gate.shape[0]), jnp.float32)
    full = full.at[jnp.arange(x.shape[0])[:, None], chosen].add(weights)
    g = jnp.einsum("td,efd->tef", x, gate)
    u = jnp.einsum("td,efd->tef", x, up)
    h = jax.nn.silu(g) * u * full[..., None].astype(x.dtype)
    return jnp.einsum("tef,edf->td", h, down)
