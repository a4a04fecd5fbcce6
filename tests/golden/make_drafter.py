"""Makes drafter/: a tiny random DFlash drafter for target/ and the logits it should give.

The drafter here is an implementation of its own, in plain numpy and float64, written from the
published architecture (paper arXiv 2602.06036; package dflash 0.1.0, model.py) and sharing no code
with the engine. Before anything is written it is compared with that package's own torch model, and
with its own float32 run. Run target/'s script first; see README.md beside this file.

Written:
- drafter/config.json, model.safetensors: published keys and tensor names;
- drafter/outputs.npz: logits of slots 1..7 for each switch and context, and one context's K/V;
- drafter/meta.json: seed, versions, hashes, the cases, and how far the comparisons were apart.

Conventions:
- A context of s tokens has positions 0..s-1; the block is the anchor (token s of the sequence) and
  7 masks at positions s..s+7. Slot i's output predicts the token AT position s+i; slot 0's is not
  used.
- The features of a context token are the outputs (the residual stream, not normalised) of the
  target's layers `target_layer_ids`, concatenated in that order.
- Full layers: every slot sees the whole context and the whole block, later slots included.
- Sliding layers of window w: a key is visible iff q - k < w and k - q < w, in absolute positions,
  in context and block alike; with `sliding_causal` also k <= q. So a query sees itself and w-1
  positions before it.
- cos and sin are multiplied by an amplitude: 1.0 (transformers, when mscale equals mscale_all_dim)
  or 1 + 0.1 ln(factor) (an older reading of YaRN that some engines keep for this drafter).
"""

import argparse
import dataclasses
import hashlib
import json
import math
import platform
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

SEED = 30
BLOCK, WINDOW = 8, 16
CONTEXTS = (0, 1, 3, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 150)
NARROW_WINDOW, NARROW_CONTEXTS = 5, (3, 17)  # narrower than the block: k - q < window matters
KV_CONTEXT = 2 * WINDOW  # the context whose keys and values are kept
TAPS = (0, 2)
LAYER_TYPES = ("sliding_attention", "sliding_attention", "full_attention")
HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 32, 80


def config_json(target: dict, mask_token_id: int) -> dict:
    """A drafter's config.json as published, with tiny dimensions."""
    text = target["text_config"]
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": BLOCK,
        "bos_token_id": text["bos_token_id"],
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(TAPS)},
        "dtype": "bfloat16",
        "eos_token_id": text["eos_token_id"],
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": text["hidden_size"],
        "initializer_range": 0.02,
        "intermediate_size": WIDTH,
        "layer_types": list(LAYER_TYPES),
        "max_position_embeddings": text["max_position_embeddings"],
        "max_window_layers": len(LAYER_TYPES),
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": len(LAYER_TYPES),
        "num_key_value_heads": KV_HEADS,
        "num_target_layers": text["num_hidden_layers"],
        "pad_token_id": text["pad_token_id"],
        "rms_norm_eps": 1e-5,
        "rope_scaling": text["rope_scaling"],
        "rope_theta": text["rope_theta"],
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": text["vocab_size"],
    }


def random_tensors(seed: int, hidden: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        values = rng.standard_normal((rows, columns)) * gain / math.sqrt(columns)
        return values.astype(ml_dtypes.bfloat16)

    def norm(size: int, mean: float = 1.0) -> np.ndarray:
        return (mean + 0.2 * rng.standard_normal(size)).astype(ml_dtypes.bfloat16)

    tensors = {
        # Small, so that hidden_norm's epsilon is not lost beside the variance.
        "fc.weight": matrix(hidden, len(TAPS) * hidden, gain=0.01),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for layer in range(len(LAYER_TYPES)):
        for name, tensor in {
            "input_layernorm": norm(hidden),
            "post_attention_layernorm": norm(hidden),
            "self_attn.q_proj": matrix(HEADS * HEAD_DIM, hidden),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, hidden),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, hidden),
            "self_attn.o_proj": matrix(hidden, HEADS * HEAD_DIM),
            # Above 1: attention that prefers some keys shows which ones a slot may see.
            "self_attn.q_norm": norm(HEAD_DIM, mean=1.4),
            "self_attn.k_norm": norm(HEAD_DIM, mean=1.4),
            "mlp.gate_proj": matrix(WIDTH, hidden),
            "mlp.up_proj": matrix(WIDTH, hidden),
            "mlp.down_proj": matrix(hidden, WIDTH),
        }.items():
            tensors[f"layers.{layer}.{name}.weight"] = tensor
    return tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switches:
    """What public sources disagree on, and the window."""

    amplitude: float = 1.0
    sliding_causal: bool = False
    window: int = WINDOW


