"""Model and drafter configurations: frozen, read once from a Hugging Face `config.json`.

Everything that changes the arithmetic is read here, and a value that the engine does not implement is refused by
name: a checkpoint that would run but compute something else must never get past this file.

Public names: `ModelConfig`, `DrafterConfig`, `YarnConfig`, `PRESETS`, `DRAFTER_PRESETS`, `to_hf`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Source = str | os.PathLike[str] | Mapping[str, Any]


GROUP_SIZE = 32
"""Input columns that share one scale in the published INT4 experts."""

SPECIAL_TOKENS = 256
"""Ids that the Kimi tokenizers reserve at the end of the vocabulary; the first of them is `[BOS]`."""


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN scaling of the rotary frequencies (Peng et al. 2023, as in the DeepSeek-V3 reference code)."""

    factor: float  # how many times longer than the original context
    beta_fast: float  # rotations within the original context above which a frequency is left alone
    beta_slow: float  # rotations below which a frequency is fully interpolated
    mscale: float  # attention temperature put on cos and sin, relative to mscale_all_dim
    mscale_all_dim: float  # attention temperature put on the softmax scale (squared)
    original_max_position_embeddings: int  # context length before scaling, in tokens

    def __post_init__(self) -> None:
        _positive(self, "factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
        if self.factor < 1:
            raise ValueError(f"rope_scaling: factor={self.factor!r} is below 1")

    def temperature(self, mscale: float) -> float:
        """0.1 * mscale * ln(factor) + 1, or 1 when nothing is scaled."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def amplitude(self) -> float:
        """Multiplier of cos and sin: 1.0 whenever mscale == mscale_all_dim."""
        return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The text model of a Kimi K2 checkpoint. Sizes are counts of elements; letters are the glossary's."""

    hidden_size: int  # D, width of the residual stream
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    q_lora_rank: int  # Q, rank of the query projection
    kv_lora_rank: int  # R, width of the cached latent
    qk_nope_head_dim: int  # NOPE, part of a query/key head without position
    qk_rope_head_dim: int  # PE, rotated part; the key's is shared by all heads
    v_head_dim: int  # V
    intermediate_size: int  # width of a dense layer's MLP
    moe_intermediate_size: int  # F, width of one routed expert
    first_k_dense_replace: int  # layers 0 .. this-1 have a dense MLP, the others experts
    n_routed_experts: int  # E
    num_experts_per_tok: int  # K, routed experts that a token uses
    n_shared_experts: int  # shared experts, fused into one MLP of width F * n_shared_experts
    norm_topk_prob: bool  # whether the K routing weights are normalised to sum to 1
    routed_scaling_factor: float  # multiplies the routed sum; the shared expert is not scaled
    rms_norm_eps: float  # epsilon of every norm but the two latent ones
    latent_norm_eps: float = (
        1e-6  # epsilon of q_a and kv_a norms: 1e-6 in transformers, 1e-5 in vLLM and SGLang
    )
    vocab_size: int  # VOCAB
    max_position_embeddings: int  # longest context, in tokens
    rope_theta: float  # base of the rotary frequencies
    rope_scaling: YarnConfig | None  # None: plain rotary embedding
    group_size: int = GROUP_SIZE  # G, expert weights that share a scale, along the input dimension
    bos_token_id: int  # [BOS]; the chat template does not emit it
    eos_token_ids: tuple[int, ...]  # stop ids, ascending; see `_stop_ids` for the rule
    pad_token_id: int  # filler for unused places; never read by a live row

    def __post_init__(self) -> None:
        _positive(
            self,
            *(
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "q_lora_rank",
                "kv_lora_rank",
            ),
            *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size"),
            *(
                "moe_intermediate_size",
                "n_routed_experts",
                "num_experts_per_tok",
                "n_shared_experts",
            ),
            *("routed_scaling_factor", "rms_norm_eps", "latent_norm_eps", "vocab_size"),
            *("max_position_embeddings", "rope_theta", "group_size"),
        )
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace={self.first_k_dense_replace} lies outside 0..num_hidden_layers"
                f" ({self.num_hidden_layers})"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds n_routed_experts={self.n_routed_experts}"
            )
        if self.group_size != GROUP_SIZE:
            raise ValueError(
                f"group_size={self.group_size} is not supported; supported: {GROUP_SIZE}"
            )
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(self, name) % self.group_size:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not a multiple of the quantization group ({self.group_size})"
                )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd; rotary needs pairs")
        if not self.eos_token_ids:
            raise ValueError(
                "eos_token_ids is empty: generation would never stop; name at least one id"
            )
        for name, value in [
            ("bos_token_id", self.bos_token_id),
            ("pad_token_id", self.pad_token_id),
            *(("eos_token_ids", i) for i in self.eos_token_ids),
        ]:
            if not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"{name}: id {value} lies outside the vocabulary of {self.vocab_size}"
                )

    @classmethod
    def from_hf(cls, source: Source) -> ModelConfig:
        """Reads a published configuration.

        Args:
            source: a checkpoint folder, the path of its `config.json`, or the parsed dictionary. The outer form
                (`kimi_k25` with a `text_config`) and the bare text form (`kimi_k2`, `deepseek_v3`) are both read.
                From a folder, `generation_config.json` contributes its end-of-sequence ids.

        Raises:
            ValueError: a required field is missing, or a field has a value that this engine does not implement.
                The message names the field, the value and what is supported.
            FileNotFoundError: there is no `config.json`.
        """
        data, generation, where = _load(source)
        outer = _Fields(data, where)
        outer.fixed("model_type", "kimi_k25", "kimi_k2", "deepseek_v3", required=True)
        if data["model_type"] == "kimi_k25":
            if not isinstance(data.get("text_config"), Mapping):
                raise outer.missing("text_config")
            text = _Fields(data["text_config"], f"{where}: text_config")
            text.fixed("model_type", "kimi_k2", "deepseek_v3")
            levels = [outer, text]
        else:
            text = outer
            levels = [outer]
        for level in levels:
            level.fixed("tie_word_embeddings", False)
        _check_fixed_text_fields(text)
        _check_quantization(
            levels, has_experts=text.int("first_k_dense_replace") < text.int("num_hidden_layers")
        )
        text.fixed("num_key_value_heads", text.int("num_attention_heads"))
        rope_theta, rope_scaling, _ = _rope(text)

        vocab_size = text.int("vocab_size")
        bos = _first_id(levels, "bos_token_id")
        stop_ids = _stop_ids(
            [*(level.data for level in levels), generation], bos, vocab_size, where
        )
        pad = _first_id(levels, "pad_token_id", default=stop_ids[-1])
        with text.prefixed():
            return cls(
                hidden_size=text.int("hidden_size"),
                num_hidden_layers=text.int("num_hidden_layers"),
                num_attention_heads=text.int("num_attention_heads"),
                q_lora_rank=text.int("q_lora_rank"),
                kv_lora_rank=text.int("kv_lora_rank"),
                qk_nope_head_dim=text.int("qk_nope_head_dim"),
                qk_rope_head_dim=text.int("qk_rope_head_dim"),
                v_head_dim=text.int("v_head_dim"),
                intermediate_size=text.int("intermediate_size"),
                moe_intermediate_size=text.int("moe_intermediate_size"),
                first_k_dense_replace=text.int("first_k_dense_replace"),
                n_routed_experts=text.int("n_routed_experts"),
                num_experts_per_tok=text.int("num_experts_per_tok"),
                n_shared_experts=text.int("n_shared_experts"),
                norm_topk_prob=text.bool("norm_topk_prob"),
                routed_scaling_factor=text.float("routed_scaling_factor"),
                rms_norm_eps=text.float("rms_norm_eps"),
                latent_norm_eps=text.float("latent_norm_eps", default=1e-6),
                vocab_size=vocab_size,
                max_position_embeddings=text.int("max_position_embeddings"),
                rope_theta=rope_theta,
                rope_scaling=rope_scaling,
                bos_token_id=bos,
                eos_token_ids=stop_ids,
                pad_token_id=pad,
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: NOPE + PE."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_row(self) -> int:
        """Values cached per token and layer: R + PE."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Multiplier of q.k before the softmax: (NOPE + PE)^-0.5 times YaRN's temperature squared."""
        scale = self.qk_head_dim**-0.5
        if self.rope_scaling is not None:
            scale *= self.rope_scaling.temperature(self.rope_scaling.mscale_all_dim) ** 2
        return scale

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_hidden_layers - self.first_k_dense_replace

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has routed experts (else a dense MLP)."""
        return layer >= self.first_k_dense_replace


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A DFlash drafter: a Qwen3-shaped decoder over the target's features, without embedding or head of its own."""

    hidden_size: int  # D, equal to the target's
    num_hidden_layers: int  # layers of the drafter
    num_attention_heads: int  # query heads
    num_key_value_heads: int  # KV, key/value heads; divides the query heads
    head_dim: int  # HD
    intermediate_size: int  # I, width of the MLP
    rms_norm_eps: float  # epsilon of every norm
    vocab_size: int  # equal to the target's, whose embedding and head are used
    block_size: int  # anchor + masks
    mask_token_id: int  # id whose target embedding fills the mask slots
    target_layer_ids: tuple[
        int, ...
    ]  # taps: 0-based target layers whose OUTPUT feeds `fc`, in fc's column order
    layer_types: tuple[str, ...]  # one per drafter layer
    sliding_window: (
        int | None
    )  # tokens that a sliding layer sees, itself included; None without such layers
    rope_theta: float  # base of the rotary frequencies, half-split order over the whole head
    rope_scaling: YarnConfig | None  # None: plain rotary embedding
    yarn_amplitude: float = (
        1.0  # multiplier of cos and sin, 1.0 or 1.41589 by engine: measure acceptance
    )
    sliding_causal: bool = (
        False  # whether a sliding layer is causal inside the block: measure acceptance
    )
    max_position_embeddings: int  # longest context, in tokens

    def __post_init__(self) -> None:
        _positive(
            self,
            *(
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
            ),
            *("intermediate_size", "rms_norm_eps", "vocab_size", "rope_theta", "yarn_amplitude"),
            "max_position_embeddings",
        )
        if self.block_size < 2:
            raise ValueError(
                f"block_size={self.block_size}: a block holds the anchor and at least one mask"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} lies outside the vocabulary of {self.vocab_size}"
            )
        if not self.target_layer_ids or len(set(self.target_layer_ids)) != len(
            self.target_layer_ids
        ):
            raise ValueError(
                f"target_layer_ids={list(self.target_layer_ids)}: expected one or more distinct layers"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of"
                f" num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary needs pairs")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}"
            )
        for kind in self.layer_types:
            if kind not in ("sliding_attention", "full_attention"):
                raise ValueError(
                    f"layer_types: {kind!r} is not supported; supported: 'sliding_attention', 'full_attention'"
                )
        if "sliding_attention" in self.layer_types and not (self.sliding_window or 0) > 0:
            raise ValueError(
                f"sliding_window={self.sliding_window!r}: layer_types has sliding layers, which need a window in tokens"
            )

    @classmethod
    def from_hf(
        cls,
        source: Source,
        *,
        yarn_amplitude: float | None = None,
        sliding_causal: bool | None = None,
    ) -> DrafterConfig:
        """Reads a drafter's published configuration.

        `target_layer_ids`, `block_size` and `mask_token_id` stand at the top level or in `dflash_config`, and are
        required: a guess may have the right shape and still draft badly, which nothing else would notice.

        Args:
            source: a drafter folder, the path of its `config.json`, or the parsed dictionary.
            yarn_amplitude: overrides the multiplier of cos and sin. By default what transformers would use:
                `attention_factor` if there is one, else 1.0 when mscale and mscale_all_dim are equal.
            sliding_causal: overrides whether sliding layers are causal inside the block. By default `is_causal`
                if the configuration has it, else False.

        Raises:
            ValueError: a required field is missing, or a field has a value that this engine does not implement.
            FileNotFoundError: there is no `config.json`.
        """
        data, _, where = _load(source)
        nested = data.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise ValueError(f"{where}: dflash_config={nested!r} is not an object")
        top = _Fields(data, where)
        top.fixed("model_type", "qwen3", "dflash")
        top.fixed("hidden_act", "silu", required=True)
        top.fixed("attention_bias", False)
        top.fixed("mlp_bias", False)
        dflash = _merge_dflash(top, _Fields(nested, f"{where}: dflash_config"))
        dflash.fixed("input_embedding_scale", None, 1)
        dflash.fixed("output_multiplier", None, 1)
        dflash.fixed("final_logit_softcapping", None)
        rope_theta, rope_scaling, amplitude = _rope(top, drafter=True)
        layers = top.int("num_hidden_layers")
        kinds = data.get("layer_types")
        if kinds is None:
            top.fixed("use_sliding_window", None, False)
            kinds = ["full_attention"] * layers
        if sliding_causal is None:
            sliding_causal = dflash.bool("is_causal", default=False)
        with top.prefixed():
            return cls(
                hidden_size=top.int("hidden_size"),
                num_hidden_layers=layers,
                num_attention_heads=top.int("num_attention_heads"),
                num_key_value_heads=top.int("num_key_value_heads"),
                head_dim=top.int("head_dim"),
                intermediate_size=top.int("intermediate_size"),
                rms_norm_eps=top.float("rms_norm_eps"),
                vocab_size=top.int("vocab_size"),
                block_size=dflash.int("block_size"),
                mask_token_id=dflash.int("mask_token_id"),
                target_layer_ids=dflash.ints("target_layer_ids"),
                layer_types=tuple(kinds),
                sliding_window=top.int("sliding_window") if "sliding_attention" in kinds else None,
                rope_theta=rope_theta,
                rope_scaling=rope_scaling,
                yarn_amplitude=amplitude if yarn_amplitude is None else yarn_amplitude,
                sliding_causal=sliding_causal,
                max_position_embeddings=top.int("max_position_embeddings"),
            )

    @property
    def depth(self) -> int:
        """DEPTH, tokens drafted per block: every slot but the anchor's."""
        return self.block_size - 1

    def check_against(self, target: ModelConfig) -> None:
        """Raises ValueError, naming the field, unless this drafter fits `target`."""
        for name in ("hidden_size", "vocab_size"):
            if getattr(self, name) != getattr(target, name):
                raise ValueError(
                    f"the drafter's {name}={getattr(self, name)} differs from the target's {getattr(target, name)};"
                    " use the drafter that was trained for this target"
                )
        outside = [i for i in self.target_layer_ids if not 0 <= i < target.num_hidden_layers]
        if outside:
            raise ValueError(
                f"target_layer_ids={list(self.target_layer_ids)}: {outside} lie outside the target's layers"
                f" 0..{target.num_hidden_layers - 1}; use the drafter that was trained for this target"
            )


