"""The instructions that kernels of this package are written in.

A persistent kernel with loads in flight across a grid-wide barrier is more than Pallas' GPU
interpreter can run: it executes one block after another and knows no inline code. So such a kernel
is one Python function over a `Machine`, with two implementations:

- `gpu.Gpu` emits MLIR inside one `plgpu.inline_mgpu` call of a `plgpu.kernel`: TMA bulk copies,
  mbarriers and mma.sync, which sm_90, sm_103 and sm_120 share;
- `emulator.run` executes the same function with NumPy, 32 lanes a value: every warp of every block
  at once, in a random order, with copies that land late, so that a missing wait gives wrong numbers
  (fresh shared memory is NaN) and a lost arrival a reported deadlock.

Values are int32, float32 or predicates; one that differs between the lanes of a warp is a vector of
32 in the emulator, one that does not is a plain number ("uniform"). Static configuration stays
Python. Integers in `//`, `%` and `>>` are non-negative; use `shr` for bit patterns. Addresses in
shared memory and offsets in buffers are bytes.

What only a GPU can show: memory ordering between blocks and between the generic and the
asynchronous proxy (the fences), lanes of a warp that run apart (`sync_warp`), alignment of copies
beyond 16 bytes, and rounding inside the tensor cores.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

Value = Any  # int32, float32 or predicate: a Python number, a NumPy array or a wrapped MLIR value
Carry = Sequence[Value]

WARP = 32


class Machine(Protocol):
    """One warp's view."""

    cta: Value  # uniform: index of the block
    warp: Value  # uniform: index of the warp in its block
    lane: Value  # 0..31

    # Control flow; conditions and bounds are uniform, carries flat lists of values.
    def for_(
        self, start: Value, stop: Value, body: Callable[..., Carry], carry: Carry = ()
    ) -> list[Value]: ...

    def while_(
        self, condition: Callable[..., Value], body: Callable[..., Carry], carry: Carry
    ) -> list[Value]: ...

    def if_(self, condition: Value, then: Callable[[], None]) -> None: ...

    # Integers and predicates.
    def select(self, condition: Value, a: Value, b: Value) -> Value: ...
    def minimum(self, a: Value, b: Value) -> Value: ...
    def shl(self, a: Value, bits: Value) -> Value: ...
    def shr(self, a: Value, bits: Value) -> Value: ...
    def popcount(self, a: Value) -> Value: ...
    def wide(self, a: Value) -> Value:
        """int64, for offsets beyond 2 GiB."""
        ...

    def uniform(self, a: Value) -> Value:
        """Asserts that all lanes hold the same value, and tells the compiler."""
        ...

    def shuffle_up(self, a: Value, distance: int) -> Value:
        """The value of lane - distance; a lane that has none keeps its own."""
        ...

    # Floats.
    def as_float(self, a: Value) -> Value: ...
    def zero(self) -> Value: ...
    def add(self, a: Value, b: Value) -> Value: ...
    def mul(self, a: Value, b: Value) -> Value: ...
    def fma(self, a: Value, b: Value, c: Value) -> Value: ...
    def silu(self, a: Value) -> Value: ...
    def unpack(self, word: Value) -> list[Value]:
        """Eight codes of a word -> four bfloat16 pairs of code - 8, exact: register i holds nibble
        i in its low and nibble i + 4 in its high half."""
        ...

    def mma(self, c: Sequence[Value] | None, a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
        """c + a b on the tensor cores (m16n8k16, bfloat16 in, float32 out).

        Lane 4 g + t holds: a0 = A[g, 2t:2t+2], a1 = A[g+8, same], a2 = A[g, 2t+8:2t+10], a3 =
        A[g+8, same]; b0 = B[2t:2t+2, g], b1 = B[2t+8:2t+10, g]; c0, c1 = C[g, 2t:2t+2], c2, c3 =
        C[g+8, same]. None: zeros.
        """
        ...

    # Shared memory, in words of 4 bytes.
    def load_shared(self, address: Value, offset: int = 0, words: int = 1) -> list[Value]: ...
    def store_shared(
        self, address: Value, values: Sequence[Value], where: Value | None = None
    ) -> None: ...

    def or_shared(self, address: Value, value: Value, where: Value) -> None:
        """Atomic."""
        ...

    # Global memory.
    def load(self, buffer: str, offset: Value) -> Value: ...
    def store(
        self, buffer: str, offset: Value, values: Sequence[Value], where: Value | None = None
    ) -> None: ...
    def store_bf16(self, buffer: str, offset: Value, value: Value, where: Value) -> None: ...
    def add_float(
        self, buffer: str, address: Value, value: Value, where: Value, offset: int = 0
    ) -> None:
        """At address + offset. Atomic, relaxed: one rounding in memory; in the order, if any, in
        which the callers are."""
        ...

    def add_int_release(self, buffer: str, offset: int, value: Value, where: Value) -> None: ...
    def load_acquire(self, buffer: str, offset: int) -> Value: ...
    def wait_reached(self, buffer: str, offset: int, target: Value) -> None:
        """Waits (acquire) until the int32 there is at least `target`, modulo 2**32."""
        ...

    # Barriers and copies.
    def sync_warp(self) -> None: ...
    def sync_block(self) -> None: ...
    def sync(self, barrier: Value, threads: int) -> None:
        """Named barrier (0..15): arrives and waits until `threads` threads have arrived."""
        ...

    def arrive(self, barrier: Value, threads: int) -> None:
        """Arrives at a named barrier without waiting."""
        ...

    def mbarrier_init(self, address: Value, arrivals: int, where: Value) -> None: ...
    def mbarrier_wait(self, address: Value, parity: Value) -> None:
        """Waits until the phase of this parity is complete (parity 1 of a fresh one is)."""
        ...

    def mbarrier_arrive(self, address: Value, where: Value) -> None: ...
    def mbarrier_expect(self, address: Value, num_bytes: Value, where: Value) -> None:
        """Arrives, and adds bytes that copies must bring before the phase completes."""
        ...

    def copy(
        self,
        target: Value,
        buffer: str,
        offset: Value,
        num_bytes: Value,
        mbarrier: Value,
        where: Value,
        *,
        stream: bool = False,
    ) -> None:
        """Bulk copy of global into shared memory, one per lane in `where`; sizes, offset and target
        are multiples of 16. `stream`: read once, evict first from L2."""
        ...

    def fence_mbarrier_init(self) -> None: ...
    def fence_async(self, space: Literal["shared", "global"]) -> None:
        """Orders ordinary accesses to that memory before it with copies (the asynchronous proxy)
        after it. For both at once an H200 waits for all of a warp's stores, about 1 us."""
        ...
