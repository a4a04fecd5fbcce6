"""`machine.Machine` as MLIR, inside one `plgpu.inline_mgpu` call with lane semantics.

Memory accesses are inline PTX with 32-bit shared addresses and constant offsets in the instruction:
what LLVM's own shared pointers would cost in 64-bit arithmetic is saved, and nothing moves across a
barrier, because all of it has side effects in LLVM's eyes (ptxas sees plain loads and stores and
schedules them freely between barriers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mosaic
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf

from kimi_jax.pallas.stream.machine import WARP

EVICT_FIRST = 0x12F0000000000000  # an L2 policy as createpolicy.fractional encodes it


class Val:
    """An MLIR value with the operators of `machine`: int32, int64, float32 or predicate."""

    __slots__ = ("ir",)

    def __init__(self, value: ir.Value) -> None:
        self.ir = value

    def __add__(self, other: Any) -> Val:
        return _binary(arith.addi, self, other)

    def __radd__(self, other: Any) -> Val:
        return _binary(arith.addi, other, self)

    def __sub__(self, other: Any) -> Val:
        return _binary(arith.subi, self, other)

    def __rsub__(self, other: Any) -> Val:
        return _binary(arith.subi, other, self)

    def __mul__(self, other: Any) -> Val:
        return _binary(arith.muli, self, other)

    def __rmul__(self, other: Any) -> Val:
        return _binary(arith.muli, other, self)

    def __floordiv__(self, other: Any) -> Val:
        return _binary(arith.divui, self, other)

    def __mod__(self, other: Any) -> Val:
        return _binary(arith.remui, self, other)

    def __rshift__(self, other: Any) -> Val:
        return _binary(arith.shrui, self, other)

    def __and__(self, other: Any) -> Val:
        return _binary(arith.andi, self, other)

    def __or__(self, other: Any) -> Val:
        return _binary(arith.ori, self, other)

    def __xor__(self, other: Any) -> Val:
        return _binary(arith.xori, self, other)

    def __lt__(self, other: Any) -> Val:
        return _compare("slt", self, other)

    def __le__(self, other: Any) -> Val:
        return _compare("sle", self, other)

    def __gt__(self, other: Any) -> Val:
        return _compare("sgt", self, other)

    def __ge__(self, other: Any) -> Val:
        return _compare("sge", self, other)

    def __eq__(self, other: Any) -> Val:  # type: ignore[override]
        return _compare("eq", self, other)

    def __ne__(self, other: Any) -> Val:  # type: ignore[override]
        return _compare("ne", self, other)

    __hash__ = None  # type: ignore[assignment]


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _constant(value: int | bool, kind: ir.Type) -> ir.Value:
    if isinstance(value, bool):
        return arith.constant(ir.IntegerType.get_signless(1), int(value))
    width = ir.IntegerType(kind).width
    value = int(value) & (2**width - 1)
    return arith.constant(kind, value - 2**width if value >> (width - 1) else value)


def _pair(a: Any, b: Any) -> tuple[ir.Value, ir.Value]:
    """Both as values of one type; int32 widens to int64 beside one."""
    kinds = [x.ir.type for x in (a, b) if isinstance(x, Val)]
    kind = next((k for k in kinds if k == _i64()), kinds[0])
    return _as(a, kind), _as(b, kind)


def _as(a: Any, kind: ir.Type) -> ir.Value:
    if not isinstance(a, Val):
        return _constant(a, kind)
    if a.ir.type != kind and kind == _i64():
        return arith.extsi(kind, a.ir)
    return a.ir


def _binary(operation: Callable[..., Any], a: Any, b: Any) -> Val:
    return Val(operation(*_pair(a, b)))


def _compare(relation: str, a: Any, b: Any) -> Val:
    return Val(arith.cmpi(getattr(arith.CmpIPredicate, relation), *_pair(a, b)))


def _int(a: Any) -> ir.Value:
    return _as(a, _i32())


def _ptx(
    text: str,
    *operands: ir.Value,
    result: ir.Type | Sequence[ir.Type] | None = None,
    where: Any = None,
    effects: bool = True,
    convergent: bool = False,
) -> Any:
    if where is None or where is True:
        predicate = None
    else:
        predicate = _as(where, ir.IntegerType.get_signless(1))
    return mosaic.inline_ptx(
        text,
        *operands,
        result_types=result,  # type: ignore[arg-type]
        predicate=predicate,  # type: ignore[arg-type]
        has_side_effects=effects,  # type: ignore[arg-type]
        convergent=convergent,
    )


class Gpu:
    """`Machine`; see there. `buffers` are the kernel's global arrays, `shared` its scratch."""

    def __init__(self, shared: ir.Value, buffers: Mapping[str, ir.Value]) -> None:
        thread = mosaic.thread_idx()
        self.cta = Val(arith.index_cast(_i32(), gpu.block_id(gpu.Dimension.x)))
        self.warp = Val(mosaic.warp_idx())
        self.lane = Val(arith.andi(thread, _constant(WARP - 1, _i32())))
        self._shared = llvm.ptrtoint(_i32(), mosaic.memref_ptr(shared))
        self._buffers = {
            name: Val(llvm.ptrtoint(_i64(), mosaic.memref_ptr(ref)))
            for name, ref in buffers.items()
        }

    # Control flow.
    def for_(
        self, start: Any, stop: Any, body: Callable[..., Sequence[Any]], carry: Sequence[Any] = ()
    ) -> list[Any]:
        loop = scf.ForOp(_int(start), _int(stop), _constant(1, _i32()), _raw(carry))
        with ir.InsertionPoint(loop.body):
            out = body(Val(loop.induction_variable), *map(Val, loop.inner_iter_args))
            scf.yield_(_raw(out))
        return [Val(v) for v in loop.results]

    def while_(
        self,
        condition: Callable[..., Any],
        body: Callable[..., Sequence[Any]],
        carry: Sequence[Any],
    ) -> list[Any]:
        initial = _raw(carry)
        types = [v.type for v in initial]
        loop = scf.WhileOp(types, initial)
        before = loop.before.blocks.append(*types)
        with ir.InsertionPoint(before):
            scf.condition(condition(*map(Val, before.arguments)).ir, list(before.arguments))
        after = loop.after.blocks.append(*types)
        with ir.InsertionPoint(after):
            scf.yield_(_raw(body(*map(Val, after.arguments))))
        return [Val(v) for v in loop.results]

    def if_(self, condition: Any, then: Callable[[], None]) -> None:
        if isinstance(condition, bool):
            if condition:
                then()
            return
        with mosaic.when(condition.ir):
            then()

    # Integers and predicates.
    def select(self, condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, bool):
            return a if condition else b
        if not isinstance(a, Val) and not isinstance(b, Val):
            a = Val(_int(a))
        return Val(arith.select(condition.ir, *_pair(a, b)))

    def minimum(self, a: Any, b: Any) -> Any:
        return _binary(arith.minsi, a, b)

    def shl(self, a: Any, bits: Any) -> Any:
        return Val(arith.shli(_int(a), _int(bits)))

    def shr(self, a: Any, bits: Any) -> Any:
        return Val(arith.shrui(_int(a), _int(bits)))

    def popcount(self, a: Any) -> Any:
        return Val(llvm.intr_ctpop(_int(a)))

    def wide(self, a: Any) -> Any:
        return Val(_as(Val(_int(a)), _i64()))

    def uniform(self, a: Any) -> Any:
        if not isinstance(a, Val):
            return a
        zero, mask = _constant(0, _i32()), _constant(-1, _i32())
        last = _constant(WARP - 1, _i32())
        return Val(nvvm.shfl_sync(mask, a.ir, zero, last, nvvm.ShflKind.idx))

    def shuffle_up(self, a: Any, distance: int) -> Any:
        mask, zero = _constant(-1, _i32()), _constant(0, _i32())
        return Val(nvvm.shfl_sync(mask, a.ir, _constant(distance, _i32()), zero, nvvm.ShflKind.up))

    # Floats. Rounding is spelt out, so that no multiplication and addition are contracted.
    def as_float(self, a: Any) -> Any:
        return Val(llvm.bitcast(_f32(), _int(a)))

    def zero(self) -> Any:
        return Val(arith.constant(_f32(), 0.0))

    def add(self, a: Any, b: Any) -> Any:
        return Val(_ptx("add.rn.f32 $0, $1, $2;", a.ir, b.ir, result=_f32(), effects=False))

    def mul(self, a: Any, b: Any) -> Any:
        return Val(_ptx("mul.rn.f32 $0, $1, $2;", a.ir, b.ir, result=_f32(), effects=False))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return Val(
            _ptx("fma.rn.f32 $0, $1, $2, $3;", a.ir, b.ir, c.ir, result=_f32(), effects=False)
        )

    def silu(self, a: Any) -> Any:
        log2e = Val(arith.constant(_f32(), -1.4426950408889634))
        one = Val(arith.constant(_f32(), 1.0))
        power = _ptx("ex2.approx.f32 $0, $1;", self.mul(a, log2e).ir, result=_f32(), effects=False)
        below = self.add(one, Val(power))
        inverse = _ptx("rcp.approx.f32 $0, $1;", below.ir, result=_f32(), effects=False)
        return self.mul(a, Val(inverse))

    def unpack(self, word: Any) -> list[Any]:
        out = []
        for i in range(4):
            shifted = word.ir if i == 0 else arith.shrui(word.ir, _constant(4 * i, _i32()))
            text = "lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea;"  # (a & b) | c: 128 + code
            offset = _ptx(text, shifted, result=_i32(), effects=False)
            text = "sub.rn.bf16x2 $0, $1, $2;"  # exact
            surplus = _constant(0x43084308, _i32())  # 128 + 8
            out.append(Val(_ptx(text, offset, surplus, result=_i32(), effects=False)))
        return out

    def mma(self, c: Any, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        c = [self.zero()] * 4 if c is None else c
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7},"
            " {$8,$9}, {$10,$11,$12,$13};"
        )
        operands = [_int(v) for v in (*a, *b)] + [v.ir for v in c]
        return [Val(v) for v in _ptx(text, *operands, result=[_f32()] * 4, effects=False)]

    # Shared memory.
    def _address(self, address: Any) -> ir.Value:
        return arith.addi(self._shared, _int(address))

    def load_shared(self, address: Any, offset: int = 0, words: int = 1) -> list[Any]:
        where = f"[${words}+{offset}]"
        if words == 1:
            text = f"ld.shared.b32 $0, {where};"
            return [Val(_ptx(text, self._address(address), result=_i32()))]
        names = ", ".join(f"${i}" for i in range(words))
        text = f"ld.shared.v{words}.b32 {{{names}}}, {where};"
        return [Val(v) for v in _ptx(text, self._address(address), result=[_i32()] * words)]

    def store_shared(self, address: Any, values: Sequence[Any], where: Any = None) -> None:
        self._store("shared", self._address(address), values, where)

    def _store(self, space: str, address: ir.Value, values: Sequence[Any], where: Any) -> None:
        raw = [v.ir if isinstance(v, Val) else _int(v) for v in values]
        raw = [v if v.type == _i32() else llvm.bitcast(_i32(), v) for v in raw]
        names = ", ".join(f"${i + 1}" for i in range(len(raw)))
        names, vector = (names, "") if len(raw) == 1 else (f"{{{names}}}", f".v{len(raw)}")
        _ptx(f"st.{space}{vector}.b32 [$0], {names};", address, *raw, where=where)

    def or_shared(self, address: Any, value: Any, where: Any) -> None:
        _ptx("red.shared.or.b32 [$0], $1;", self._address(address), _int(value), where=where)

    # Global memory.
    def _pointer(self, buffer: str, offset: Any) -> ir.Value:
        return (self._buffers[buffer] + offset).ir

    def load(self, buffer: str, offset: Any) -> Any:
        return Val(_ptx("ld.global.b32 $0, [$1];", self._pointer(buffer, offset), result=_i32()))

    def store(self, buffer: str, offset: Any, values: Sequence[Any], where: Any = None) -> None:
        self._store("global", self._pointer(buffer, offset), values, where)

    def store_bf16(self, buffer: str, offset: Any, value: Any, where: Any) -> None:
        half = ir.IntegerType.get_signless(16)
        bits = _ptx("cvt.rn.bf16.f32 $0, $1;", value.ir, result=half, effects=False)
        _ptx("st.global.b16 [$0], $1;", self._pointer(buffer, offset), bits, where=where)

    def add_float(self, buffer: str, address: Any, value: Any, where: Any, offset: int = 0) -> None:
        text = f"red.global.add.f32 [$0+{offset}], $1;"
        _ptx(text, self._pointer(buffer, address), value.ir, where=where)

    def add_int_release(self, buffer: str, offset: int, value: Any, where: Any) -> None:
        address = self._pointer(buffer, offset)
        _ptx("red.release.gpu.global.add.u32 [$0], $1;", address, _int(value), where=where)

    def load_acquire(self, buffer: str, offset: int) -> Any:
        address = self._pointer(buffer, offset)
        return Val(_ptx("ld.acquire.gpu.global.b32 $0, [$1];", address, result=_i32()))

    def wait_reached(self, buffer: str, offset: int, target: Any) -> None:
        self.while_(
            lambda value: (value - target) < 0,
            lambda value: [self.load_acquire(buffer, offset)],
            [self.load_acquire(buffer, offset)],
        )

    # Barriers and copies.
    def sync_warp(self) -> None:
        nvvm.bar_warp_sync(_constant(-1, _i32()))

    def sync_block(self) -> None:
        _ptx("bar.sync 0;", convergent=True)

    def sync(self, barrier: Any, threads: int) -> None:
        _ptx(f"bar.sync $0, {threads};", _int(barrier), convergent=True)

    def arrive(self, barrier: Any, threads: int) -> None:
        _ptx(f"bar.arrive $0, {threads};", _int(barrier), convergent=True)

    def mbarrier_init(self, address: Any, arrivals: int, where: Any) -> None:
        text = f"mbarrier.init.shared::cta.b64 [$0], {arrivals};"
        _ptx(text, self._address(address), where=where)

    def mbarrier_wait(self, address: Any, parity: Any) -> None:
        pointer = llvm.inttoptr(llvm.PointerType.get(3), self._address(address))
        ticks = _constant(10_000_000, _i32())
        nvvm.mbarrier_try_wait_parity(pointer, _int(parity), ticks)

    def mbarrier_arrive(self, address: Any, where: Any) -> None:
        _ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", self._address(address), where=where)

    def mbarrier_expect(self, address: Any, num_bytes: Any, where: Any) -> None:
        text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
        _ptx(text, self._address(address), _int(num_bytes), where=where)

    def copy(
        self,
        target: Any,
        buffer: str,
        offset: Any,
        num_bytes: Any,
        mbarrier: Any,
        where: Any,
        *,
        stream: bool = False,
    ) -> None:
        operands = [
            self._address(target),
            self._pointer(buffer, offset),
            _int(num_bytes),
            self._address(mbarrier),
        ]
        text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        if stream:
            operands.append(_constant(EVICT_FIRST, _i64()))
            text += ".L2::cache_hint [$0], [$1], $2, [$3], $4;"
        else:
            text += " [$0], [$1], $2, [$3];"
        _ptx(text, *operands, where=where)

    def fence_mbarrier_init(self) -> None:
        _ptx("fence.mbarrier_init.release.cluster;")

    def fence_async(self, space: str) -> None:
        _ptx(f"fence.proxy.async.{'shared::cta' if space == 'shared' else space};")


def _raw(values: Sequence[Any]) -> list[ir.Value]:
    return [v.ir if isinstance(v, Val) else _int(v) for v in values]