def to_hf(config: ModelConfig | DrafterConfig) -> dict[str, Any]:
    """The `config.json` of `config` in the published form; `from_hf` of it gives an equal configuration."""
    return _model_to_hf(config) if isinstance(config, ModelConfig) else _drafter_to_hf(config)


def _model_to_hf(config: ModelConfig) -> dict[str, Any]:
    same = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank"),
        *(
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "intermediate_size",
            "moe_intermediate_size",
        ),
        *("first_k_dense_replace", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
        *(
            "norm_topk_prob",
            "routed_scaling_factor",
            "rms_norm_eps",
            "latent_norm_eps",
            "vocab_size",
        ),
        *("max_position_embeddings", "rope_theta", "bos_token_id", "pad_token_id"),
    )
    # The chat end token is the one that published configurations name; the other follows from the family's rule.
    eos = [
        i
        for i in config.eos_token_ids
        if i not in _family_stop_ids(config.bos_token_id, config.vocab_size)
    ]
    eos = eos or [config.eos_token_ids[-1]]
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": config.pad_token_id,
    }
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **{name: getattr(config, name) for name in same},
        **ids,
        "num_key_value_heads": config.num_attention_heads,
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "rope_scaling": _yarn_to_hf(config.rope_scaling),
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": config.group_size,
                        "dynamic": False,
                        "actorder": None,
                        "block_structure": None,
                        "observer": "minmax",
                        "observer_kwargs": {},
                    },
                }
            },
        },
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **ids,
        "text_config": text,
    }


