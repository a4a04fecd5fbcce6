"""The order in which kernels stream INT4 weights, and the way there and back.

Version 1. A unit is a block of 16 outputs x 128 inputs: 288 int32 words, 1152 bytes, in the order
in which the lanes of a warp feed it to m16n8k16 (`machine.Machine.mma`):

- words 0..255, the codes: word 128 half + 4 lane + 2 group + step holds, for lane = 4 g + t, the
  eight codes of a lane for one step of 16 inputs. Nibble i + 4 hi is output g + 8 (i % 2), input
  64 half + 32 group + 8 t + 4 step + 2 (i // 2) + hi. So each lane takes 8 successive inputs of
  every group of 32, which activations in their natural order have in 16 successive bytes;
- words 256..287, the scales: word 256 + 4 g + group of 32 holds the bfloat16 bits of output g (low
  half) and g + 8 (high half).

Codes stay offset binary (q + 8) as published. The arrays:

- gate and up: int32 [E, D / 128, F / 8, 288]; block b holds outputs 8 b .. 8 b + 7 of gate, then
  the same of up, so that SwiGLU finds both in one lane;
- down: int32 [E, D / 64, F / 128, 4, 288]: 64 outputs, in four blocks of 16, side by side.

D is padded to a multiple of 256 and F to one of 128, with scale 0 and code 8 (zero); `unpack_*` cut
the padding off. Only bits are moved: NaN scales survive both ways. A tensor- or expert-parallel
part is a part of the canonical arrays, packed where it lives.
"""

import jax
import jax.numpy as jnp
from jax import lax

VERSION = 1

GROUP = 32
BLOCK = 16  # outputs of a unit
UNIT_INPUTS = 128
UNIT_WORDS = 288
UNIT_BYTES = 4 * UNIT_WORDS
CODE_WORDS = 256
PAD_HIDDEN = 256
PAD_WIDTH = 128

ZERO_CODES = 0x88  # two codes of value 0


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pack_gate_up(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """uint8 [E, 2, F, D / 2], bfloat16 [E, 2, F, D / 32] -> int32 [E, D / 128, F / 8, 288]."""
    width, hidden = codes.shape[2], 2 * codes.shape[3]
    padding = padded(width, PAD_WIDTH) - width, padded(hidden, PAD_HIDDEN) - hidden

    def one(expert: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows = (_interleave(_pad(part, *padding, value)) for part, value in _with_zeros(expert))
        return _units(*rows).swapaxes(0, 1)

    return lax.map(one, (codes, _bits(scales)))


def unpack_gate_up(packed: jax.Array, *, hidden: int, width: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack_gate_up`."""

    def one(expert: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scales = (_separate(rows) for rows in _rows(expert.swapaxes(0, 1)))
        return codes[:, :width, : hidden // 2], scales[:, :width, : hidden // GROUP]

    codes, scales = lax.map(one, packed)
    return codes, lax.bitcast_convert_type(scales, jnp.bfloat16)


def pack_down(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """uint8 [E, D, F / 2], bfloat16 [E, D, F / 32] -> int32 [E, D / 64, F / 128, 4, 288]."""
    hidden, width = codes.shape[1], 2 * codes.shape[2]
    padding = padded(hidden, PAD_HIDDEN) - hidden, padded(width, PAD_WIDTH) - width

    def one(expert: tuple[jax.Array, jax.Array]) -> jax.Array:
        units = _units(*(_pad(part, *padding, value) for part, value in _with_zeros(expert)))
        return units.reshape(-1, 4, *units.shape[1:]).swapaxes(1, 2)

    return lax.map(one, (codes, _bits(scales)))


def unpack_down(packed: jax.Array, *, hidden: int, width: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack_down`."""

    def one(expert: jax.Array) -> tuple[jax.Array, jax.Array]:
        units = expert.swapaxes(1, 2)
        codes, scales = _rows(units.reshape(-1, *units.shape[2:]))
        return codes[:hidden, : width // 2], scales[:hidden, : width // GROUP]

    codes, scales = lax.map(one, packed)
    return codes, lax.bitcast_convert_type(scales, jnp.bfloat16)


def _bits(scales: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(scales, jnp.uint16)


def _with_zeros(expert: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, int], ...]:
    codes, scales = expert
    return (codes, ZERO_CODES), (scales, 0)


def _pad(part: jax.Array, outputs: int, inputs: int, value: int) -> jax.Array:
    """Codes [..., N, K / 2] or scales [..., N, K / 32], padded; `inputs` counts columns."""
    per_byte = 2 if part.dtype == jnp.uint8 else GROUP
    widths = [(0, 0)] * (part.ndim - 2) + [(0, outputs), (0, inputs // per_byte)]
    return jnp.pad(part, widths, constant_values=value)


def _interleave(part: jax.Array) -> jax.Array:
    """[2, F, n] -> [2 F, n]: eight outputs of gate, the same eight of up, and so on."""
    return part.reshape(2, -1, 8, part.shape[-1]).swapaxes(0, 1).reshape(-1, part.shape[-1])


def _separate(rows: jax.Array) -> jax.Array:
    """The inverse of `_interleave`."""
    return rows.reshape(-1, 2, 8, rows.shape[-1]).swapaxes(0, 1).reshape(2, -1, rows.shape[-1])


def _units(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """uint8 [N, K / 2], uint16 [N, K / 32] -> int32 [N / 16, K / 128, 288]."""
    # block, row half, g | unit, half, group, t, step, input pair: one byte is one input pair
    pairs = codes.reshape(-1, 2, 8, codes.shape[1] // 64, 2, 2, 4, 2, 2).astype(jnp.uint32)
    pairs = (pairs & 15) | ((pairs >> 4) << 16)
    nibbles = [pairs[:, i % 2, ..., i // 2] << (4 * i) for i in range(4)]
    words = nibbles[0] | nibbles[1] | nibbles[2] | nibbles[3]
    words = words.transpose(0, 2, 3, 1, 5, 4, 6)  # block, unit, half, g, t, group, step
    marks = scales.reshape(-1, 2, 8, scales.shape[1] // 4, 4).astype(jnp.uint32)
    marks = (marks[:, 0] | (marks[:, 1] << 16)).swapaxes(1, 2)  # block, unit, g, group
    shape = words.shape[:2]
    flat = jnp.concatenate([words.reshape(*shape, -1), marks.reshape(*shape, -1)], axis=-1)
    return lax.bitcast_convert_type(flat, jnp.int32)


def _rows(units: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `_units`."""
    blocks, count = units.shape[:2]
    flat = lax.bitcast_convert_type(units, jnp.uint32)
    words = flat[..., :CODE_WORDS].reshape(blocks, count, 2, 8, 4, 2, 2)
    words = words.transpose(0, 3, 1, 2, 5, 4, 6)  # block, g, unit, half, group, t, step
    nibbles = [(words >> (4 * i)) & 0x000F000F for i in range(4)]
    pairs = [(n & 15) | ((n >> 16) << 4) for n in nibbles]
    halves = [jnp.stack([pairs[row], pairs[row + 2]], axis=-1) for row in range(2)]
    codes = jnp.stack(halves, axis=1).astype(jnp.uint8)
    marks = flat[..., CODE_WORDS:].reshape(blocks, count, 8, 4).swapaxes(1, 2)
    scales = jnp.stack([marks & 0xFFFF, marks >> 16], axis=1).astype(jnp.uint16)
    return codes.reshape(blocks * BLOCK, -1), scales.reshape(blocks * BLOCK, -1)
