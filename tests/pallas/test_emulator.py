"""The machine that kernels are emulated on: what it computes, and what it refuses."""

import numpy as np
import pytest

from kimi_jax.pallas.stream import emulator


def run(program, buffers, *, blocks=1, warps=1, seed=0, shared=1024):
    emulator.run(
        program, buffers, shared_bytes=shared, num_blocks=blocks, num_warps=warps, seed=seed
    )


def bfloat16_pairs(values: np.ndarray) -> np.ndarray:
    """float32 [..., 2] of few bits -> int32 words."""
    halves = values.view(np.uint32) >> 16
    return (halves[..., 0] | halves[..., 1] << 16).astype(np.uint32).view(np.int32)


def test_mma_multiplies_in_the_fragments_of_the_instruction_set():
    """PTX ISA, 'Matrix Fragments for mma.m16n8k16 with floating point type'."""
    rng = np.random.default_rng(0)
    a = rng.integers(-8, 8, (16, 16)).astype(np.float32)
    b = rng.integers(-8, 8, (16, 8)).astype(np.float32)
    c = rng.integers(-8, 8, (16, 8)).astype(np.float32)
    g, t = np.divmod(np.arange(32), 4)
    pairs = 2 * t[:, None] + np.arange(2)
    left = [a[(g + 8 * (i % 2))[:, None], pairs + 8 * (i // 2)] for i in range(4)]
    right = [b[pairs + 8 * i, g[:, None]] for i in range(2)]
    start = [c[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)]
    out = {}

    def program(m):
        left_words, right_words = map(bfloat16_pairs, left), map(bfloat16_pairs, right)
        out["d"] = m.mma(start, list(left_words), list(right_words))

    run(program, {})
    for i in range(4):
        assert np.array_equal(out["d"][i], (a @ b + c)[g + 8 * (i // 2), 2 * t + i % 2])


def test_unpack_gives_codes_less_8_in_nibble_order():
    words = np.arange(32, dtype=np.int32) * 0x11111111 + 0x01234567
    out = {}
    run(lambda m: out.update(pairs=m.unpack(words)), {})
    for i in range(4):
        pair = out["pairs"][i].view(np.uint32)
        for half, nibble in ((pair << 16, i), (pair & 0xFFFF0000, i + 4)):
            code = (words.view(np.uint32) >> (4 * nibble)) & 15
            assert np.array_equal(half.view(np.float32), code - 8.0)


def fill(m, source_bytes: int, *, wait: bool) -> None:
    """Copies a buffer to shared memory and, waiting for it or not, on to `out`."""
    first = m.lane == 0
    m.mbarrier_init(512, 1, first)
    m.mbarrier_expect(512, source_bytes, first)
    m.copy(0, "source", 0, source_bytes, 512, first)
    if wait:
        m.mbarrier_wait(512, 0)
    m.store("out", m.lane * 4, m.load_shared(m.lane * 4))


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_has_landed_when_its_barrier_completes(seed):
    source = np.arange(32, dtype=np.float32)
    out = np.zeros(32, np.float32)
    run(lambda m: fill(m, 128, wait=True), {"source": source, "out": out}, seed=seed)
    assert np.array_equal(out, source)


def test_a_copy_that_nobody_waits_for_has_not_landed():
    out = np.zeros(32, np.float32)
    buffers = {"source": np.arange(32, dtype=np.float32), "out": out}
    with pytest.raises(AssertionError, match="still under way"):
        run(lambda m: fill(m, 128, wait=False), buffers)
    assert np.all(np.isnan(out))  # fresh shared memory is NaN


def test_bytes_that_never_come_are_a_deadlock():
    def program(m):
        m.mbarrier_init(512, 1, m.lane == 0)
        m.mbarrier_expect(512, 128, m.lane == 0)
        m.copy(0, "source", 0, 64, 512, m.lane == 0)
        m.mbarrier_wait(512, 0)

    with pytest.raises(emulator.Deadlock, match="block 0 warp 0: mbarrier 512"):
        run(program, {"source": np.zeros(32, np.float32)})


def test_a_named_barrier_lets_nobody_past_before_all_have_come():
    order = []

    def program(m):
        order.append("before")
        m.sync(5, 4 * 32)
        order.append("after")

    run(program, {}, warps=4)
    assert order == ["before"] * 4 + ["after"] * 4


def test_an_arrival_without_waiting_completes_a_named_barrier():
    order = []

    def program(m):
        if m.warp == 0:
            order.append("produced")
            m.arrive(6, 64)
        else:
            m.sync(6, 64)
            order.append("consumed")

    run(program, {}, warps=2)
    assert order == ["produced", "consumed"]


def test_a_barrier_over_the_grid_waits_for_every_block():
    order = []

    def program(m):
        order.append("before")
        m.add_int_release("counter", 0, 1, m.lane == 0)
        m.wait_reached("counter", 0, 3)
        order.append("after")

    run(program, {"counter": np.zeros(1, np.int32)}, blocks=3)
    assert order == ["before"] * 3 + ["after"] * 3


def test_one_block_that_does_not_arrive_is_a_deadlock():
    def program(m):
        m.add_int_release("counter", 0, 1, (m.lane == 0) & (m.cta > 0))
        m.wait_reached("counter", 0, 3)

    with pytest.raises(emulator.Deadlock, match=r"counter\[0\] >= 3"):
        run(program, {"counter": np.zeros(1, np.int32)}, blocks=3)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda m: m.load_shared(1024), "outside shared memory"),
        (lambda m: m.load_shared(8, 0, 4), "not aligned"),
        (lambda m: m.load("data", 128), "outside its buffer"),
        (lambda m: m.uniform(m.lane), "one value for the whole warp"),
        (lambda m: m.if_(m.lane == 3, lambda: None), "one value for the whole warp"),
    ],
)
def test_what_would_go_wrong_on_a_gpu_is_refused(program, message):
    with pytest.raises((AssertionError, IndexError), match=message):
        run(program, {"data": np.zeros(32, np.float32)})


def test_a_copy_needs_multiples_of_16_bytes():
    def program(m):
        m.mbarrier_init(512, 1, m.lane == 0)
        m.copy(0, "data", 8, 64, 512, m.lane == 0)

    with pytest.raises(AssertionError, match="not multiples of 16"):
        run(program, {"data": np.zeros(32, np.float32)})