def _drafter_to_hf(config: DrafterConfig) -> dict[str, Any]:
    same = (
        *(
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ),
        *(
            "intermediate_size",
            "rms_norm_eps",
            "vocab_size",
            "block_size",
            "sliding_window",
            "rope_theta",
        ),
        "max_position_embeddings",
    )
    rope = _yarn_to_hf(config.rope_scaling)
    if rope is not None:
        rope["attention_factor"] = config.yarn_amplitude
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        **{name: getattr(config, name) for name in same},
        "layer_types": list(config.layer_types),
        "rope_scaling": rope,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "is_causal": config.sliding_causal,
        },
    }


def _yarn_to_hf(yarn: YarnConfig | None) -> dict[str, Any] | None:
    return None if yarn is None else {"type": "yarn", **vars(yarn)}


def _load(source: Source) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """(config, generation config or {}, how messages name the config)."""
    if isinstance(source, Mapping):
        return source, {}, "config"
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a checkpoint folder holds a config.json")
    generation = path.parent / "generation_config.json"
    return _read_json(path), _read_json(generation) if generation.is_file() else {}, str(path)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); incomplete download?") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


_NO_DEFAULT: Any = object()


class _Fields:
    """Typed access to a JSON object, with messages that name the object, the field and the value."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def missing(self, name: str) -> ValueError:
        return ValueError(f"{self.where}: required field {name!r} is missing")

    def unsupported(self, name: str, supported: Sequence[Any]) -> ValueError:
        listed = ", ".join(json.dumps(value) for value in supported)
        return ValueError(
            f"{self.where}: {name}={json.dumps(self.data[name])} is not supported; supported: {listed}"
        )

    def fixed(self, name: str, *supported: Any, required: bool = False) -> None:
        """Refuses a value of `name` other than `supported`; absence is fine unless `required`."""
        if name not in self.data:
            if required:
                raise self.missing(name)
            return
        value = self.data[name]
        # bool is an int in Python; `attention_bias: 0` would be odd but harmless, `n_group: true` is a mistake.
        if not any(
            value == s and isinstance(value, bool) == isinstance(s, bool) for s in supported
        ):
            raise self.unsupported(name, supported)

    def known(self, *names: str) -> None:
        """Refuses keys other than `names`."""
        unknown = sorted(set(self.data) - set(names))
        if unknown:
            raise ValueError(
                f"{self.where}: unknown field {unknown[0]!r} ({json.dumps(self.data[unknown[0]])});"
                f" supported: {', '.join(names)}"
            )

    def _get(self, name: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.data.get(name)
        if value is None:
            if default is _NO_DEFAULT:
                raise self.missing(name)
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{self.where}: {name}={json.dumps(value)} is not {expected}")
        return value

    def int(self, name: str, default: Any = _NO_DEFAULT) -> int:
        return self._get(name, default, (int,), "an integer")

    def float(self, name: str, default: Any = _NO_DEFAULT) -> float:
        return float(self._get(name, default, (int, float), "a number"))

    def bool(self, name: str, default: Any = _NO_DEFAULT) -> bool:
        return self._get(name, default, (bool,), "true or false")

    def ints(self, name: str) -> tuple[int, ...]:
        value = self._get(name, _NO_DEFAULT, (list, tuple), "a list of integers")
        if any(type(item) is not int for item in value):
            raise ValueError(f"{self.where}: {name}={json.dumps(value)} is not a list of integers")
        return tuple(value)

    def prefixed(self) -> _Prefix:
        return _Prefix(self.where)


class _Prefix:
    """Puts the file's name before the message of a configuration's own checks."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError) and not str(error).startswith(self.where):
            raise ValueError(f"{self.where}: {error}") from error


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value!r} is not positive")


