"""Numerical policy shared by model, kernels' references and drafter."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


def einsum(spec: str, *operands: jax.Array) -> jax.Array:
    """jnp.einsum with float32 accumulation and result, whatever the operands' dtype.

    float32 operands are multiplied in full precision (GPUs would take TF32 by default, which is
    too coarse for a mode that serves as oracle).
    """
    exact = any(operand.dtype == jnp.float32 for operand in operands)
    return jnp.einsum(
        spec,
        *operands,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if exact else None,
    )


@struct.dataclass
class OnlineSoftmax:
    """A softmax-weighted sum, folded in block by block (arXiv 1805.02867), in float32.

    top, total [...]: running maximum and denominator of the scores' last axis; out [..., n].
    """

    top: jax.Array
    total: jax.Array
    out: jax.Array

    @classmethod
    def start(cls, shape: tuple[int, ...], width: int) -> "OnlineSoftmax":
        return cls(
            top=jnp.full(shape, -jnp.inf, jnp.float32),
            total=jnp.zeros(shape, jnp.float32),
            out=jnp.zeros((*shape, width), jnp.float32),
        )

    def fold(self, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> "OnlineSoftmax":
        """Adds a block: scores [..., t] (-inf = not visible); weigh(p [..., t]) sums p * values.

        A block without a visible score leaves the state as it is, bit for bit.
        """
        top = jnp.maximum(self.top, scores.max(axis=-1))
        shift = jnp.where(jnp.isneginf(top), 0.0, top)  # nothing seen yet: exp(-inf - 0) = 0
        probs = jnp.exp(scores - shift[..., None])
        keep = jnp.exp(self.top - shift)
        return OnlineSoftmax(
            top=top,
            total=self.total * keep + probs.sum(axis=-1),
            out=self.out * keep[..., None] + weigh(probs),
        )

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """(output [..., n], log-sum-exp [...]); nothing visible gives 0 and -inf."""
        seen = self.total > 0
        total = jnp.where(seen, self.total, 1.0)
        out = jnp.where(seen[..., None], self.out / total[..., None], 0.0)
        return out, jnp.where(seen, self.top + jnp.log(total), -jnp.inf)
