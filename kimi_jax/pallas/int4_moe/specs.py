"""Shapes and cases that tests and benchmarks share, and the exact answer to a case."""

import dataclasses

import ml_dtypes
import numpy as np

from kimi_jax.pallas.int4_moe.reference import GROUP

BF16 = ml_dtypes.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The experts of one layer on one device.

    experts, hidden and width of them; choices of each row, among `routed_over` experts, of which
    ids 0 .. experts - 1 are here (None: all are).
    """

    name: str
    experts: int
    hidden: int = 7168
    width: int = 2048
    choices: int = 8
    routed_over: int | None = None

    def expert_bytes(self) -> int:
        """Codes and scales of one expert, as published."""
        return 3 * self.hidden * self.width // 2 + 3 * self.hidden * self.width // GROUP * 2


TP8 = Spec(name="TP8 slice", experts=384, width=256)  # every expert, an eighth of its width
EP8 = Spec(name="EP8 shapes", experts=48)  # an eighth of the experts, every choice among them
EP8_RANK = Spec(name="EP8 rank", experts=48, routed_over=384)  # as an expert-parallel device has it
REAL = (TP8, EP8, EP8_RANK)
OTHER_REAL = (  # what other meshes make of the model
    Spec(name="TP4 slice", experts=384, width=512),
    Spec(name="TP2 EP4", experts=96, width=1024),
    Spec(name="EP4", experts=96, routed_over=384),
)

TINY = Spec(name="tiny-k2", experts=16, hidden=256, width=256, choices=2)  # the bundled model
TINY_TP8 = dataclasses.replace(TINY, name="tiny-k2, width / 8", width=32)
AWKWARD = (
    Spec(name="all padding", experts=3, hidden=96, width=32, choices=3),
    Spec(name="odd sizes", experts=5, hidden=288, width=160, choices=2),
    Spec(name="one expert", experts=1, hidden=256, width=128, choices=1),
    Spec(name="four slices of K", experts=4, hidden=512, width=128, choices=4),
    Spec(name="two units of down", experts=7, hidden=256, width=640, choices=2, routed_over=40),
)

ROWS = (1, 4, 9, 17, 33, 64, 128)  # what the benchmark times


@dataclasses.dataclass(kw_only=True)
class Case:
    """Inputs of `api.routed_experts` as NumPy arrays; it is a `Canonical` too."""

    x: np.ndarray  # bfloat16 [M, D]
    ids: np.ndarray  # int32 [M, K]
    weights: np.ndarray  # float32 [M, K]
    gate_up_codes: np.ndarray
    gate_up_scales: np.ndarray
    down_codes: np.ndarray
    down_scales: np.ndarray

    @property
    def experts(self) -> int:
        return len(self.down_codes)


def draw(
    spec: Spec, rows: int, rng: np.random.Generator, *, scales: tuple[float, float] | None = None
) -> Case:
    """Random codes, rows and choices. scales: range, log-uniform; None: such that a product of
    normal rows is about normal."""

    def matrix(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
        size = *shape[:-1], shape[-1] // GROUP
        if scales is None:
            values = rng.uniform(0.5, 1.5, size) * 0.2 * shape[-1] ** -0.5
        else:
            low, high = np.log(scales)
            values = np.exp(rng.uniform(low, high, size))
        return codes, values.astype(BF16)

    gate_up = matrix(spec.experts, 2, spec.width, spec.hidden)
    down = matrix(spec.experts, spec.hidden, spec.width)
    return Case(
        x=rng.standard_normal((rows, spec.hidden)).astype(BF16),
        ids=route(spec, rows, rng),
        weights=rng.uniform(0.1, 1.0, (rows, spec.choices)).astype(np.float32),
        gate_up_codes=gate_up[0],
        gate_up_scales=gate_up[1],
        down_codes=down[0],
        down_scales=down[1],
    )


def route(spec: Spec, rows: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [M, K]: distinct experts a row, evenly; -1 where one is on another device."""
    among = spec.routed_over or spec.experts
    ids = rng.random((rows, among)).argsort(axis=1)[:, : spec.choices].astype(np.int32)
    return np.where(ids < spec.experts, ids, -1).astype(np.int32)


def dequantised(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 weights, exactly."""
    values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return (values - 8.0) * np.repeat(scales.astype(np.float64), GROUP, axis=-1)


def exact(case: Case) -> np.ndarray:
    """float64 [M, D]: the definition of `api.routed_experts`, row by row."""
    x = case.x.astype(np.float64)
    out = np.zeros(x.shape)
    for row, (ids, weights) in enumerate(zip(case.ids, case.weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < case.experts:
                gate, up = (
                    dequantised(case.gate_up_codes[expert, part], case.gate_up_scales[expert, part])
                    @ x[row]
                    for part in range(2)
                )
                down = dequantised(case.down_codes[expert], case.down_scales[expert])
                out[row] += weight * (down @ (gate / (1 + np.exp(-gate)) * up))
    return out
