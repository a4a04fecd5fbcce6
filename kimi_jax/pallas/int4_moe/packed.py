"""Routed experts in the order in which the kernel streams them."""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from kimi_jax.pallas.stream import packing

COUNTER_WORDS = 32  # a cache line of its own


class Shapes(NamedTuple):
    """Of the arrays of `Packed`, one layer."""

    gate_up: tuple[int, ...]
    down: tuple[int, ...]
    counter: tuple[int, ...]


def shapes(*, experts: int, hidden: int, width: int) -> Shapes:
    """Of what `pack` makes of experts of this size."""
    hidden = packing.padded(hidden, packing.PAD_HIDDEN)
    width = packing.padded(width, packing.PAD_WIDTH)
    gate_up = experts, hidden // packing.UNIT_INPUTS, width // (packing.BLOCK // 2)
    down = experts, hidden // (4 * packing.BLOCK), width // packing.UNIT_INPUTS, 4
    return Shapes((*gate_up, packing.UNIT_WORDS), (*down, packing.UNIT_WORDS), (COUNTER_WORDS,))


@flax.struct.dataclass(kw_only=True)
class Packed:
    """Routed experts in the kernel's order (`stream.packing`); private to the kernel.

    gate_up int32 [E, D / 128, F / 8, 288], down int32 [E, D / 64, F / 128, 4, 288] (D and F
    padded), each with a leading axis [L] for a stack of layers. counter int32 [32]: the barrier
    over the grid, in memory of its own; the kernel changes it in place, behind XLA's back, to
    values that all mean the same (`program.LAUNCH_UNIT`), so that no launch has to clear it. One
    may serve many layers, but not two kernels at once.
    """

    gate_up: jax.Array
    down: jax.Array
    counter: jax.Array
    hidden: int = flax.struct.field(pytree_node=False)
    width: int = flax.struct.field(pytree_node=False)

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[-4]


def pack(
    gate_up_codes: jax.Array,
    gate_up_scales: jax.Array,
    down_codes: jax.Array,
    down_scales: jax.Array,
) -> Packed:
    """Canonical arrays of one layer (`api.routed_experts`) in the kernel's order, bit for bit."""
    return Packed(
        gate_up=packing.pack_gate_up(gate_up_codes, gate_up_scales),
        down=packing.pack_down(down_codes, down_scales),
        counter=jnp.zeros(COUNTER_WORDS, jnp.int32),
        hidden=down_codes.shape[1],
        width=gate_up_codes.shape[2],
    )


def unpack(packed: Packed) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The inverse of `pack`: gate_up codes and scales, down codes and scales."""
    sizes = dict(hidden=packed.hidden, width=packed.width)
    gate_up = packing.unpack_gate_up(packed.gate_up, **sizes)
    return *gate_up, *packing.unpack_down(packed.down, **sizes)
