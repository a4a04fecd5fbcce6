"""Reading and writing a Hugging Face `config.json`: plain dictionaries on both sides.

`config.py` builds its dataclasses from `model_fields` and `drafter_fields`, and writes them with
`model_json` and `drafter_json`. Everything that changes the arithmetic is read here or compared
with the one supported value; any other value is refused by name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Source = str | os.PathLike[str] | Mapping[str, Any]

GROUP_SIZE = 32
"""Input columns that share one scale in the published INT4 experts."""

SPECIAL_TOKENS = 256
"""Ids that the Kimi tokenizers reserve at the end of the vocabulary; the first is `[BOS]`."""

_MODEL_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size"),
    *("moe_intermediate_size", "first_k_dense_replace", "n_routed_experts"),
    *("num_experts_per_tok", "n_shared_experts", "vocab_size", "max_position_embeddings"),
)
_DRAFTER_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"),
)
_YARN_FIELDS = (
    *("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "original_max_position_embeddings",
)


def model_fields(source: Source) -> tuple[dict[str, Any], str]:
    """(the fields of a `ModelConfig`, how to name the source in a message).

    `rope_scaling` is None or a dictionary with the fields of a `YarnConfig`.
    """
    data, generation, where = load(source)
    outer = Fields(data, where)
    outer.fixed("model_type", "kimi_k25", "kimi_k2", "deepseek_v3", required=True)
    levels = [outer]
    if data["model_type"] == "kimi_k25":
        levels.append(outer.object("text_config"))
    text = levels[-1]
    text.fixed("model_type", "kimi_k2", "deepseek_v3")
    for level in levels:
        level.fixed("tie_word_embeddings", False)
    _check_architecture(text)
    sizes = {name: text.int(name) for name in _MODEL_SIZES}
    text.fixed("num_key_value_heads", sizes["num_attention_heads"])
    text.fixed("qk_head_dim", sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"])
    _check_quantization(levels, sizes["first_k_dense_replace"] < sizes["num_hidden_layers"])
    theta, yarn, _ = _rope(text, optional={})
    bos = _id(levels, "bos_token_id")
    stop_ids = _stop_ids([*(x.data for x in levels), generation], bos, sizes["vocab_size"], where)
    fields = {
        **sizes,
        "norm_topk_prob": text.bool("norm_topk_prob"),
        "routed_scaling_factor": text.float("routed_scaling_factor"),
        "rms_norm_eps": text.float("rms_norm_eps"),
        "latent_norm_eps": text.float("latent_norm_eps", default=1e-6),
        "rope_theta": theta,
        "rope_scaling": yarn,
        "bos_token_id": bos,
        "eos_token_ids": stop_ids,
        "pad_token_id": _id(levels, "pad_token_id", default=stop_ids[-1]),
    }
    return fields, where


def drafter_fields(source: Source) -> tuple[dict[str, Any], str]:
    """(the fields of a `DrafterConfig`, how to name the source in a message).

    `yarn_amplitude` is the configuration's `attention_factor` or None; `sliding_causal` is its
    `is_causal` or False.
    """
    data, _, where = load(source)
    top = Fields(data, where)
    architectures = data.get("architectures", ["DFlashDraftModel"])
    if architectures != ["DFlashDraftModel"]:
        raise top.unsupported("architectures", [["DFlashDraftModel"]])
    top.fixed("hidden_act", "silu", required=True)
    for name in ("attention_bias", "mlp_bias"):
        top.fixed(name, False)
    sizes = {name: top.int(name) for name in _DRAFTER_SIZES}
    top.fixed("draft_vocab_size", None, sizes["vocab_size"])
    dflash = _dflash(top)
    # transformers' defaults; a plain YaRN without mscale has amplitude 0.1 ln(factor) + 1.
    yarn_defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    theta, yarn, amplitude = _rope(top, optional=yarn_defaults)
    kinds = _layer_types(top, sizes["num_hidden_layers"])
    fields = {
        **sizes,
        "rms_norm_eps": top.float("rms_norm_eps"),
        "block_size": dflash.int("block_size"),
        "mask_token_id": dflash.int("mask_token_id"),
        "target_layer_ids": dflash.ints("target_layer_ids"),
        "layer_types": kinds,
        "sliding_window": top.int("sliding_window") if "sliding_attention" in kinds else None,
        "rope_theta": theta,
        "rope_scaling": yarn,
        "yarn_amplitude": amplitude,
        "sliding_causal": dflash.bool("is_causal", default=False),
    }
    return fields, where


def model_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The published form (`kimi_k25` with a `text_config`) of the fields of a `ModelConfig`."""
    family = _family_stop_ids(fields["bos_token_id"], fields["vocab_size"])
    stop_ids = fields["eos_token_ids"]
    # As published: one id where the family's rule supplies the other.
    named = [stop_ids[-1]] if stop_ids == family else [i for i in stop_ids if i not in family]
    ids = {
        "bos_token_id": fields["bos_token_id"],
        "eos_token_id": named[0] if len(named) == 1 else named,
        "pad_token_id": fields["pad_token_id"],
    }
    same = ("norm_topk_prob", "routed_scaling_factor", "rms_norm_eps", "latent_norm_eps")
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **{name: fields[name] for name in (*_MODEL_SIZES, *same, "rope_theta")},
        **ids,
        "num_key_value_heads": fields["num_attention_heads"],
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
        "rope_scaling": _yarn_json(fields["rope_scaling"]),
        "quantization_config": _quantization_json(),
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **ids,
        "text_config": text,
    }


