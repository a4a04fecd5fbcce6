"""Which implementation each operation of the target runs on, and weights in the order it reads.

Checkpoints, plans and random weights know the published ("canonical") arrays; a kernel may have an
order of its own, made from them on the device, once, at load.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.config import ModelConfig
from kimi_jax.model.param import Codes, leaf
from kimi_jax.model.weights import DenseMLP, Experts, Weights
from kimi_jax.pallas.int4_moe import api as int4_moe
from kimi_jax.pallas.tree_mla import api as tree_mla
from kimi_jax.sharding.layout import Layout

type Request = Literal["auto", "reference", "mosaic"]
REQUESTS: tuple[Request, ...] = ("auto", "reference", "mosaic")


type Choice = Literal["reference", "mosaic"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """The implementation of each operation, as `choose` found it."""

    int4_moe: Choice = "reference"
    tree_mla: Choice = "reference"

    def __str__(self) -> str:
        return ", ".join(f"{name}: {how}" for name, how in dataclasses.asdict(self).items())


REFERENCE = Kernels()


def choose(
    request: Request,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    page_size: int,
    max_rows: int,
    layout: Layout,
) -> Kernels:
    """What will run on this process's devices.

    "auto" takes a kernel wherever it serves the device, the sizes and the dtype. page_size: tokens
    of a page on a device; max_rows: rows of a sequence in a step.

    Raises NotImplementedError, naming the reason, if "mosaic" can't be had for an operation:
    nothing falls back in silence.
    """
    return Kernels(
        int4_moe=int4_moe.choose(
            request,
            experts=config.n_routed_experts // layout.group("expert").size,
            hidden=config.hidden_size,
            width=config.moe_intermediate_size // layout.group("expert_width").size,
            dtype=dtype,
        ),
        tree_mla=tree_mla.choose(
            request,
            rank=config.kv_lora_rank,
            rope=config.qk_rope_head_dim,
            heads=config.num_attention_heads // layout.group("heads").size,
            page_size=page_size,
            max_rows=max_rows,
            dtype=dtype,
        ),
    )


def as_read(described: Weights, kernels: Kernels, layout: Layout) -> Weights:
    """Canonical tree of `Param` -> the tree of those that the kernels read."""
    parts = layout.group("expert_width").size
    return _with_experts(described, kernels, lambda experts: _packed(experts, parts))


def prepare(weights: Weights, described: Weights, kernels: Kernels, layout: Layout) -> Weights:
    """Weights as loaded, and their description -> as the kernels read them, on the same devices.

    Layer by layer: the canonical arrays of one are deleted before the next is made.
    """
    if kernels.int4_moe == "reference":
        return weights
    parts = layout.group("expert_width").size
    of_one = next((e for layer in described.layers if (e := _experts(layer))), None)
    if of_one is None:
        return weights
    specs = layout.specs(of_one), layout.specs(_packed(of_one, parts))
    program = jax.jit(layout.spmd(int4_moe.pack, specs[:1], specs[1]))  # one for all layers

    def convert(experts: Experts) -> Any:
        packed = jax.block_until_ready(program(experts))
        for array in jax.tree.leaves(experts):
            array.delete()
        return packed

    return _with_experts(weights, kernels, convert)


def _experts(layer: Any) -> Any:
    return None if isinstance(layer.mlp, DenseMLP) else layer.mlp.experts


def _with_experts(weights: Weights, kernels: Kernels, convert: Callable[[Experts], Any]) -> Weights:
    if kernels.int4_moe == "reference":
        return weights

    def layer(one: Any) -> Any:
        experts = _experts(one)
        if experts is None:
            return one
        return one.replace(mlp=one.mlp.replace(experts=convert(experts)))

    return dataclasses.replace(weights, layers=tuple(layer(one) for one in weights.layers))


def _packed(experts: Any, parts: int) -> Any:
    """`Experts` of `Param`, their width in `parts` parts -> `Packed` of `Param`."""
    count, hidden, half = experts.down_codes.shape
    shapes = int4_moe.packed_shapes(experts=count, hidden=hidden, width=2 * half // parts)

    def array(shape: tuple[int, ...], *axes: str) -> Any:
        sizes = (
            n * parts if axis == "expert_width" else n for n, axis in zip(shape, axes, strict=True)
        )
        return leaf(tuple(sizes), axes, jnp.int32, Codes())

    return int4_moe.Packed(
        gate_up=array(shapes.gate_up, "expert", "embed", "expert_width", "unit"),
        down=array(shapes.down, "expert", "embed", "expert_width", "block", "unit"),
        counter=array(shapes.counter, "unit"),
        hidden=hidden,
        width=2 * half // parts,
    )
