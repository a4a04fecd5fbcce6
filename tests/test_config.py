"""Reading configurations: what is published is read, what is not implemented is refused by name."""

import copy
import dataclasses
import json
import math

import pytest

from kimi_jax.config import (
    DRAFTER_PRESETS,
    PRESETS,
    DrafterConfig,
    ModelConfig,
    YarnConfig,
    to_hf,
)

YARN = {
    "type": "yarn",
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
# The fields of Kimi K2.6's published text configuration, with some of the clutter around them.
K26_TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "chunk_size_feed_forward": 0,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_length": 20,
    "max_position_embeddings": 262144,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 163839,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": INT4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "temperature": 1.0,
    "tie_word_embeddings": False,
    "top_k": 50,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "4.56.2",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
K26 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "pad_token_id": 163839,
    "text_config": K26_TEXT,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "vision_config": {"vt_hidden_size": 1152, "patch_size": 14},
}
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_target_layers": 61,
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 50000.0,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 163840,
}


def changed(data, path, value):
    """A copy of `data` with the dotted `path` set to `value`, or deleted for `...`."""
    data = copy.deepcopy(data)
    *parents, last = path.split(".")
    place = data
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


def test_the_published_k26_configuration_is_the_preset():
    assert ModelConfig.from_hf(K26) == PRESETS["kimi-k2.6"]


def test_a_bare_text_configuration_is_read():
    thinking = changed(K26_TEXT, "rope_scaling.beta_fast", 1.0)
    config = ModelConfig.from_hf(thinking)
    assert config.rope_scaling is not None and config.rope_scaling.beta_fast == 1.0


def test_the_text_model_may_call_itself_deepseek_v3():
    read = ModelConfig.from_hf(changed(K26, "text_config.model_type", "deepseek_v3"))
    assert read == PRESETS["kimi-k2.6"]


def test_quantization_may_stand_at_the_top():
    moved = changed(K26, "text_config.quantization_config", ...) | {"quantization_config": INT4}
    assert ModelConfig.from_hf(moved) == PRESETS["kimi-k2.6"]


def test_quantization_in_either_place_is_checked():
    wrong = changed(INT4, "config_groups.group_0.weights.num_bits", 8)
    with pytest.raises(ValueError, match="num_bits=8"):
        ModelConfig.from_hf(K26 | {"quantization_config": wrong})


def test_rope_parameters_are_read_like_rope_scaling():
    text = changed(K26_TEXT, "rope_scaling", ...)
    del text["rope_theta"]
    text["rope_parameters"] = YARN | {"rope_theta": 50000.0, "rope_type": "yarn"}
    assert ModelConfig.from_hf(text) == ModelConfig.from_hf(K26_TEXT)


def test_two_rope_descriptions_must_agree():
    other = YARN | {"factor": 32.0, "rope_theta": 50000.0}
    with pytest.raises(ValueError, match="rope_scaling and rope_parameters disagree"):
        ModelConfig.from_hf(K26_TEXT | {"rope_parameters": other})
    with pytest.raises(ValueError, match="rope_theta=10000.0 differs"):
        ModelConfig.from_hf(changed(K26_TEXT, "rope_scaling.rope_theta", 10000.0))


