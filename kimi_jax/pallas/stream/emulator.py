"""Runs a kernel of `machine.Machine` on the CPU: all warps of all blocks at once, with NumPy.

Each warp is a thread; one runs at a time, until it has to wait. The next one, and the moment at
which a copy lands, are drawn at random (`seed`). Slow and exact: for small shapes.
"""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kimi_jax.pallas.stream.machine import WARP

_LANES = np.arange(WARP, dtype=np.int32)
_NIBBLES = np.arange(0, 16, 4, dtype=np.uint32)[:, None]
_INTEGERS = np.arange(-8, 8, dtype=np.float32).view(np.uint32) >> 16  # as bfloat16


class Deadlock(RuntimeError):
    """Every warp waits, and no copy is under way."""


def run(
    program: Callable[["Warp"], None],
    buffers: Mapping[str, np.ndarray],
    *,
    shared_bytes: int,
    num_blocks: int,
    num_warps: int,
    seed: int = 0,
) -> None:
    """Executes `program(machine)` once per warp; arrays of `buffers` that it writes change."""
    _Scheduler(program, buffers, shared_bytes, num_blocks, num_warps, seed).run()


class _Stopped(BaseException):
    """Unwinds the other warps once one has failed."""


class _Block:
    def __init__(self, shared_bytes: int) -> None:
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)  # NaN, and no valid index
        self.mbarriers: dict[int, _Mbarrier] = {}
        self.named: dict[int, _Named] = {}


class _Mbarrier:
    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.pending, self.bytes, self.phase = arrivals, arrivals, 0, 0

    def settle(self) -> None:
        if self.pending < 0:
            raise AssertionError("more arrivals at an mbarrier than it was made for")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals


class _Named:
    def __init__(self) -> None:
        self.threads, self.arrived, self.phase = 0, 0, 0

    def arrive(self, threads: int) -> int:
        """The phase that this arrival belongs to."""
        assert self.threads in (0, threads), "a named barrier is used with one count at a time"
        phase = self.phase
        self.threads, self.arrived = threads, self.arrived + WARP
        if self.arrived == threads:
            self.threads, self.arrived, self.phase = 0, 0, phase + 1
        return phase


class _Scheduler:
    def __init__(self, program, buffers, shared_bytes, num_blocks, num_warps, seed) -> None:
        self.random = random.Random(seed)
        self.buffers = {name: _bytes_of(array) for name, array in buffers.items()}
        self.copies: list[Callable[[], None]] = []
        self.back = threading.Semaphore(0)
        self.failure: BaseException | None = None
        blocks = [_Block(shared_bytes) for _ in range(num_blocks)]
        self.warps = [
            Warp(self, block, cta, warp, num_warps)
            for cta, block in enumerate(blocks)
            for warp in range(num_warps)
        ]
        self.program = program

    def run(self) -> None:
        threads = [threading.Thread(target=self._thread, args=(w,)) for w in self.warps]
        for thread in threads:
            thread.start()
        while self.failure is None:
            waiting = [w for w in self.warps if not w.done]
            if not waiting:
                break
            ready = [w for w in waiting if w.ready()]
            if self.copies and (not ready or self.random.random() < 0.5):
                self.copies.pop(self.random.randrange(len(self.copies)))()
            elif ready:
                warp = self.random.choice(ready)
                warp.resume.release()
                self.back.acquire()
            else:
                where = ", ".join(f"block {w.cta} warp {w.warp}: {w.why}" for w in waiting)
                self.failure = Deadlock(where)
        for warp in self.warps:
            warp.stopped = True
            warp.resume.release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        if self.copies:
            raise AssertionError("copies were still under way when the kernel ended")

    def _thread(self, warp: "Warp") -> None:
        try:
            warp.pause(lambda: True, "start")
            with np.errstate(all="ignore"):  # a GPU computes with NaN and infinity in silence
                self.program(warp)
        except _Stopped:
            return
        except BaseException as error:  # handed to the caller
            self.failure = error
        warp.done = True
        self.back.release()