def _check_fixed_text_fields(text: _Fields) -> None:
    """Refuses every variant of the architecture that the model files do not implement.

    A field may be absent only where the published classes default to the supported value. n_group and topk_group
    default to 8 and 4 there, hence required.
    """
    text.fixed("hidden_act", "silu", required=True)
    text.fixed("scoring_func", "sigmoid")
    text.fixed("topk_method", "noaux_tc")
    text.fixed("n_group", 1, required=True)
    text.fixed("topk_group", 1, required=True)
    text.fixed("moe_layer_freq", 1)
    text.fixed("attention_bias", False)
    text.fixed("mlp_bias", False)
    text.fixed("num_nextn_predict_layers", 0, None)
    text.fixed("rope_interleave", True)
    text.fixed("sliding_window", None)
    text.fixed("final_logit_softcapping", None)
    text.fixed("index_topk", None)  # DeepSeek-V3.2's sparse attention


def _check_quantization(levels: Sequence[_Fields], has_experts: bool) -> None:
    """Refuses anything but compressed-tensors INT4, symmetric, groups of 32 along the input.

    Which tensors are packed is decided by the tensors themselves, so `targets` and `ignore` are not read.
    """
    found = [level for level in levels if level.data.get("quantization_config") is not None]
    if not found and has_experts:
        raise ValueError(
            f"{levels[-1].where}: required field 'quantization_config' is missing (looked in it and in the outer"
            " configuration); only INT4 experts (compressed-tensors, pack-quantized, groups of 32) are supported"
        )
    for level in found:
        where = f"{level.where}: quantization_config"
        quantization = _object(level.data["quantization_config"], where)
        quantization.fixed("quant_method", "compressed-tensors", required=True)
        quantization.fixed("format", "pack-quantized", required=True)
        quantization.fixed("quantization_status", "compressed")
        quantization.fixed("kv_cache_scheme", None)
        quantization.fixed("sparsity_config", None, {})
        quantization.fixed("transform_config", None, {})
        groups = _object(quantization.data.get("config_groups", {}), f"{where}: config_groups")
        if len(groups.data) != 1:
            raise ValueError(
                f"{groups.where}: {sorted(groups.data)}: exactly one group is supported"
            )
        (name,) = groups.data
        group = _object(groups.data[name], f"{where}: {name}")
        group.fixed("input_activations", None)
        group.fixed("output_activations", None)
        group.fixed("format", None, "pack-quantized")
        weights = _object(group.data.get("weights"), f"{group.where}: weights")
        weights.fixed("num_bits", 4, required=True)
        weights.fixed("type", "int", required=True)
        weights.fixed("symmetric", True, required=True)
        weights.fixed("strategy", "group", required=True)
        weights.fixed("group_size", GROUP_SIZE, required=True)
        weights.fixed("dynamic", False)
        weights.fixed("actorder", None)
        weights.fixed("block_structure", None)
        weights.fixed("scale_dtype", None)
        weights.fixed("zp_dtype", None)
        weights.known(
            *(
                "num_bits",
                "type",
                "symmetric",
                "strategy",
                "group_size",
                "dynamic",
                "actorder",
                "block_structure",
            ),
            *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
        )