def test_rotary_embedding_without_scaling_is_read():
    assert ModelConfig.from_hf(changed(K26, "text_config.rope_scaling", None)).rope_scaling is None
    plain = {"rope_type": "default"}
    assert ModelConfig.from_hf(changed(K26, "text_config.rope_scaling", plain)).rope_scaling is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_type", "llama"),
        ("tie_word_embeddings", True),
        ("text_config.model_type", "deepseek_v2"),
        ("text_config.tie_word_embeddings", True),
        ("text_config.hidden_act", "gelu"),
        ("text_config.scoring_func", "softmax"),
        ("text_config.topk_method", "greedy"),
        ("text_config.n_group", 8),
        ("text_config.topk_group", 4),
        ("text_config.moe_layer_freq", 2),
        ("text_config.attention_bias", True),
        ("text_config.mlp_bias", True),
        ("text_config.num_nextn_predict_layers", 1),
        ("text_config.num_key_value_heads", 8),
        ("text_config.qk_head_dim", 128),
        ("text_config.rope_interleave", False),
        ("text_config.sliding_window", 4096),
        ("text_config.index_topk", 2048),
        ("text_config.rope_scaling.type", "linear"),
        ("text_config.rope_scaling.attention_factor", 1.5),
        ("text_config.rope_scaling.truncate", False),
        ("text_config.quantization_config.quant_method", "fp8"),
        ("text_config.quantization_config.format", "int-quantized"),
        ("text_config.quantization_config.kv_cache_scheme", {"num_bits": 8}),
        ("text_config.quantization_config.config_groups.group_0.input_activations", {}),
        ("text_config.quantization_config.config_groups.group_0.weights.num_bits", 8),
        ("text_config.quantization_config.config_groups.group_0.weights.group_size", 128),
        ("text_config.quantization_config.config_groups.group_0.weights.symmetric", False),
        ("text_config.quantization_config.config_groups.group_0.weights.strategy", "channel"),
        ("text_config.quantization_config.config_groups.group_0.weights.type", "float"),
        ("text_config.quantization_config.config_groups.group_0.weights.actorder", "group"),
        ("text_config.quantization_config.config_groups.group_0.weights.dynamic", True),
    ],
)
def test_a_variant_that_is_not_implemented_is_refused_by_name(path, value):
    name = path.rsplit(".", maxsplit=1)[-1]
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf(changed(K26, path, value))
    assert f"{name}={json.dumps(value)} is not supported; supported: " in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        *("hidden_size", "num_hidden_layers", "q_lora_rank", "kv_lora_rank", "v_head_dim"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "n_routed_experts", "num_experts_per_tok"),
        *("norm_topk_prob", "routed_scaling_factor", "rms_norm_eps", "rope_theta", "vocab_size"),
        *("hidden_act", "n_group", "topk_group", "first_k_dense_replace", "quantization_config"),
        *("rope_scaling.factor", "rope_scaling.beta_fast", "rope_scaling.mscale_all_dim"),
        *("rope_scaling.original_max_position_embeddings", "rope_scaling.type"),
    ],
)
def test_a_missing_required_field_is_named(name):
    leaf = name.rsplit(".", maxsplit=1)[-1]
    with pytest.raises(ValueError, match=f"required field '{leaf}' is missing"):
        ModelConfig.from_hf(changed(K26, f"text_config.{name}", ...))


def test_a_missing_text_config_is_named():
    with pytest.raises(ValueError, match="required field 'text_config' is missing"):
        ModelConfig.from_hf(changed(K26, "text_config", ...))


def test_an_unknown_rope_field_is_refused():
    with pytest.raises(ValueError, match="unknown field 'long_factor'"):
        ModelConfig.from_hf(changed(K26, "text_config.rope_scaling.long_factor", [1.0]))


def test_an_unknown_quantization_field_is_refused():
    path = "text_config.quantization_config.config_groups.group_0.weights.zero_point"
    with pytest.raises(ValueError, match="unknown field 'zero_point'"):
        ModelConfig.from_hf(changed(K26, path, 1))


def test_two_quantization_groups_are_refused():
    path = "text_config.quantization_config.config_groups.group_1"
    with pytest.raises(ValueError, match="group_0.*group_1"):
        ModelConfig.from_hf(changed(K26, path, {}))


@pytest.mark.parametrize("value", ["7168", 7168.5, True])
def test_a_field_of_the_wrong_type_is_named(value):
    with pytest.raises(ValueError, match="hidden_size=.* is not an integer"):
        ModelConfig.from_hf(changed(K26, "text_config.hidden_size", value))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_experts_per_tok", 400, "num_experts_per_tok=400 exceeds n_routed_experts=384"),
        ("hidden_size", 7150, "hidden_size=7150 is not a multiple"),
        ("moe_intermediate_size", 2050, "moe_intermediate_size=2050 is not a multiple"),
        ("first_k_dense_replace", 62, "first_k_dense_replace=62 lies outside"),
        ("qk_rope_head_dim", 63, "qk_rope_head_dim=63 is odd"),
        ("rms_norm_eps", 0, "rms_norm_eps=0.0 is not positive"),
    ],
)
def test_sizes_that_contradict_each_other_are_named_with_their_source(name, value, message):
    with pytest.raises(ValueError, match=f"^config: {message}"):
        ModelConfig.from_hf(changed(K26, f"text_config.{name}", value))


def test_epsilon_of_the_latent_norms_has_transformers_default_and_can_be_set():
    assert ModelConfig.from_hf(K26).latent_norm_eps == 1e-6
    switched = ModelConfig.from_hf(changed(K26, "text_config.latent_norm_eps", 1e-5))
    assert switched.latent_norm_eps == 1e-5