def _bytes_of(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise ValueError(f"buffers must be contiguous, got strides {array.strides}")
    return array.reshape(-1).view(np.uint8)


class Warp:
    """`Machine` for one warp; uniform integers are Python numbers, others arrays of 32 lanes."""

    def __init__(self, scheduler: _Scheduler, block: _Block, cta: int, warp: int, count: int):
        self.cta, self.warp, self.lane = cta, warp, _LANES
        self._num_warps = count
        self._scheduler, self._block = scheduler, block
        self.resume = threading.Semaphore(0)
        self.done = self.stopped = False
        self.ready: Callable[[], bool] = lambda: True
        self.why = ""

    def pause(self, ready: Callable[[], bool], why: str) -> None:
        """Lets others run until `ready()`."""
        self.ready, self.why = ready, why
        if why != "start":
            self._scheduler.back.release()
        self.resume.acquire()
        if self.stopped:
            raise _Stopped

    # Control flow.
    def for_(self, start, stop, body, carry=()):
        for i in range(_uniform(start), _uniform(stop)):
            carry = body(i, *carry)
        return list(carry)

    def while_(self, condition, body, carry):
        while _uniform(condition(*carry)):
            carry = body(*carry)
        return list(carry)

    def if_(self, condition, then):
        if _uniform(condition):
            then()

    # Integers and predicates.
    def select(self, condition, a, b):
        if isinstance(condition, (bool, np.bool_)):
            return a if condition else b
        return np.where(condition, a, b).astype(np.result_type(_typed(a), _typed(b)))

    def minimum(self, a, b):
        return self.select(a < b, a, b)

    def shl(self, a, bits):
        return _signed(_unsigned(a) << np.uint32(bits) if _scalar(bits) else _lanes_shl(a, bits))

    def shr(self, a, bits):
        return _signed(_unsigned(a) >> (np.uint32(bits) if _scalar(bits) else _unsigned(bits)))

    def popcount(self, a):
        return np.bitwise_count(_unsigned(a)).astype(np.int32)

    def wide(self, a):
        return int(a) if _scalar(a) else a.astype(np.int64)

    def uniform(self, a):
        return _uniform(a)

    def shuffle_up(self, a, distance):
        return np.concatenate([a[:distance], a[:-distance]])

    # Floats.
    def as_float(self, a):
        return _vector(a, np.int32).view(np.float32)

    def zero(self):
        return np.zeros(WARP, np.float32)

    def add(self, a, b):
        return a + b

    def mul(self, a, b):
        return a * b

    def fma(self, a, b, c):
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def silu(self, a):
        return a / (np.float32(1.0) + np.exp(-a))

    def unpack(self, word):
        codes = (word.view(np.uint32) >> _NIBBLES) & np.uint32(0x000F000F)
        return list((_INTEGERS[codes & 15] | (_INTEGERS[codes >> 16] << 16)).view(np.int32))

    def mma(self, c, a, b):
        left = _halves(a).reshape(2, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(16, 16)
        right = _halves(b).reshape(2, 8, 4, 2).transpose(0, 2, 3, 1).reshape(16, 8)
        # Exact in float64 for inputs within 2**30 of each other, hence the same in any order.
        product = (left @ right).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, WARP)
        return list((product if c is None else product + np.array(c)).astype(np.float32))

    # Shared memory.
    def load_shared(self, address, offset=0, words=1):
        memory = self._block.shared.view(np.int32)
        index = self._index(address + offset, words, len(memory))
        if _scalar(address):
            return [int(memory[index + i]) for i in range(words)]
        return [memory[index + i] for i in range(words)]

    def store_shared(self, address, values, where=None):
        memory = self._block.shared.view(np.int32)
        lanes = _mask(where)
        index = self._index(_vector(address, np.int32)[lanes], len(values), len(memory))
        for i, value in enumerate(values):
            memory[index + i] = _bits(value)[lanes]

    def or_shared(self, address, value, where):
        memory = self._block.shared.view(np.int32)
        lanes = _mask(where)
        index = self._index(_vector(address, np.int32)[lanes], 1, len(memory))
        np.bitwise_or.at(memory, index, _vector(value, np.int32)[lanes])

    def _index(self, address, words, limit):
        low, high = _bounds(address)
        if low < 0 or high + 4 * words > 4 * limit:
            raise IndexError(f"outside shared memory: {address}")
        if _any_bits(address, 4 * words - 1):
            raise AssertionError(f"an access of {words} words is not aligned: {address}")
        return address // 4

    # Global memory.
    def load(self, buffer, offset):
        words = self._scheduler.buffers[buffer].view(np.int32)
        value = words[_checked(offset, 4, len(words) * 4)]
        return int(value) if _scalar(offset) else value

    def store(self, buffer, offset, values, where=None):
        words = self._scheduler.buffers[buffer].view(np.int32)
        lanes = _mask(where)
        index = _checked(_vector(offset, np.int64)[lanes], 4 * len(values), len(words) * 4)
        for i, value in enumerate(values):
            words[index + i] = _bits(value)[lanes]

    def store_bf16(self, buffer, offset, value, where):
        lanes = _mask(where)
        bits = value.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        halves = self._scheduler.buffers[buffer].view(np.uint16)
        index = _checked(_vector(offset, np.int64)[lanes], 2, len(halves) * 2)
        halves[index] = rounded[lanes].astype(np.uint16)

    def add_float(self, buffer, address, value, where, offset=0):
        lanes = _mask(where)
        words = self._scheduler.buffers[buffer].view(np.float32)
        index = _checked(_vector(address, np.int64)[lanes] + offset, 4, len(words) * 4)
        np.add.at(words, index, value[lanes])

    def add_int_release(self, buffer, offset, value, where):
        words = self._scheduler.buffers[buffer].view(np.uint32)
        total = int(words[offset // 4]) + int(value) * int(_mask(where).sum())
        words[offset // 4] = total % 2**32

    def load_acquire(self, buffer, offset):
        return int(self._scheduler.buffers[buffer].view(np.int32)[offset // 4])

    def wait_reached(self, buffer, offset, target):
        def reached() -> bool:
            ahead = (self.load_acquire(buffer, offset) - target) % 2**32
            return ahead < 2**31

        self.pause(reached, f"{buffer}[{offset}] >= {target}")

    # Barriers and copies.
    def sync_warp(self):
        pass

    def sync_block(self):
        self.sync(0, WARP * self._num_warps)

    def sync(self, barrier, threads):
        named = self._block.named.setdefault(_uniform(barrier), _Named())
        phase = named.arrive(threads)
        self.pause(lambda: named.phase > phase, f"named barrier {barrier}")

    def arrive(self, barrier, threads):
        self._block.named.setdefault(_uniform(barrier), _Named()).arrive(threads)

    def mbarrier_init(self, address, arrivals, where):
        for at in _vector(address, np.int32)[_mask(where)].tolist():
            if at % 8:
                raise AssertionError(f"mbarrier at {at}: not a multiple of 8")
            self._block.mbarriers[at] = _Mbarrier(arrivals)

    def mbarrier_wait(self, address, parity):
        mbarrier, parity = self._block.mbarriers[_uniform(address)], _uniform(parity)
        self.pause(
            lambda: mbarrier.phase % 2 != parity,
            f"mbarrier {address} (phase {mbarrier.phase}, parity {parity})",
        )

    def mbarrier_arrive(self, address, where):
        mbarrier = self._block.mbarriers[_uniform(address)]
        mbarrier.pending -= int(_mask(where).sum())
        mbarrier.settle()

    def mbarrier_expect(self, address, num_bytes, where):
        mbarrier = self._block.mbarriers[_uniform(address)]
        lanes = _mask(where)
        mbarrier.bytes += int(_vector(num_bytes, np.int64)[lanes].sum())
        mbarrier.pending -= int(lanes.sum())
        mbarrier.settle()

    def copy(self, target, buffer, offset, num_bytes, mbarrier, where, *, stream=False):
        source, shared = self._scheduler.buffers[buffer], self._block.shared
        barrier = self._block.mbarriers[_uniform(mbarrier)]
        for lane in np.flatnonzero(_mask(where)):
            to, at, size = (
                int(_vector(value, np.int64)[lane]) for value in (target, offset, num_bytes)
            )
            if to % 16 or at % 16 or size % 16 or size <= 0:
                raise AssertionError(f"copy of {size} bytes from {at} to {to}: not multiples of 16")
            if at + size > len(source) or to + size > len(shared) or at < 0 or to < 0:
                raise IndexError(f"copy of {size} bytes from {buffer}[{at}] to {to}: outside")

            def land(to: int = to, at: int = at, size: int = size) -> None:
                shared[to : to + size] = source[at : at + size]
                barrier.bytes -= size
                barrier.settle()

            self._scheduler.copies.append(land)

    def fence_mbarrier_init(self):
        pass

    def fence_async(self, space):
        pass


def _scalar(a: Any) -> bool:
    return not isinstance(a, np.ndarray)


def _uniform(a: Any) -> Any:
    if isinstance(a, np.ndarray):
        if a.size != WARP or np.any(a != a[0]):
            raise AssertionError(f"expected one value for the whole warp, got {a}")
        a = a[0].item()
    return a


def _vector(a: Any, dtype: Any) -> np.ndarray:
    if isinstance(a, np.ndarray):
        return a
    return np.full(WARP, np.int64(a)).astype(dtype)


def _typed(a: Any) -> np.ndarray:
    return a if isinstance(a, np.ndarray) else np.asarray(a, np.int32)


def _mask(where: Any) -> np.ndarray:
    if where is None:
        return np.ones(WARP, bool)
    return where if isinstance(where, np.ndarray) else np.full(WARP, bool(where))


def _unsigned(a: Any) -> np.ndarray:
    return _vector(a, np.int32).view(np.uint32)


def _signed(a: np.ndarray) -> np.ndarray:
    return a.astype(np.uint32).view(np.int32)


def _lanes_shl(a: Any, bits: np.ndarray) -> np.ndarray:
    return _unsigned(a) << _unsigned(bits)


def _bits(value: Any) -> np.ndarray:
    return _vector(value, np.int32).view(np.int32)


def _halves(words: Sequence[Any]) -> np.ndarray:
    """float64 [words, lane, 2]: the two bfloat16 of each word, low half first."""
    bits = np.empty((len(words), WARP), np.int32)
    for i, word in enumerate(words):
        bits[i] = word
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _bounds(address: Any) -> tuple[int, int]:
    if _scalar(address):
        return address, address
    return (int(address.min()), int(address.max())) if address.size else (0, 0)


def _any_bits(address: Any, mask: int) -> bool:
    return bool(address & mask) if _scalar(address) else bool((address & mask).any())


def _checked(offset: Any, size: int, limit: int) -> Any:
    """Index of the first element of an access of `size` bytes, in elements of min(size, 4)."""
    low, high = _bounds(offset)
    if low < 0 or (high + size > limit and not (np.ndim(offset) and np.size(offset) == 0)):
        raise IndexError(f"access of {size} bytes outside its buffer: {offset}")
    if _any_bits(offset, size - 1):
        raise AssertionError(f"an access of {size} bytes is not aligned: {offset}")
    return offset // min(size, 4)