def drafter_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The published form (`DFlashDraftModel`) of the fields of a `DrafterConfig`."""
    rope = _yarn_json(fields["rope_scaling"])
    if rope is not None:
        rope["attention_factor"] = fields["yarn_amplitude"]
    same = (*_DRAFTER_SIZES, "rms_norm_eps", "block_size", "sliding_window", "rope_theta")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        **{name: fields[name] for name in same},
        "use_sliding_window": fields["sliding_window"] is not None,
        "layer_types": list(fields["layer_types"]),
        "rope_scaling": rope,
        "dflash_config": {
            "mask_token_id": fields["mask_token_id"],
            "target_layer_ids": list(fields["target_layer_ids"]),
            "is_causal": fields["sliding_causal"],
        },
    }


def load(source: Source) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """(configuration, generation configuration or {}, how to name the configuration)."""
    if isinstance(source, Mapping):
        return source, {}, "config"
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a checkpoint folder holds a config.json")
    generation = path.parent / "generation_config.json"
    return read_json(path), read_json(generation) if generation.is_file() else {}, str(path)


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in `path`; ValueError if it does not hold one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); incomplete download?") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


_REQUIRED: Any = object()


class Fields:
    """Typed access to a JSON object, with messages that name the object, field and value."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def missing(self, name: str) -> ValueError:
        return ValueError(f"{self.where}: required field {name!r} is missing")

    def unsupported(self, name: str, supported: Sequence[Any]) -> ValueError:
        listed = ", ".join(json.dumps(value) for value in supported)
        found = f"{name}={json.dumps(self.data[name])}"
        return ValueError(f"{self.where}: {found} is not supported; supported: {listed}")

    def fixed(self, name: str, *supported: Any, required: bool = False) -> None:
        """Refuses a value of `name` other than `supported`; absence only if `required`."""
        if name not in self.data:
            if required:
                raise self.missing(name)
            return
        value = self.data[name]
        # In Python True == 1; in a configuration one of them is a mistake.
        if not any(
            value == s and isinstance(value, bool) == isinstance(s, bool) for s in supported
        ):
            raise self.unsupported(name, supported)

    def known(self, *names: str) -> None:
        """Refuses fields other than `names`."""
        for name in sorted(set(self.data) - set(names)):
            found = f"{name!r} ({json.dumps(self.data[name])})"
            raise ValueError(f"{self.where}: unknown field {found}; supported: {', '.join(names)}")

    def object(self, name: str) -> Fields:
        value = self._get(name, _REQUIRED, (Mapping,), "an object")
        return Fields(value, f"{self.where}: {name}")

    def int(self, name: str, default: Any = _REQUIRED) -> int:
        return self._get(name, default, (int,), "an integer")

    def float(self, name: str, default: Any = _REQUIRED) -> float:
        return float(self._get(name, default, (int, float), "a number"))

    def bool(self, name: str, default: Any = _REQUIRED) -> bool:
        return self._get(name, default, (bool,), "true or false")

    def ints(self, name: str) -> tuple[int, ...]:
        value = self._get(name, _REQUIRED, (list, tuple), "a list of integers")
        if any(type(item) is not int for item in value):
            raise ValueError(f"{self.where}: {name}={json.dumps(value)} is not a list of integers")
        return tuple(value)

    def _get(self, name: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.data.get(name)
        if value is None:
            if default is _REQUIRED:
                raise self.missing(name)
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{self.where}: {name}={json.dumps(value)} is not {expected}")
        return value


def _check_architecture(text: Fields) -> None:
    """Refuses every variant of the architecture that the model files do not implement.

    A field may be absent only where the published classes default to the supported value; n_group
    and topk_group default to 8 and 4 there, hence required.
    """
    text.fixed("hidden_act", "silu", required=True)
    text.fixed("n_group", 1, required=True)
    text.fixed("topk_group", 1, required=True)
    text.fixed("scoring_func", "sigmoid")
    text.fixed("topk_method", "noaux_tc")
    text.fixed("moe_layer_freq", 1)
    text.fixed("num_nextn_predict_layers", 0, None)
    text.fixed("attention_bias", False)
    text.fixed("mlp_bias", False)
    text.fixed("rope_interleave", True)
    text.fixed("sliding_window", None)
    text.fixed("final_logit_softcapping", None)
    text.fixed("index_topk", None)  # DeepSeek-V3.2's sparse attention


def _check_quantization(levels: Sequence[Fields], has_experts: bool) -> None:
    """Refuses anything but compressed-tensors INT4, symmetric, groups of 32 along the input.

    Which tensors are packed shows in the tensors themselves, so `targets` and `ignore` are not
    read.
    """
    found = [x for x in levels if x.data.get("quantization_config") is not None]
    if not found and has_experts:
        raise ValueError(
            f"{levels[-1].where}: required field 'quantization_config' is missing there and at the"
            " top; only INT4 experts (compressed-tensors, pack-quantized, groups of 32) are"
            " supported"
        )
    for level in found:
        quantization = level.object("quantization_config")
        quantization.fixed("quant_method", "compressed-tensors", required=True)
        quantization.fixed("format", "pack-quantized", required=True)
        quantization.fixed("quantization_status", "compressed")
        quantization.fixed("kv_cache_scheme", None)
        quantization.fixed("sparsity_config", None, {})
        quantization.fixed("transform_config", None, {})
        groups = quantization.object("config_groups")
        if len(groups.data) != 1:
            raise ValueError(f"{groups.where} has groups {sorted(groups.data)}; supported: one")
        group = groups.object(next(iter(groups.data)))
        group.fixed("input_activations", None)
        group.fixed("output_activations", None)
        group.fixed("format", None, "pack-quantized")
        _check_packing(group.object("weights"))


def _check_packing(weights: Fields) -> None:
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
        *("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder"),
        *("block_structure", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
    )


def _rope(
    fields: Fields, optional: Mapping[str, float]
) -> tuple[float, dict[str, Any] | None, float | None]:
    """(theta, YaRN's fields or None, `attention_factor` or None).

    The published files have `rope_theta` + `rope_scaling`; newer writers put both into
    `rope_parameters`, and some write both, which must then agree. YaRN's fields are required
    unless `optional` has a default for them.
    """
    places = [n for n in ("rope_scaling", "rope_parameters") if fields.data.get(n) is not None]
    if not places:
        return fields.float("rope_theta"), None, None
    readings = [_rope_object(fields, fields.object(name), optional) for name in places]
    if any(reading != readings[0] for reading in readings):
        raise ValueError(f"{fields.where}: rope_scaling and rope_parameters disagree; keep one")
    return readings[0]


def _rope_object(
    fields: Fields, rope: Fields, optional: Mapping[str, float]
) -> tuple[float, dict[str, Any] | None, float | None]:
    rope.known(
        *("type", "rope_type", *_YARN_FIELDS, "rope_theta", "attention_factor"),
        *("truncate", "partial_rotary_factor"),
    )
    kinds = [rope.data[key] for key in ("type", "rope_type") if key in rope.data]
    if not kinds:
        raise rope.missing("type")
    for key in ("type", "rope_type"):
        rope.fixed(key, "yarn", "deepseek_yarn", "default")
    if len(set(kinds)) > 1:
        raise ValueError(f"{rope.where}: type={kinds[0]!r} and rope_type={kinds[1]!r} disagree")
    rope.fixed("truncate", True)
    rope.fixed("partial_rotary_factor", 1)
    theta = rope.float("rope_theta") if "rope_theta" in rope.data else fields.float("rope_theta")
    if not math.isclose(theta, fields.float("rope_theta", default=theta)):
        outer = fields.data["rope_theta"]
        raise ValueError(f"{rope.where}: rope_theta={theta} differs from the outer one, {outer}")
    if not optional:
        rope.fixed("attention_factor", None)
    if kinds[0] == "default":
        return theta, None, None
    yarn: dict[str, Any] = {
        name: rope.float(name, **({"default": optional[name]} if name in optional else {}))
        for name in _YARN_FIELDS[:-1]
    }
    yarn["original_max_position_embeddings"] = rope.int("original_max_position_embeddings")
    factor = rope.float("attention_factor") if rope.data.get("attention_factor") else None
    return theta, yarn, factor


def _dflash(top: Fields) -> Fields:
    """DFlash's own fields, at the top level or in `dflash_config`; both places must agree."""
    nested = top.object("dflash_config") if top.data.get("dflash_config") else Fields({}, "")
    names = (
        *("target_layer_ids", "block_size", "mask_token_id", "is_causal", "use_qk_norm"),
        *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
        "sample_from_anchor",
    )
    nested.known(*names)
    merged = {}
    for name in names:
        values = [x.data[name] for x in (top, nested) if x.data.get(name) is not None]
        if len(values) == 2 and values[0] != values[1]:
            outer, inner = map(json.dumps, values)
            raise ValueError(f"{top.where}: {name}={outer}, but {inner} in dflash_config")
        if values:
            merged[name] = values[0]
    dflash = Fields(merged, f"{top.where} (top level or dflash_config)")
    dflash.fixed("use_qk_norm", True)
    dflash.fixed("sample_from_anchor", False)
    dflash.fixed("input_embedding_scale", 1)
    dflash.fixed("output_multiplier", 1)
    dflash.fixed("final_logit_softcapping", None)
    return dflash


def _layer_types(top: Fields, layers: int) -> tuple[str, ...]:
    if top.data.get("layer_types") is None:
        # transformers would derive sliding layers from further fields; naming them is safer.
        if top.bool("use_sliding_window", default=False):
            raise ValueError(
                f"{top.where}: use_sliding_window=true, but required field 'layer_types' is missing"
            )
        return ("full_attention",) * layers
    kinds = top.data["layer_types"]
    if not isinstance(kinds, list | tuple):
        raise ValueError(f"{top.where}: layer_types={json.dumps(kinds)} is not a list")
    if "sliding_attention" in kinds:
        top.fixed("use_sliding_window", True)
    return tuple(kinds)


def _id(levels: Sequence[Fields], name: str, default: Any = _REQUIRED) -> int:
    """`name` from the outer level if it is there, else from the inner one."""
    for level in levels[:-1]:
        if level.data.get(name) is not None:
            return level.int(name)
    return levels[-1].int(name, default)


def _family_stop_ids(bos: int, vocab_size: int) -> tuple[int, ...]:
    """`[EOS]` and `<|im_end|>` if the vocabulary ends in the Kimi tokenizers' special ids."""
    return (bos + 1, bos + 2) if bos == vocab_size - SPECIAL_TOKENS else ()


def _stop_ids(
    places: Sequence[Mapping[str, Any]], bos: int, vocab_size: int, where: str
) -> tuple[int, ...]:
    """The ids that end a generation, ascending.

    The union of every `eos_token_id` written in config.json (outer and text level) and in
    generation_config.json and, for the Kimi tokenizers, of both end tokens: `[EOS]` = bos + 1 and
    `<|im_end|>` = bos + 2. The published files name only one of the two (K2.5 the first, K2.6 the
    second), and the model emits either. A vocabulary is of the family when its last 256 ids are
    the special ones: bos == vocab_size - 256, as 163584 of 163840 and 1792 of 2048. Nothing else
    is assumed, in particular no default such as id 1.
    """
    named: set[int] = set()
    for place in places:
        value = place.get("eos_token_id")
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if any(type(item) is not int for item in ids):
            raise ValueError(
                f"{where}: eos_token_id={json.dumps(value)} is not an id or a list of ids"
            )
        named.update(ids)
    if not named:
        raise ValueError(f"{where}: required field 'eos_token_id' is missing")
    return tuple(sorted(named.union(_family_stop_ids(bos, vocab_size))))


def _yarn_json(yarn: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if yarn is None else {"type": "yarn", **yarn}


def _quantization_json() -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP_SIZE,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    return {
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
        "config_groups": {"group_0": group},
    }
