"""The kernels' order of INT4 weights: documented, reversible bit for bit, cut like the original."""

import jax
import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.pallas.stream import packing

# Experts, width, hidden; few, because each is compiled.
shapes = st.sampled_from([(1, 32, 32), (2, 128, 256), (3, 160, 96), (1, 96, 288)])
seeds = st.integers(0, 2**32 - 1)
pack_gate_up, pack_down = jax.jit(packing.pack_gate_up), jax.jit(packing.pack_down)
unpack_gate_up = jax.jit(packing.unpack_gate_up, static_argnames=("hidden", "width"))
unpack_down = jax.jit(packing.unpack_down, static_argnames=("hidden", "width"))


def gate_up(rng: np.random.Generator, experts: int, width: int, hidden: int):
    codes = rng.integers(0, 256, (experts, 2, width, hidden // 2), dtype=np.uint8)
    return codes, any_scales(rng, experts, 2, width, hidden // 32)


def down(rng: np.random.Generator, experts: int, width: int, hidden: int):
    codes = rng.integers(0, 256, (experts, hidden, width // 2), dtype=np.uint8)
    return codes, any_scales(rng, experts, hidden, width // 32)


def any_scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Any bits at all: NaN payloads, infinities and denormals among them."""
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(ml_dtypes.bfloat16)


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@settings(max_examples=20)
@given(seed=seeds, shape=shapes)
def test_packing_is_undone_bit_for_bit(seed, shape):
    rng = np.random.default_rng(seed)
    experts, width, hidden = shape
    for draw, pack, unpack in (
        (gate_up, pack_gate_up, unpack_gate_up),
        (down, pack_down, unpack_down),
    ):
        codes, scales = draw(rng, experts, width, hidden)
        again = unpack(pack(codes, scales), hidden=hidden, width=width)
        assert same_bits(again[0], codes) and same_bits(again[1], scales)


@settings(max_examples=10)
@given(seed=seeds)
def test_unpacking_is_undone_bit_for_bit(seed):
    """Without padding every word is free, so the order is one to one."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, (2, 2, 32, 288), dtype=np.uint32).view(np.int32)
    assert same_bits(pack_gate_up(*unpack_gate_up(words, hidden=256, width=256)), words)
    words = rng.integers(0, 1 << 32, (2, 4, 2, 4, 288), dtype=np.uint32).view(np.int32)
    assert same_bits(pack_down(*unpack_down(words, hidden=256, width=256)), words)


def unit_by_description(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """288 words of 16 outputs x 128 inputs, word by word as the module describes them."""
    values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(16, 128)
    bits = scales.view(np.uint16)
    words = np.zeros(288, np.uint32)
    for half in range(2):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for group in range(2):
                for step in range(2):
                    for i in range(4):
                        for hi in range(2):
                            output = g + 8 * (i % 2)
                            column = 64 * half + 32 * group + 8 * t + 4 * step + 2 * (i // 2) + hi
                            words[128 * half + 4 * lane + 2 * group + step] |= np.uint32(
                                int(values[output, column]) << (4 * (i + 4 * hi))
                            )
    for g in range(8):
        for group in range(4):
            words[256 + 4 * g + group] = int(bits[g, group]) | int(bits[g + 8, group]) << 16
    return words.view(np.int32)


def test_gate_and_up_lie_as_described():
    codes, scales = gate_up(np.random.default_rng(1), 2, 128, 256)
    packed = np.asarray(pack_gate_up(codes, scales))
    assert packed.shape == (2, 2, 16, 288)
    for expert, unit, block in ((0, 0, 0), (1, 1, 15), (1, 0, 6)):
        outputs = slice(8 * block, 8 * block + 8)
        both = codes[expert, :, outputs, 64 * unit : 64 * unit + 64].reshape(16, 64)
        marks = scales[expert, :, outputs, 4 * unit : 4 * unit + 4].reshape(16, 4)
        assert same_bits(packed[expert, unit, block], unit_by_description(both, marks))


def test_down_lies_as_described():
    codes, scales = down(np.random.default_rng(2), 2, 256, 256)
    packed = np.asarray(pack_down(codes, scales))
    assert packed.shape == (2, 4, 2, 4, 288)
    for expert, tile, unit, block in ((0, 0, 0, 0), (1, 3, 1, 2), (0, 2, 0, 3)):
        outputs = slice(64 * tile + 16 * block, 64 * tile + 16 * block + 16)
        part = np.ascontiguousarray(codes[expert, outputs, 64 * unit : 64 * unit + 64])
        marks = np.ascontiguousarray(scales[expert, outputs, 4 * unit : 4 * unit + 4])
        assert same_bits(packed[expert, tile, unit, block], unit_by_description(part, marks))


def test_padding_has_the_value_zero():
    codes, scales = gate_up(np.random.default_rng(3), 1, 32, 32)
    all_codes, all_scales = unpack_gate_up(pack_gate_up(codes, scales), hidden=256, width=128)
    assert np.all(np.asarray(all_codes)[:, :, 32:] == 0x88)
    assert np.all(np.asarray(all_codes)[..., 16:] == 0x88)
    assert not np.any(np.asarray(all_scales).view(np.uint16)[:, :, 32:])
    assert not np.any(np.asarray(all_scales).view(np.uint16)[..., 1:])


def test_a_device_packs_its_part_as_the_part_of_the_whole():
    """Tensor parallelism cuts the width, expert parallelism the experts."""
    rng = np.random.default_rng(4)
    codes, scales = gate_up(rng, 2, 256, 256)
    whole = pack_gate_up(codes, scales)
    assert same_bits(pack_gate_up(codes[1:], scales[1:]), whole[1:])
    part = slice(128, 256)
    assert same_bits(pack_gate_up(codes[:, :, part], scales[:, :, part]), whole[:, :, 16:])
    codes, scales = down(rng, 2, 256, 256)
    whole = pack_down(codes, scales)
    assert same_bits(pack_down(codes[..., 64:], scales[..., 4:]), whole[:, :, 1:])
