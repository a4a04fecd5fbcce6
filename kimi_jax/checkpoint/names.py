"""Which tensor of a published checkpoint fills which part of which parameter.

Names are the checkpoint's without the `language_model.` prefix of the multimodal releases. Leaves
are paths in the trees of `model/weights.py` and `speculation/weights.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kimi_jax.config import DrafterConfig, ModelConfig

MODEL_PREFIX = "language_model."
DRAFTER_PREFIX = "model."

SKIPPED = ("vision_tower.", "mm_projector.")
"""Beginnings of names that a text engine leaves out: image encoder and projector."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Fills `leaf[index]` from a tensor: reshaped to `view`, cut by `select`, axes permuted."""

    leaf: str
    index: tuple[int | slice, ...] = ()
    view: tuple[int, ...] | None = None  # None: the shape of the part itself
    select: tuple[slice, ...] = ()
    axes: tuple[int, ...] | None = None

    @property
    def verbatim(self) -> bool:
        """Whether the part holds the tensor's elements in the tensor's order."""
        return not self.select and self.axes is None

    def start(self, shape: tuple[int, ...]) -> int:
        """Where in the leaf, in elements of its flat order, a part of these bytes begins.

        All parts are selected by leading indices, so they are runs of the flat order.
        """
        start = 0
        for axis, at in enumerate(self.index):
            first = at if isinstance(at, int) else at.indices(shape[axis])[0]
            start += first * math.prod(shape[axis + 1 :])
        return start

    def taken_from(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The part's values, of `shape`, as a view of the tensor's."""
        values = tensor.reshape(self.view or shape)[self.select]
        return values if self.axes is None else values.transpose(self.axes)

    def put_back(self, values: np.ndarray, tensor: np.ndarray) -> None:
        """The inverse of `taken_from`: writes the part's values to their places in the tensor."""
        if self.axes is not None:
            values = values.transpose(np.argsort(self.axes))
        tensor.reshape(self.view or values.shape)[self.select] = values


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a checkpoint must hold under one name, and where it goes."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # safetensors' names of the accepted dtypes
    parts: tuple[Part, ...] = ()
    value: tuple[int, ...] | None = None  # for a tensor that is checked, not stored
    optional: bool = False


def model_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Every tensor of a target checkpoint, by name."""
    c = config
    hidden, vocab = c.hidden_size, c.vocab_size
    tensors = {
        "model.embed_tokens.weight": _weight((vocab, hidden), "embed"),
        "model.norm.weight": _weight((hidden,), "norm"),
        "lm_head.weight": _weight((vocab, hidden), "lm_head"),
    }
    for i in range(c.num_hidden_layers):
        layer, leaf = f"model.layers.{i}.", f"layers.{i}."
        for name, end in [("input_norm", "input"), ("post_attention_norm", "post_attention")]:
            tensors[f"{layer}{end}_layernorm.weight"] = _weight((hidden,), leaf + name)
        tensors |= _attention(c, layer + "self_attn.", leaf + "attention.")
        mlp, leaf = layer + "mlp.", leaf + "mlp."
        if not c.is_moe(i):
            tensors |= _mlp(hidden, c.intermediate_size, mlp, leaf)
            continue
        tensors[mlp + "gate.weight"] = _weight((c.n_routed_experts, hidden), leaf + "router")
        tensors[mlp + "gate.e_score_correction_bias"] = Expected(
            shape=(c.n_routed_experts,), dtypes=("F32",), parts=(Part(leaf=leaf + "router_bias"),)
        )
        width = c.moe_intermediate_size * c.n_shared_experts
        tensors |= _mlp(hidden, width, mlp + "shared_experts.", leaf + "shared.")
        tensors.update(_experts(c, mlp + "experts.", leaf + "experts."))
    return tensors


def drafter_tensors(config: DrafterConfig) -> dict[str, Expected]:
    """Every tensor of a drafter checkpoint, by name."""
    c = config
    hidden, heads, kv, head = (
        *(c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim),
    )
    taps = len(c.target_layer_ids)
    by_tap = Part(leaf="fc", view=(hidden, taps, hidden), axes=(1, 0, 2))
    tensors = {
        "fc.weight": Expected(shape=(hidden, taps * hidden), dtypes=("BF16",), parts=(by_tap,)),
        "hidden_norm.weight": _weight((hidden,), "hidden_norm"),
        "norm.weight": _weight((hidden,), "norm"),
    }
    for i in range(c.num_hidden_layers):
        layer, leaf = f"layers.{i}.", f"layers.{i}."
        attention = layer + "self_attn."
        tensors |= {
            layer + "input_layernorm.weight": _weight((hidden,), leaf + "input_norm"),
            layer + "post_attention_layernorm.weight": _weight(
                (hidden,), leaf + "post_attention_norm"
            ),
            attention + "q_proj.weight": _weight((heads * head, hidden), leaf + "q"),
            attention + "k_proj.weight": _weight((kv * head, hidden), leaf + "k"),
            attention + "v_proj.weight": _weight((kv * head, hidden), leaf + "v"),
            attention + "o_proj.weight": _weight((hidden, heads * head), leaf + "o"),
            attention + "q_norm.weight": _weight((head,), leaf + "q_norm"),
            attention + "k_norm.weight": _weight((head,), leaf + "k_norm"),
        }
        tensors |= _mlp(hidden, c.intermediate_size, layer + "mlp.", leaf)
    return tensors


def _weight(shape: tuple[int, ...], leaf: str, *index: int | slice) -> Expected:
    return Expected(shape=shape, dtypes=("BF16",), parts=(Part(leaf=leaf, index=index),))


def _attention(c: ModelConfig, name: str, leaf: str) -> dict[str, Expected]:
    hidden, heads, q_rank, latent = (
        *(c.hidden_size, c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank),
    )
    nope, kv_head = c.qk_nope_head_dim, c.qk_nope_head_dim + c.v_head_dim
    per_head = (heads, kv_head, latent)
    everything = slice(None)
    kv_b = (
        Part(leaf=leaf + "w_uk", view=per_head, select=(everything, slice(None, nope))),
        Part(leaf=leaf + "w_uv", view=per_head, select=(everything, slice(nope, None))),
    )
    qkv_a = leaf + "qkv_a"
    return {
        name + "q_a_proj.weight": _weight((q_rank, hidden), qkv_a, slice(None, q_rank)),
        name + "kv_a_proj_with_mqa.weight": _weight(
            (c.cache_row, hidden), qkv_a, slice(q_rank, None)
        ),
        name + "q_a_layernorm.weight": _weight((q_rank,), leaf + "q_a_norm"),
        name + "kv_a_layernorm.weight": _weight((latent,), leaf + "kv_a_norm"),
        name + "q_b_proj.weight": _weight((heads * c.qk_head_dim, q_rank), leaf + "q_b"),
        name + "kv_b_proj.weight": Expected(
            shape=(heads * kv_head, latent), dtypes=("BF16",), parts=kv_b
        ),
        name + "o_proj.weight": _weight((hidden, heads * c.v_head_dim), leaf + "o"),
    }


def _mlp(hidden: int, width: int, name: str, leaf: str) -> dict[str, Expected]:
    return {
        name + "gate_proj.weight": _weight((width, hidden), leaf + "gate_up", 0),
        name + "up_proj.weight": _weight((width, hidden), leaf + "gate_up", 1),
        name + "down_proj.weight": _weight((hidden, width), leaf + "down"),
    }


def _experts(c: ModelConfig, name: str, leaf: str) -> Iterator[tuple[str, Expected]]:
    """Three tensors a matrix: int32 words of eight codes, scales, and the unpacked shape.

    The bytes of the little-endian words are the code bytes of `model/weights.py` as they stand.
    """
    hidden, width = c.hidden_size, c.moe_intermediate_size
    matrices = [
        ("gate_proj", "gate_up", (0,), (width, hidden)),
        ("up_proj", "gate_up", (1,), (width, hidden)),
        ("down_proj", "down", (), (hidden, width)),
    ]
    for matrix, stack, slot, (rows, columns) in matrices:
        for expert in range(c.n_routed_experts):
            start, index = f"{name}{expert}.{matrix}.weight_", (expert, *slot)
            yield (
                start + "packed",
                Expected(
                    shape=(rows, columns // 8),
                    dtypes=("I32",),
                    parts=(Part(leaf=f"{leaf}{stack}_codes", index=index),),
                ),
            )
            yield (
                start + "scale",
                Expected(
                    shape=(rows, columns // c.group_size),
                    dtypes=("BF16",),
                    parts=(Part(leaf=f"{leaf}{stack}_scales", index=index),),
                ),
            )
            # int32 in the published files, int64 from newer writers, absent from some.
            yield (
                start + "shape",
                Expected(shape=(2,), dtypes=("I32", "I64"), value=(rows, columns), optional=True),
            )
