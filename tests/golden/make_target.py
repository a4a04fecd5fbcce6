"""Makes target/: a tiny random checkpoint in K2.6's layout and what transformers computes from it.

Needs torch, transformers (>= 5.13, the first release with a native Kimi K2.5/K2.6 class) and
compressed-tensors; see README.md beside this file. The tests only read what it writes:

- target/checkpoint/: config.json, generation_config.json, two shards and their index, with the
  published tensor names, the experts packed by compressed-tensors' own packer;
- target/outputs.npz: token ids, logits, the hidden state after each layer, chosen experts and
  their weights, all of one float32 forward pass over the whole sequence;
- target/variants.npz: logits of the same weights under other configurations;
- target/meta.json: seed, versions, hashes, and margins that say how sharp a test may be.

Two choices make an exact comparison possible. The scales are powers of two, because transformers
rounds code x scale to bfloat16 while an engine may keep codes and scales apart: with a power of two
both are the same number. And the seed is one for which no token's choice of experts is a near tie.
"""

import argparse
import copy
import hashlib
import json
import math
import platform
import re
from pathlib import Path

import compressed_tensors
import numpy as np
import safetensors
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText
from transformers.utils.quantization_config import CompressedTensorsConfig

SEED = 1
TOKENS = 200  # more than three times original_max_position_embeddings
GROUP = 32
# No two dimensions that could be mistaken for each other are equal.
HIDDEN, LAYERS, DENSE_LAYERS, HEADS = 96, 3, 1, 4
Q_RANK, KV_RANK, NOPE, PE, V = 48, 32, 20, 16, 24
DENSE_WIDTH, EXPERTS, TOP_K, EXPERT_WIDTH = 128, 16, 4, 64
# 32 ordinary ids, then the family's 256 special ones at their usual offsets.
SPECIAL = 32
VOCAB = SPECIAL + 256
BOS, EOS, MEDIA, PAD = SPECIAL, SPECIAL + 2, SPECIAL + 21, SPECIAL + 255
VISION, VISION_WIDTH, VISION_HEADS, PATCH, GRID = 16, 32, 2, 4, 4
THETA = 20000.0  # not transformers' default
MIN_EXPERT_MARGIN = 2e-5  # float32 noise in a router score is a tenth of this or less