class Drafter:
    """The published drafter over the target's embedding and head, one sequence, no cache."""

    def __init__(self, config: dict, tensors: dict, embed, lm_head, dtype=np.float64):
        self.config, self.dtype = config, dtype
        self.tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        self.embed, self.lm_head = embed.astype(dtype), lm_head.astype(dtype)

    def logits(self, features: np.ndarray, anchor: int, switches: Switches) -> np.ndarray:
        """features [n_taps, s, D] of the context, the anchor's id -> logits [7, VOCAB]."""
        context = self.context(features)
        s = len(context)
        mask_id = self.config["dflash_config"]["mask_token_id"]
        block = self.embed[[anchor] + [mask_id] * (self.config["block_size"] - 1)]
        key_positions = np.arange(s + len(block))
        for layer, kind in enumerate(self.config["layer_types"]):
            visible = np.ones((len(block), len(key_positions)), bool)
            if kind == "sliding_attention":
                ahead = key_positions[None, :] - key_positions[s:, None]
                visible = np.abs(ahead) < switches.window
                if switches.sliding_causal:
                    visible &= ahead <= 0
            normed = self.norm(block, f"layers.{layer}.input_layernorm")
            block = block + self.attention(layer, normed, context, visible, switches)
            normed = self.norm(block, f"layers.{layer}.post_attention_layernorm")
            gate = self.linear(normed, f"layers.{layer}.mlp.gate_proj")
            up = self.linear(normed, f"layers.{layer}.mlp.up_proj")
            gated = gate / (1 + np.exp(-gate)) * up
            block = block + self.linear(gated, f"layers.{layer}.mlp.down_proj")
        return (self.norm(block, "norm") @ self.lm_head.T)[1:]

    def context(self, features: np.ndarray) -> np.ndarray:
        """[n_taps, s, D] -> [s, D], what every layer makes its context keys and values from."""
        joined = np.concatenate(list(features.astype(self.dtype)), axis=-1)
        return self.norm(self.linear(joined, "fc"), "hidden_norm")

    def keys_values(self, layer: int, x: np.ndarray, positions: np.ndarray, amplitude: float):
        """Both [T, KV, HD]; x [T, D] is the context, or the block after input_layernorm."""
        prefix = f"layers.{layer}.self_attn"
        keys = self.linear(x, f"{prefix}.k_proj").reshape(len(x), KV_HEADS, HEAD_DIM)
        values = self.linear(x, f"{prefix}.v_proj").reshape(keys.shape)
        return self.rotate(self.norm(keys, f"{prefix}.k_norm"), positions, amplitude), values

    def attention(self, layer, block, context, visible, switches) -> np.ndarray:
        prefix, s = f"layers.{layer}.self_attn", len(context)
        block_positions = s + np.arange(len(block))
        amplitude = switches.amplitude
        queries = self.linear(block, f"{prefix}.q_proj")
        queries = queries.reshape(len(block), HEADS, HEAD_DIM)
        queries = self.rotate(self.norm(queries, f"{prefix}.q_norm"), block_positions, amplitude)
        past = self.keys_values(layer, context, np.arange(s), amplitude)
        present = self.keys_values(layer, block, block_positions, amplitude)
        keys, values = (np.concatenate(pair) for pair in zip(past, present, strict=True))
        out = np.empty_like(queries)
        group = queries.shape[1] // keys.shape[1]
        for head in range(queries.shape[1]):
            scores = queries[:, head] @ keys[:, head // group].T * self.dtype(HEAD_DIM**-0.5)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[:, head] = weights @ values[:, head // group]
        return self.linear(out.reshape(len(block), -1), f"{prefix}.o_proj")

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        variance = (x * x).mean(-1, keepdims=True)
        eps = self.dtype(self.config["rms_norm_eps"])
        return x / np.sqrt(variance + eps) * self.tensors[f"{name}.weight"]

    def rotate(self, x: np.ndarray, positions: np.ndarray, amplitude: float) -> np.ndarray:
        """x [T, heads, HD], pairs (x[i], x[i + HD/2]); the angles are float64 in both dtypes."""
        half = x.shape[-1] // 2
        angles = positions[:, None, None] * yarn_frequencies(self.config)
        cos = (amplitude * np.cos(angles)).astype(self.dtype)
        sin = (amplitude * np.sin(angles)).astype(self.dtype)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def yarn_frequencies(config: dict) -> np.ndarray:
    """Radians per position of each of the HD/2 pairs (YaRN over the whole head)."""
    yarn, dim, theta = config["rope_scaling"], config["head_dim"], config["rope_theta"]

    def pair_that_turns(times: float) -> float:
        wavelength = yarn["original_max_position_embeddings"] / times
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(yarn["beta_slow"])), dim - 1)
    pair = np.arange(dim // 2)
    interpolated = np.clip((pair - low) / (high - low), 0, 1)
    plain = theta ** (-2.0 * pair / dim)
    return plain * (interpolated / yarn["factor"] + 1 - interpolated)


def published_logits(config, tensors, embed, lm_head, features, anchor, switches) -> np.ndarray:
    """The same from the dflash package's own torch model, in float32."""
    import torch
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config

    drafter_config = json.loads(json.dumps(config))  # the class writes into what it is given
    drafter_config["sliding_window"] = switches.window
    drafter_config["rope_scaling"]["attention_factor"] = switches.amplitude
    # Unset, the package makes sliding layers causal and full layers not.
    drafter_config["is_causal"] = None if switches.sliding_causal else False
    with torch.no_grad():
        model = DFlashDraftModel(Qwen3Config(**drafter_config)).float().eval()
        state = {name: torch.from_numpy(t.astype(np.float32)) for name, t in tensors.items()}
        model.load_state_dict(state, strict=True)
        ids = [anchor] + [config["dflash_config"]["mask_token_id"]] * (BLOCK - 1)
        hidden = model(
            position_ids=torch.arange(features.shape[1] + BLOCK)[None],
            noise_embedding=torch.from_numpy(embed[ids].astype(np.float32))[None],
            target_hidden=torch.from_numpy(np.concatenate(list(features), axis=-1))[None],
        )
        return model.compute_logits(
            hidden, lambda h: h @ torch.from_numpy(lm_head.astype(np.float32)).T
        )[0, 1:].numpy()


def mistake_sensitivity(config, tensors, embed, lm_head, features, token_ids) -> dict[str, float]:
    """How far some context's logits move when one detail is wrong; refuses if hardly at all."""
    right = Drafter(config, tensors, embed, lm_head)
    swapped = np.split(tensors["fc.weight"], len(TAPS), axis=1)[::-1]
    mistakes = {
        "window_one_more": (right, Switches(window=WINDOW + 1)),
        "window_one_less": (right, Switches(window=WINDOW - 1)),
        "other_causality": (right, Switches(sliding_causal=True)),
        "other_amplitude": (right, Switches(amplitude=1.02)),
        "other_epsilon": (
            Drafter(config | {"rms_norm_eps": 1e-6}, tensors, embed, lm_head),
            Switches(),
        ),
        "taps_in_other_order": (
            Drafter(config, tensors | {"fc.weight": np.concatenate(swapped, 1)}, embed, lm_head),
            Switches(),
        ),
    }
    differences = {}
    for name, (wrong, switches) in mistakes.items():
        differences[name] = max(
            float(np.abs(wrong.logits(*case, switches) - right.logits(*case, Switches())).max())
            for case in ((features[:, :s], int(token_ids[s])) for s in CONTEXTS)
        )
        if differences[name] < 1e-2:
            raise RuntimeError(f"{name} would go unnoticed ({differences[name]:.1e})")
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parent
    parser.add_argument("--target", type=Path, default=here / "target")
    parser.add_argument("--out", type=Path, default=here / "drafter")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    target = json.loads((args.target / "checkpoint" / "config.json").read_text())
    shard = load_file(args.target / "checkpoint" / "model-00002-of-000002.safetensors")
    embed = shard["language_model.model.embed_tokens.weight"]
    lm_head = shard["language_model.lm_head.weight"]
    run = np.load(args.target / "outputs.npz")
    token_ids, features = run["token_ids"], run["hidden"][list(TAPS)]

    # The family reserves 256 ids at the end; the mask is the last but one ([UNK], then [PAD]).
    config = config_json(target, mask_token_id=target["text_config"]["vocab_size"] - 2)
    tensors = random_tensors(SEED, config["hidden_size"])
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})

    scaled = 1 + 0.1 * math.log(config["rope_scaling"]["factor"])
    families = {
        "logits": (CONTEXTS, Switches()),
        "logits_causal": (CONTEXTS, Switches(sliding_causal=True)),
        "logits_scaled": (CONTEXTS, Switches(amplitude=scaled)),
        "logits_causal_scaled": (CONTEXTS, Switches(amplitude=scaled, sliding_causal=True)),
        "logits_narrow": (NARROW_CONTEXTS, Switches(window=NARROW_WINDOW)),
        "logits_narrow_causal": (
            NARROW_CONTEXTS,
            Switches(window=NARROW_WINDOW, sliding_causal=True),
        ),
    }
    exact = Drafter(config, tensors, embed, lm_head)
    single = Drafter(config, tensors, embed, lm_head, np.float32)
    outputs, cases, apart = {}, {}, {"float32_run": 0.0, "published_model": 0.0}
    for name, (contexts, switches) in families.items():
        cases[name] = {"contexts": list(contexts), **dataclasses.asdict(switches)}
        rows = []
        for s in contexts:
            case = features[:, :s], int(token_ids[s]), switches
            rows.append(exact.logits(*case))
            others = {
                "float32_run": single.logits(*case),
                "published_model": published_logits(config, tensors, embed, lm_head, *case),
            }
            for other, logits in others.items():
                apart[other] = max(apart[other], float(np.abs(logits - rows[-1]).max()))
        outputs[name] = np.stack(rows).astype(np.float32)
    if max(apart.values()) > 3e-5:
        raise RuntimeError(f"the implementations disagree: {apart}")
    mistakes = mistake_sensitivity(config, tensors, embed, lm_head, features, token_ids)

    context, positions = exact.context(features[:, :KV_CONTEXT]), np.arange(KV_CONTEXT)
    pairs = [exact.keys_values(i, context, positions, 1.0) for i in range(len(LAYER_TYPES))]
    outputs["context"] = context.astype(np.float32)
    outputs["keys"] = np.stack([keys for keys, _ in pairs]).astype(np.float32)
    outputs["values"] = np.stack([values for _, values in pairs]).astype(np.float32)
    np.savez_compressed(args.out / "outputs.npz", **outputs)

    files = sorted(p for p in args.out.rglob("*") if p.is_file() and p.name != "meta.json")
    meta = {
        "seed": SEED,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "ml_dtypes": ml_dtypes.__version__,
            "safetensors": safetensors.__version__,
            **published_versions(),
        },
        "cases": cases,
        "kv_context": KV_CONTEXT,
        "largest_difference_from": apart,
        "largest_difference_of_a_mistake": mistakes,
        "sha256": {
            str(p.relative_to(args.out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
        },
    }
    (args.out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    print(f"{sum(p.stat().st_size for p in files) / 1e6:.2f} MB; apart: {apart}")


def published_versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("dflash", "torch", "transformers")}


if __name__ == "__main__":
    main()