def write(folder, config, generation=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_folder_and_its_config_file_are_read_alike(tmp_path):
    write(tmp_path, K26)
    assert ModelConfig.from_hf(tmp_path) == PRESETS["kimi-k2.6"]
    assert ModelConfig.from_hf(str(tmp_path / "config.json")) == PRESETS["kimi-k2.6"]


def test_an_error_names_the_file(tmp_path):
    write(tmp_path, changed(K26, "text_config.hidden_act", "gelu"))
    with pytest.raises(ValueError, match=str(tmp_path / "config.json")):
        ModelConfig.from_hf(tmp_path)


def test_a_folder_without_a_configuration_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("text", ["", '{"model_type": "kimi_k', "[]", "\xff"])
def test_a_damaged_configuration_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="config.json: .*JSON"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("eos", [163585, 163586, [163585, 163586], [163586]])
def test_both_end_tokens_of_the_family_stop_whichever_is_named(eos):
    text = changed(K26, "text_config.eos_token_id", eos)
    assert ModelConfig.from_hf(text | {"eos_token_id": eos}).eos_token_ids == (163585, 163586)


def test_generation_config_adds_its_end_tokens(tmp_path):
    write(tmp_path, K26, {"eos_token_id": [163586, 163593], "max_length": 262144})
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (163585, 163586, 163593)


def test_another_vocabulary_stops_only_where_it_says():
    text = changed(K26_TEXT, "vocab_size", 163841)
    assert ModelConfig.from_hf(text).eos_token_ids == (163586,)


def test_missing_end_tokens_are_refused():
    with pytest.raises(ValueError, match="'eos_token_id' is missing"):
        ModelConfig.from_hf(changed(K26_TEXT, "eos_token_id", ...))


def test_an_end_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="eos_token_ids: id 163840 lies outside"):
        ModelConfig.from_hf(changed(K26_TEXT, "eos_token_id", 163840))


def test_padding_defaults_to_an_end_token():
    assert ModelConfig.from_hf(changed(K26_TEXT, "pad_token_id", None)).pad_token_id == 163586


def test_softmax_scale_of_k26():
    # 192^-0.5 * (0.1 ln 64 + 1)^2
    assert PRESETS["kimi-k2.6"].softmax_scale == pytest.approx(0.1446796258, abs=1e-10)


def test_softmax_scale_without_yarn():
    plain = dataclasses.replace(PRESETS["kimi-k2.6"], rope_scaling=None)
    assert plain.softmax_scale == 192**-0.5


def test_derived_sizes_of_k26():
    config = PRESETS["kimi-k2.6"]
    assert (config.qk_head_dim, config.cache_row, config.num_moe_layers) == (192, 576, 60)
    assert [config.is_moe(i) for i in (0, 1, 60)] == [False, True, True]


def test_yarn_amplitude_is_one_only_for_equal_mscales():
    yarn = PRESETS["kimi-k2.6"].rope_scaling
    assert yarn is not None and yarn.amplitude == 1.0
    plain = dataclasses.replace(yarn, mscale_all_dim=0.0)
    assert plain.amplitude == pytest.approx(1.4158883083)


def test_configurations_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["tiny-k2"].hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        YarnConfig(1.0)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("stop_ids", [None, (5,), (5, 9)])
def test_a_written_model_configuration_reads_back_equal(name, stop_ids):
    config = dataclasses.replace(PRESETS[name], latent_norm_eps=1e-5)
    if stop_ids is not None:
        config = dataclasses.replace(config, bos_token_id=3, eos_token_ids=stop_ids)
    assert ModelConfig.from_hf(json.loads(json.dumps(to_hf(config)))) == config


@pytest.mark.parametrize("name", DRAFTER_PRESETS)
def test_a_written_drafter_configuration_reads_back_equal(name):
    config = dataclasses.replace(DRAFTER_PRESETS[name], yarn_amplitude=1.5, sliding_causal=True)
    assert DrafterConfig.from_hf(json.loads(json.dumps(to_hf(config)))) == config


@pytest.mark.parametrize("name", DRAFTER_PRESETS)
def test_drafter_presets_fit_their_targets(name):
    DRAFTER_PRESETS[name].check_against(PRESETS[name])
    assert DRAFTER_PRESETS[name].depth == 7


def test_a_published_drafter_configuration_is_the_preset():
    assert DrafterConfig.from_hf(DFLASH) == DRAFTER_PRESETS["kimi-k2.6"]


@pytest.mark.parametrize("name", ["target_layer_ids", "mask_token_id"])
def test_a_drafter_field_is_never_guessed(name):
    with pytest.raises(ValueError, match=f"required field '{name}' is missing"):
        DrafterConfig.from_hf(changed(DFLASH, f"dflash_config.{name}", ...))


def test_a_missing_block_size_is_never_guessed():
    with pytest.raises(ValueError, match="required field 'block_size' is missing"):
        DrafterConfig.from_hf(changed(DFLASH, "block_size", ...))


def test_drafter_fields_are_read_at_either_level():
    flat = changed(DFLASH, "dflash_config", ...) | DFLASH["dflash_config"]
    nested = changed(changed(DFLASH, "block_size", ...), "dflash_config.block_size", 8)
    assert DrafterConfig.from_hf(flat) == DrafterConfig.from_hf(nested)


