"""The bundled model's dimensions, and its ``config.json`` in the published form."""

from dataclasses import dataclass

from special import BOS, IM_END, MASK, NUM_RANKS, PAD, VOCAB


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden: int = 256
    layers: int = 6  # the first one dense
    heads: int = 8
    q_rank: int = 64
    latent: int = 64
    nope: int = 32
    rope: int = 32
    value: int = 32
    dense_width: int = 256
    experts: int = 16
    top_k: int = 2
    expert_width: int = 256
    routed_scale: float = 2.0
    eps: float = 1e-5
    latent_eps: float = 1e-6
    vocab: int = VOCAB
    max_position: int = 4096
    theta: float = 10000.0
    yarn_factor: float = 8.0
    yarn_original: int = 512
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def moe_layers(self) -> int:
        return self.layers - 1


TINY = Shape()


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    layers: int = 2
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 32
    width: int = 384
    block: int = 8
    taps: tuple[int, ...] = (1, 3, 4)  # outputs of these target layers, counted from 0
    window: int = 64
    layer_types: tuple[str, ...] = ("sliding_attention", "full_attention")


DRAFT = DraftShape()


def rope_scaling(s: Shape) -> dict:
    return {
        "beta_fast": s.beta_fast,
        "beta_slow": s.beta_slow,
        "factor": s.yarn_factor,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": s.yarn_original,
        "type": "yarn",
    }


def target_config(s: Shape = TINY) -> dict:
    group = {
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
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": BOS,
        "dtype": "bfloat16",
        "eos_token_id": IM_END,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.dense_width,
        "kv_lora_rank": s.latent,
        "max_position_embeddings": s.max_position,
        "model_type": "kimi_k2",
        "moe_intermediate_size": s.expert_width,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": s.heads,
        "num_experts_per_tok": s.top_k,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.heads,
        "num_nextn_predict_layers": 0,
        "pad_token_id": PAD,
        "pretraining_tp": 1,
        "q_lora_rank": s.q_rank,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rope,
        "quantization_config": {
            "config_groups": {"group_0": group},
            "format": "pack-quantized",
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        "rms_norm_eps": s.eps,
        "rope_scaling": rope_scaling(s),
        "rope_theta": s.theta,
        "routed_scaling_factor": s.routed_scale,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": s.value,
        "vocab_size": s.vocab,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "bos_token_id": BOS,
        "dtype": "bfloat16",
        "eos_token_id": IM_END,
        "ignore_index": -100,
        "media_placeholder_token_id": NUM_RANKS + 21,
        "model_type": "kimi_k25",
        "pad_token_id": PAD,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": None,
    }


def drafter_config(s: Shape = TINY, d: DraftShape = DRAFT) -> dict:
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": d.block,
        "bos_token_id": BOS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(d.taps)},
        "dtype": "bfloat16",
        "eos_token_id": IM_END,
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "intermediate_size": d.width,
        "layer_types": list(d.layer_types),
        "max_position_embeddings": s.max_position,
        "max_window_layers": d.layers,
        "model_type": "qwen3",
        "num_attention_heads": d.heads,
        "num_hidden_layers": d.layers,
        "num_key_value_heads": d.kv_heads,
        "num_target_layers": s.layers,
        "pad_token_id": PAD,
        "rms_norm_eps": s.eps,
        "rope_scaling": rope_scaling(s) | {"rope_type": "yarn"},
        "rope_theta": s.theta,
        "sliding_window": d.window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": s.vocab,
    }


def generation_config(s: Shape = TINY) -> dict:
    return {"eos_token_id": IM_END, "max_length": s.max_position}
