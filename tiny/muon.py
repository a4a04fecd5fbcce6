"""Muon for hidden matrices, Adam for the rest.

Muon: momentum, then five Newton-Schulz steps towards the nearest orthogonal matrix (Jordan et al.
2024), update scaled by 0.2 * sqrt(max(rows, columns)) and decoupled weight decay (Moonlight, Liu
et al. 2025), so that one learning rate serves both optimisers.
"""

import jax
import jax.numpy as jnp

BETA_MUON = 0.95
BETAS_ADAM = (0.9, 0.95)


def orthogonalized(g):
    """[..., rows, columns] -> the same shape, singular values near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.astype(jnp.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = jnp.swapaxes(x, -1, -2)
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), (-2, -1), keepdims=True))
    x = x / (norm + 1e-7).astype(jnp.bfloat16)
    for _ in range(5):
        xx = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * xx + c * (xx @ xx)) @ x
    return jnp.swapaxes(x, -1, -2) if tall else x


def init(params: dict) -> dict:
    first, second = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return {"m": first, "v": second, "count": jnp.zeros((), jnp.int32)}


def update(grads, state, params, *, muon: set[str], lr, adam_lr, decay: float, clip: float = 1.0):
    """One step over a flat dict; names in `muon` use Muon. -> params, state, gradient norm."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads.values()))
    shrink = jnp.minimum(1.0, clip / (norm + 1e-6))
    count = state["count"] + 1
    t = count.astype(jnp.float32)
    b1, b2 = BETAS_ADAM
    new_p, new_m, new_v = {}, {}, {}
    for name, p in params.items():
        g = grads[name] * shrink
        m, v = state["m"][name], state["v"][name]
        if name in muon:
            m = BETA_MUON * m + g
            step = orthogonalized(g + BETA_MUON * m).astype(jnp.float32)
            step = step * (0.2 * max(p.shape[-2:]) ** 0.5)
            p = p * (1 - lr * decay) - lr * step
        else:
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            p = p - adam_lr * (m / (1 - b1**t)) / (jnp.sqrt(v / (1 - b2**t)) + 1e-10)
        new_p[name], new_m[name], new_v[name] = p, m, v
    return new_p, {"m": new_m, "v": new_v, "count": count}, norm