def test_drafter_fields_at_two_levels_must_agree():
    with pytest.raises(ValueError, match="block_size=8, but 16 in dflash_config"):
        DrafterConfig.from_hf(changed(DFLASH, "dflash_config.block_size", 16))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("architectures", ["DFlash2DraftModel"]),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", False),
        ("draft_vocab_size", 32000),
        ("dflash_config.input_embedding_scale", 2.0),
        ("dflash_config.output_multiplier", 0.5),
        ("dflash_config.final_logit_softcapping", 30.0),
        ("dflash_config.sample_from_anchor", True),
    ],
)
def test_a_drafter_variant_that_is_not_implemented_is_refused_by_name(path, value):
    name = path.rsplit(".", maxsplit=1)[-1]
    with pytest.raises(ValueError) as error:
        DrafterConfig.from_hf(changed(DFLASH, path, value))
    assert f"{name}={json.dumps(value)} is not supported; supported: " in str(error.value)


def test_an_unknown_dflash_field_is_refused():
    with pytest.raises(ValueError, match="unknown field 'num_selector_candidates'"):
        DrafterConfig.from_hf(changed(DFLASH, "dflash_config.num_selector_candidates", 4))


def test_an_unknown_layer_type_is_refused():
    kinds = ["chunked_attention", *DFLASH["layer_types"][1:]]
    with pytest.raises(ValueError, match="layer_types: 'chunked_attention' is not supported"):
        DrafterConfig.from_hf(DFLASH | {"layer_types": kinds})


def test_sliding_layers_must_be_listed():
    with pytest.raises(ValueError, match="'layer_types' is missing"):
        DrafterConfig.from_hf(changed(DFLASH, "layer_types", ...))


def test_a_sliding_layer_needs_a_window():
    with pytest.raises(ValueError, match="'sliding_window' is missing"):
        DrafterConfig.from_hf(changed(DFLASH, "sliding_window", None))


def test_a_drafter_without_layer_types_attends_fully():
    plain = changed(DFLASH, "layer_types", ...) | {"use_sliding_window": False}
    config = DrafterConfig.from_hf(plain)
    assert config.layer_types == ("full_attention",) * 6 and config.sliding_window is None


def test_yarn_amplitude_follows_the_configuration_unless_overridden():
    assert DrafterConfig.from_hf(DFLASH).yarn_amplitude == 1.0
    without = changed(
        changed(DFLASH, "rope_scaling.mscale", ...), "rope_scaling.mscale_all_dim", ...
    )
    assert DrafterConfig.from_hf(without).yarn_amplitude == pytest.approx(0.1 * math.log(64) + 1)
    explicit = changed(DFLASH, "rope_scaling.attention_factor", 1.25)
    assert DrafterConfig.from_hf(explicit).yarn_amplitude == 1.25
    assert DrafterConfig.from_hf(explicit, yarn_amplitude=1.5).yarn_amplitude == 1.5


def test_causality_of_sliding_layers_follows_the_configuration_unless_overridden():
    causal = changed(DFLASH, "dflash_config.is_causal", True)
    assert DrafterConfig.from_hf(DFLASH).sliding_causal is False
    assert DrafterConfig.from_hf(causal).sliding_causal is True
    assert DrafterConfig.from_hf(causal, sliding_causal=False).sliding_causal is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 4096}, "hidden_size=4096, the target's 7168"),
        ({"vocab_size": 163900}, "vocab_size=163900, the target's 163840"),
        ({"target_layer_ids": (1, 61)}, r"\[61\] lie outside the target's layers 0..60"),
        ({"target_layer_ids": (-1, 5)}, r"\[-1\] lie outside"),
    ],
)
def test_a_drafter_for_another_target_is_refused(changes, message):
    drafter = dataclasses.replace(DRAFTER_PRESETS["kimi-k2.6"], **changes)
    with pytest.raises(ValueError, match=message):
        drafter.check_against(PRESETS["kimi-k2.6"])


def test_a_tap_on_the_last_layer_is_allowed():
    drafter = dataclasses.replace(DRAFTER_PRESETS["kimi-k2.6"], target_layer_ids=(0, 60))
    drafter.check_against(PRESETS["kimi-k2.6"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size=1"),
        ({"mask_token_id": 163840}, "mask_token_id: id 163840 lies outside"),
        ({"target_layer_ids": (1, 1)}, "target_layer_ids"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"num_key_value_heads": 7}, "num_key_value_heads=7"),
        ({"layer_types": ("full_attention",)}, "layer_types names 1 layers"),
        ({"rope_scaling": None, "yarn_amplitude": 1.4}, "yarn_amplitude=1.4 without rope_scaling"),
    ],
)
def test_a_drafter_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DRAFTER_PRESETS["kimi-k2.6"], **changes)