def _object(value: Any, where: str) -> _Fields:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, found {json.dumps(value)}")
    return _Fields(value, where)


def _rope(fields: _Fields, drafter: bool = False) -> tuple[float, YarnConfig | None, float]:
    """(theta, YaRN or None, multiplier of cos and sin as transformers would compute it).

    The published files use `rope_theta` + `rope_scaling`; newer writers put both into `rope_parameters`. A drafter may
    leave out the fields that have a documented default in transformers; a target has them all, or is refused.
    """
    present = [
        name for name in ("rope_scaling", "rope_parameters") if fields.data.get(name) is not None
    ]
    if not present:
        return fields.float("rope_theta"), None, 1.0
    readings = []
    for name in present:
        rope = _object(fields.data[name], f"{fields.where}: {name}")
        rope.known(
            *("type", "rope_type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
            *("original_max_position_embeddings", "rope_theta", "attention_factor", "truncate"),
            "partial_rotary_factor",
        )
        if "type" not in rope.data and "rope_type" not in rope.data:
            raise rope.missing("rope_type")
        for key in ("type", "rope_type"):
            rope.fixed(key, "yarn", "deepseek_yarn", "default")
        rope.fixed("truncate", True)
        rope.fixed("partial_rotary_factor", 1)
        kinds = {rope.data[key] for key in ("type", "rope_type") if key in rope.data}
        if len(kinds) > 1:
            raise ValueError(f"{rope.where}: type and rope_type disagree: {sorted(kinds)}")
        theta = rope.float("rope_theta", default=fields.data.get("rope_theta") or math.nan)
        if math.isnan(theta):
            raise fields.missing("rope_theta")
        if fields.data.get("rope_theta") not in (None, theta):
            raise ValueError(
                f"{rope.where}: rope_theta={theta} differs from the outer rope_theta={fields.data['rope_theta']}"
            )
        if kinds == {"default"}:
            readings.append((theta, None, 1.0))
            continue
        optional = {"default": 1.0} if drafter else {}
        with rope.prefixed():
            yarn = YarnConfig(
                factor=rope.float("factor"),
                beta_fast=rope.float("beta_fast", **({"default": 32.0} if drafter else {})),
                beta_slow=rope.float("beta_slow", **optional),
                mscale=rope.float("mscale", **optional),
                mscale_all_dim=rope.float(
                    "mscale_all_dim",
                    **({"default": 0.0 if "mscale" not in rope.data else 1.0} if drafter else {}),
                ),
                original_max_position_embeddings=rope.int("original_max_position_embeddings"),
            )
        if not drafter:
            rope.fixed("attention_factor", None)
        readings.append((theta, yarn, rope.float("attention_factor", default=yarn.amplitude)))
    if any(reading != readings[0] for reading in readings):
        raise ValueError(
            f"{fields.where}: rope_scaling and rope_parameters disagree; keep one of them"
        )
    return readings[0]


def _merge_dflash(top: _Fields, nested: _Fields) -> _Fields:
    """The drafter's own fields, wherever they stand; the two places must not contradict each other."""
    names = (
        *("target_layer_ids", "block_size", "mask_token_id", "is_causal", "input_embedding_scale"),
        *("output_multiplier", "final_logit_softcapping"),
    )
    nested.known(*names)
    merged = {}
    for name in names:
        values = [level.data[name] for level in (top, nested) if level.data.get(name) is not None]
        if len(values) == 2 and values[0] != values[1]:
            raise ValueError(
                f"{top.where}: {name}={json.dumps(values[0])} at the top level, {json.dumps(values[1])} in dflash_config"
            )
        if values:
            merged[name] = values[0]
    return _Fields(merged, f"{top.where} (top level or dflash_config)")


def _first_id(levels: Sequence[_Fields], name: str, default: Any = _NO_DEFAULT) -> int:
    """`name` from the outer level if it has it, else from the inner one."""
    for level in levels[:-1]:
        if level.data.get(name) is not None:
            return level.int(name)
    return levels[-1].int(name, default)


def _family_stop_ids(bos: int, vocab_size: int) -> tuple[int, ...]:
    """`[EOS]` and `<|im_end|>`, if the vocabulary ends in the Kimi tokenizers' block of special ids."""
    return (bos + 1, bos + 2) if bos == vocab_size - SPECIAL_TOKENS else ()


def _stop_ids(
    places: Sequence[Mapping[str, Any]], bos: int, vocab_size: int, where: str
) -> tuple[int, ...]:
    """Ids that end a generation, ascending.

    The union of every `eos_token_id` written in config.json (outer and text level) and generation_config.json, and, for
    the Kimi tokenizers, of both end tokens: `[EOS]` = bos + 1 and `<|im_end|>` = bos + 2. The published files name only
    one of the two (K2.5 the first, K2.6 the second), and the model may emit either. A vocabulary belongs to the
    family when its last 256 ids are the special ones, i.e. bos == vocab_size - 256 (163584 of 163840, 1792 of 2048).
    Nothing else is assumed: in particular no default such as id 1.
    """
    named: set[int] = set()
    for place in places:
        value = place.get("eos_token_id")
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for item in ids:
            if type(item) is not int:
                raise ValueError(
                    f"{where}: eos_token_id={json.dumps(value)} is not an id or a list of ids"
                )
            named.add(item)
    if not named:
        raise ValueError(f"{where}: required field 'eos_token_id' is missing")
    return tuple(sorted(named | set(_family_stop_ids(bos, vocab_size))))


PRESETS: dict[str, ModelConfig] = {
    "kimi-k2.6": ModelConfig(
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        first_k_dense_replace=1,
        n_routed_experts=384,
        num_experts_per_tok=8,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
        rms_norm_eps=1e-5,
        vocab_size=163840,
        max_position_embeddings=262144,
        rope_theta=50000.0,
        rope_scaling=YarnConfig(
            factor=64.0,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
        ),
        bos_token_id=163584,
        eos_token_ids=(163585, 163586),
        pad_token_id=163839,
    ),
    "tiny-k2": ModelConfig(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=256,
        first_k_dense_replace=1,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.0,
        rms_norm_eps=1e-5,
        vocab_size=2048,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rope_scaling=YarnConfig(
            factor=8.0,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=512,
        ),
        bos_token_id=1792,
        eos_token_ids=(1793, 1794),
        pad_token_id=2047,
    ),
}
"""Targets by name: the published model and the bundled one."""

DRAFTER_PRESETS: dict[str, DrafterConfig] = {
    "kimi-k2.6": DrafterConfig(
        hidden_size=7168,
        num_hidden_layers=6,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=18432,
        rms_norm_eps=1e-5,
        vocab_size=163840,
        block_size=8,
        mask_token_id=163838,
        target_layer_ids=(1, 12, 24, 35, 47, 58),
        layer_types=(*("sliding_attention",) * 5, "full_attention"),
        sliding_window=2048,
        rope_theta=50000.0,
        rope_scaling=PRESETS["kimi-k2.6"].rope_scaling,
        max_position_embeddings=262144,
    ),
    "tiny-k2": DrafterConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        intermediate_size=384,
        rms_norm_eps=1e-5,
        vocab_size=2048,
        block_size=8,
        mask_token_id=2046,
        target_layer_ids=(1, 3, 4),
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=64,
        rope_theta=10000.0,
        rope_scaling=PRESETS["tiny-k2"].rope_scaling,
        max_position_embeddings=4096,
    ),
}
"""Drafters by the name of their target."""