ROPE_SCALING = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# The same weights read under another configuration: each names what a test of it would catch.
VARIANTS = {
    "no_rope_scaling": {"rope_scaling": None},
    "unequal_mscale": {"rope_scaling": {**ROPE_SCALING, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "wide_ramp": {"rope_scaling": {**ROPE_SCALING, "beta_fast": 2.0, "beta_slow": 0.05}},
    "weights_not_normalised": {"norm_topk_prob": False},
}
VARIANT_POSITIONS = list(range(0, TOKENS, 9)) + [TOKENS - 1]


def config_json(**text_overrides) -> dict:
    """The published config.json with tiny dimensions."""
    quantization = {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": GROUP,
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
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": BOS,
        "dtype": "bfloat16",
        "eos_token_id": EOS,
        "ep_size": 1,
        "first_k_dense_replace": DENSE_LAYERS,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": DENSE_WIDTH,
        "kv_lora_rank": KV_RANK,
        "max_position_embeddings": 512,
        "model_type": "kimi_k2",
        "moe_intermediate_size": EXPERT_WIDTH,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "num_nextn_predict_layers": 0,
        "pad_token_id": PAD,
        "pretraining_tp": 1,
        "q_lora_rank": Q_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": PE,
        "quantization_config": quantization,
        "rms_norm_eps": 1e-5,
        "rope_scaling": ROPE_SCALING,
        "rope_theta": THETA,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "4.56.2",
        "use_cache": True,
        "v_head_dim": V,
        "vocab_size": VOCAB,
        **text_overrides,
    }
    # The published names (vt_*, init_*, mm_*) beside those that transformers' own class reads.
    vision = {
        "model_type": "kimi_k25_vision",
        "patch_size": PATCH,
        "vt_hidden_size": VISION,
        "hidden_size": VISION,
        "vt_intermediate_size": VISION_WIDTH,
        "intermediate_size": VISION_WIDTH,
        "vt_num_attention_heads": VISION_HEADS,
        "num_attention_heads": VISION_HEADS,
        "vt_num_hidden_layers": 1,
        "num_hidden_layers": 1,
        "init_pos_emb_height": GRID,
        "pos_emb_height": GRID,
        "init_pos_emb_width": GRID,
        "pos_emb_width": GRID,
        "init_pos_emb_time": 4,
        "pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "video_attn_type": "spatial_temporal",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": VISION,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": HIDDEN,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "bos_token_id": BOS,
        "dtype": "bfloat16",
        "eos_token_id": EOS,
        "ignore_index": -100,
        "image_token_id": MEDIA,
        "media_placeholder_token_id": MEDIA,
        "model_type": "kimi_k25",
        "pad_token_id": PAD,
        "projection_hidden_size": VISION,
        "text_config": text,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "video_token_id": VOCAB,
        "vision_config": vision,
    }


class Draw:
    """Random tensors in bfloat16, the dtype they are stored in."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        """Rows that map unit-variance inputs to outputs of standard deviation `gain`."""
        scale = gain / math.sqrt(math.prod(shape[1:]))
        return self._stored(self.rng.standard_normal(shape) * scale)

    def vector(self, *shape: int, mean: float = 0.0, std: float = 0.2) -> torch.Tensor:
        return self._stored(mean + std * self.rng.standard_normal(shape))

    def norm(self, size: int) -> torch.Tensor:
        return self.vector(size, mean=1.0)

    def packed(self, rows: int, columns: int, gain: float) -> dict[str, torch.Tensor]:
        """An INT4 matrix: all sixteen codes, one power-of-two scale per row and group."""
        codes = self.rng.integers(-8, 8, (rows, columns), dtype=np.int8)
        # Codes have standard deviation 4.6, hence a mean scale of gain / (4.6 sqrt(columns)).
        middle = round(math.log2(gain / (4.6 * math.sqrt(columns))))
        exponents = middle + self.rng.integers(-2, 2, (rows, columns // GROUP))
        return {
            "weight_packed": pack_to_int32(torch.from_numpy(codes), 4),
            "weight_scale": torch.from_numpy(2.0**exponents).to(torch.bfloat16),
            "weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
        }

    @staticmethod
    def _stored(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(torch.bfloat16)


def text_tensors(draw: Draw) -> dict[str, torch.Tensor]:
    tensors = {
        # Small, so that the epsilon of the first norm is not lost beside the variance.
        "model.embed_tokens.weight": draw.vector(VOCAB, HIDDEN, std=0.1),
        "model.norm.weight": draw.norm(HIDDEN),
        "lm_head.weight": draw.matrix(VOCAB, HIDDEN, gain=1.5),
    }
    for layer in range(LAYERS):
        # The last layer's latents are small, for the same reason: the norms of the latents have an
        # epsilon of their own.
        latent_gain = 0.03 if layer == LAYERS - 1 else 1.0
        kv_latent = draw.matrix(KV_RANK, HIDDEN, gain=latent_gain)
        attention = {
            "q_a_proj.weight": draw.matrix(Q_RANK, HIDDEN, gain=latent_gain),
            "q_a_layernorm.weight": draw.norm(Q_RANK),
            "q_b_proj.weight": draw.matrix(HEADS * (NOPE + PE), Q_RANK, gain=1.3),
            "kv_a_proj_with_mqa.weight": torch.cat([kv_latent, draw.matrix(PE, HIDDEN)]),
            "kv_a_layernorm.weight": draw.norm(KV_RANK),
            "kv_b_proj.weight": draw.matrix(HEADS * (NOPE + V), KV_RANK, gain=1.3),
            "o_proj.weight": draw.matrix(HIDDEN, HEADS * V, gain=0.5),
        }
        block = {
            "input_layernorm.weight": draw.norm(HIDDEN),
            "post_attention_layernorm.weight": draw.norm(HIDDEN),
            **{f"self_attn.{name}": tensor for name, tensor in attention.items()},
        }
        if layer < DENSE_LAYERS:
            block |= mlp_tensors(draw, "mlp", DENSE_WIDTH)
        else:
            block["mlp.gate.weight"] = draw.matrix(EXPERTS, HIDDEN)
            # Large beside the spread of the scores, so that a bias rounded to bfloat16 or one that
            # leaks from the choice into the weights cannot pass.
            bias = 2.0 + 0.15 * draw.rng.standard_normal(EXPERTS)
            block["mlp.gate.e_score_correction_bias"] = torch.from_numpy(bias).float()
            block |= mlp_tensors(draw, "mlp.shared_experts", EXPERT_WIDTH)
            for expert in range(EXPERTS):
                for name, rows, columns, gain in (
                    ("gate_proj", EXPERT_WIDTH, HIDDEN, 1.0),
                    ("up_proj", EXPERT_WIDTH, HIDDEN, 1.0),
                    ("down_proj", HIDDEN, EXPERT_WIDTH, 0.25),
                ):
                    for part, tensor in draw.packed(rows, columns, gain).items():
                        block[f"mlp.experts.{expert}.{name}.{part}"] = tensor
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def mlp_tensors(draw: Draw, prefix: str, width: int) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.gate_proj.weight": draw.matrix(width, HIDDEN),
        f"{prefix}.up_proj.weight": draw.matrix(width, HIDDEN),
        f"{prefix}.down_proj.weight": draw.matrix(HIDDEN, width, gain=0.5),
    }


def vision_tensors(draw: Draw) -> dict[str, torch.Tensor]:
    """A vision tower and projector, which a text engine has to recognise and skip."""
    merged = 4 * VISION
    blocks = "vision_tower.encoder.blocks.0"
    linears = {
        f"{blocks}.wqkv": (3 * VISION, VISION),
        f"{blocks}.wo": (VISION, VISION),
        f"{blocks}.mlp.fc0": (VISION_WIDTH, VISION),
        f"{blocks}.mlp.fc1": (VISION, VISION_WIDTH),
        "vision_tower.patch_embed.proj": (VISION, 3, PATCH, PATCH),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (HIDDEN, merged),
    }
    norms = (
        f"{blocks}.norm0",
        f"{blocks}.norm1",
        "vision_tower.encoder.final_layernorm",
        "mm_projector.pre_norm",
    )
    tensors = {"vision_tower.patch_embed.pos_emb.weight": draw.vector(GRID, GRID, VISION)}
    for name, shape in linears.items():
        tensors |= {f"{name}.weight": draw.matrix(*shape), f"{name}.bias": draw.vector(shape[0])}
    for name in norms:
        tensors |= {f"{name}.weight": draw.norm(VISION), f"{name}.bias": draw.vector(VISION)}
    return tensors


def write_checkpoint(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = Draw(seed)
    text = text_tensors(draw)
    # As published, the second shard holds the embedding, the final norm, the head and the vision
    # part; the last layer comes there too, so that both shards hold experts.
    last = f"language_model.model.layers.{LAYERS - 1}."
    first = {k: v for k, v in text.items() if ".layers." in k and not k.startswith(last)}
    second = {k: v for k, v in text.items() if k not in first} | vision_tensors(draw)
    weight_map, size = {}, 0
    for number, tensors in enumerate((first, second), start=1):
        name = f"model-{number:05d}-of-000002.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index, indent=0)
    write_json(folder / "config.json", config_json())
    write_json(folder / "generation_config.json", {"eos_token_id": EOS, "max_length": 512})


def write_json(path: Path, value, indent: int = 2) -> None:
    path.write_text(json.dumps(value, indent=indent) + "\n")


def load(folder: Path, **text_overrides) -> torch.nn.Module:
    """transformers' own model of `folder`, in float32."""
    # A copy, because the configuration class writes into the dictionaries that it is given.
    config = transformers.AutoConfig.for_model(**copy.deepcopy(config_json(**text_overrides)))
    theta = config.text_config.rope_parameters["rope_theta"]
    if theta != THETA:
        raise RuntimeError(f"transformers did not read rope_theta: {theta}")
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        # Without dequantize=True the ignore list makes it look for packed vision weights.
        quantization_config=CompressedTensorsConfig(dequantize=True),
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            raise RuntimeError(
                f"transformers did not read the checkpoint: {problem} {info[problem]}"
            )
    return model.float().eval()  # dequantised experts arrive in bfloat16


def check_experts(model: torch.nn.Module, folder: Path) -> None:
    """transformers' dequantised experts are exactly code x scale, here by plain numpy."""
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as shard:
            for name in shard.keys():
                match = re.fullmatch(
                    r"language_model.model.layers.(\d+).mlp.experts.(\d+).(\w+).weight_packed", name
                )
                if not match:
                    continue
                layer, expert, part = int(match[1]), int(match[2]), match[3]
                experts = model.model.language_model.layers[layer].mlp.experts
                if part == "down_proj":
                    found = experts.down_proj[expert]
                else:
                    gate, up = experts.gate_up_proj[expert].chunk(2)
                    found = gate if part == "gate_proj" else up
                words = shard.get_tensor(name).numpy().view(np.uint32)
                codes = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
                codes = codes.reshape(len(words), -1).astype(np.float64) - 8
                scale = shard.get_tensor(name.replace("_packed", "_scale")).double().numpy()
                if not np.array_equal(found.detach().numpy(), codes * np.repeat(scale, GROUP, 1)):
                    raise RuntimeError(f"{name}: transformers does not compute code x scale")


@torch.no_grad()
def forward(model: torch.nn.Module, token_ids: np.ndarray) -> dict[str, np.ndarray]:
    """One pass over the whole sequence; what hooks see at each layer and router."""
    hidden, scores, experts, weights = [], [], [], []

    def layer_hook(module, inputs, output):
        hidden.append(output[0] if isinstance(output, tuple) else output)

    def router_hook(module, inputs, output):
        logits, top_weights, top_experts = output
        scores.append(logits.sigmoid() + module.e_score_correction_bias)
        order = top_experts.argsort(dim=-1)  # ascending expert ids: the order carries no meaning
        experts.append(top_experts.gather(-1, order))
        weights.append(top_weights.gather(-1, order))

    handles = []
    for layer in model.model.language_model.layers:
        handles.append(layer.register_forward_hook(layer_hook))
        if hasattr(layer.mlp, "gate"):
            handles.append(layer.mlp.gate.register_forward_hook(router_hook))
    logits = model(input_ids=torch.from_numpy(token_ids)[None].long(), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    top = torch.stack(scores).sort(dim=-1, descending=True).values
    return {
        "logits": logits.float().numpy(),
        "hidden": torch.stack([h[0] if h.dim() == 3 else h for h in hidden]).numpy(),
        "experts": torch.stack(experts).to(torch.uint8).numpy(),
        "expert_weights": torch.stack(weights).numpy(),
        "expert_margins": (top[..., TOP_K - 1] - top[..., TOP_K]).numpy(),
    }


def epsilon_sensitivity(
    model: torch.nn.Module, token_ids: np.ndarray, logits: np.ndarray
) -> dict[str, float]:
    """How far logits move when an epsilon is mistaken for the other one (1e-6 and 1e-5)."""
    norms = {
        "latent_norms": [
            norm
            for layer in model.model.language_model.layers
            for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm)
        ],
        "first_norm": [model.model.language_model.layers[0].input_layernorm],
    }
    differences = {}
    for name, modules in norms.items():
        right = modules[0].variance_epsilon
        for module in modules:
            module.variance_epsilon = {1e-6: 1e-5, 1e-5: 1e-6}[right]
        difference = np.abs(forward(model, token_ids)["logits"] - logits).max()
        for module in modules:
            module.variance_epsilon = right
        if difference < 1e-3:
            raise RuntimeError(f"another epsilon in {name} would go unnoticed ({difference:.1e})")
        differences[name] = float(difference)
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "target")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # one order of summation
    checkpoint = args.out / "checkpoint"
    write_checkpoint(checkpoint, args.seed)

    rng = np.random.default_rng(args.seed + 1)
    text_ids = np.setdiff1d(np.arange(VOCAB), [MEDIA])  # the class would read MEDIA as an image
    token_ids = rng.choice(text_ids, TOKENS).astype(np.int32)
    model = load(checkpoint)
    check_experts(model, checkpoint)
    result = forward(model, token_ids)
    margin = float(result.pop("expert_margins").min())
    if margin < MIN_EXPERT_MARGIN:
        raise RuntimeError(f"a choice of experts is a near tie ({margin:.1e}): take another seed")
    np.savez_compressed(args.out / "outputs.npz", token_ids=token_ids, **result)

    sensitivity = epsilon_sensitivity(model, token_ids, result["logits"])
    variants = {"positions": np.array(VARIANT_POSITIONS, np.int32)}
    differences, margins = {}, {"outputs": margin}
    for name, overrides in VARIANTS.items():
        other = forward(load(checkpoint, **overrides), token_ids)
        margins[name] = float(other["expert_margins"].min())
        if margins[name] < MIN_EXPERT_MARGIN:
            raise RuntimeError(f"{name}: a choice of experts is a near tie: take another seed")
        variants[name] = other["logits"][VARIANT_POSITIONS]
        differences[name] = float(np.abs(other["logits"] - result["logits"]).max())
        if differences[name] < 0.1:
            raise RuntimeError(f"{name} barely changes the logits: it would test nothing")
    np.savez_compressed(args.out / "variants.npz", **variants)

    files = sorted(p for p in args.out.rglob("*") if p.is_file() and p.name != "meta.json")
    meta = {
        "seed": args.seed,
        "tokens": TOKENS,
        "dtype": "float32",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "compressed-tensors": compressed_tensors.__version__,
            "safetensors": safetensors.__version__,
            "numpy": np.__version__,
        },
        "smallest_expert_margin": margins,
        "largest_logit": float(np.abs(result["logits"]).max()),
        "largest_difference_of_another_epsilon": sensitivity,
        "variants": VARIANTS,
        "largest_difference_of_variants": differences,
        "sha256": {
            str(p.relative_to(args.out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
        },
    }
    write_json(args.out / "meta.json", meta)
    total = sum(p.stat().st_size for p in files)
    print(f"{len(files)} files, {total / 1e6:.2f} MB; smallest expert margin {margin:.1e}")


if __name__ == "__main__":
    main()
