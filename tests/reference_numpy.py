"""K2.6's text model in plain numpy and float64: slow, naive, and independent of the engine.

Written from the published description (DeepSeek-V2 and V3 papers for MLA and the router, the YaRN
paper for the rotary frequencies, compressed-tensors for the packing). Nothing is imported from
kimi_jax, and configurations are the dictionaries of a published config.json, so that an error there
cannot hide here.
"""

import math
from pathlib import Path

import ml_dtypes  # noqa: F401  (teaches numpy the name "bfloat16", which safetensors asks for)
import numpy as np
from safetensors.numpy import load_file


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint folder, as stored."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def unpack_int4(words: np.ndarray) -> np.ndarray:
    """int32 [rows, columns / 8] -> values -8..7 [rows, columns]; column c is nibble c % 8."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(15)
    return nibbles.reshape(*words.shape[:-1], -1).astype(np.int64) - 8


def dequantise(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """value x scale, one scale per row and group of columns, without any rounding."""
    group = values.shape[-1] // scales.shape[-1]
    return values * np.repeat(scales.astype(np.float64), group, axis=-1)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def temperature(scaling: dict | None, key: str) -> float:
    """YaRN's 0.1 m ln(factor) + 1 for m = scaling[key]."""
    return 1.0 if scaling is None else 0.1 * scaling[key] * math.log(scaling["factor"]) + 1.0


def softmax_scale(text: dict) -> float:
    width = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
    return width**-0.5 * temperature(text["rope_scaling"], "mscale_all_dim") ** 2


def rotary_frequencies(dim: int, theta: float, scaling: dict | None) -> np.ndarray:
    """Radians per position of the dim / 2 pairs, one pair at a time."""
    frequencies = []
    for pair in range(dim // 2):
        frequency = theta ** (-2 * pair / dim)
        if scaling is not None:
            turns = scaling["original_max_position_embeddings"] / (2 * math.pi)
            low = math.floor(dim * math.log(turns / scaling["beta_fast"]) / (2 * math.log(theta)))
            high = math.ceil(dim * math.log(turns / scaling["beta_slow"]) / (2 * math.log(theta)))
            low, high = max(low, 0), min(high, dim - 1)
            kept = 1 - min(max((pair - low) / (high - low), 0), 1)  # 1: turns often, left alone
            frequency = frequency * kept + frequency / scaling["factor"] * (1 - kept)
        frequencies.append(frequency)
    return np.array(frequencies)


def rotary(
    positions: np.ndarray, dim: int, theta: float, scaling: dict | None
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [T, dim / 2]."""
    angles = np.outer(np.asarray(positions, np.float64), rotary_frequencies(dim, theta, scaling))
    amplitude = temperature(scaling, "mscale") / temperature(scaling, "mscale_all_dim")
    return amplitude * np.cos(angles), amplitude * np.sin(angles)


def rotate_interleaved(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Pairs (x[2i], x[2i + 1]) as complex numbers: x [T, dim] times e^{i angle}."""
    turned = (x[:, 0::2] + 1j * x[:, 1::2]) * (cos + 1j * sin)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def route(
    x: np.ndarray, router: np.ndarray, bias: np.ndarray, *, k: int, normalise: bool, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """x [T, D] -> expert ids [T, K], best first (lower id on a tie), and their weights [T, K]."""
    scores = sigmoid(x @ router.T)
    ids = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * scale


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    g = x @ gate.T
    return (g * sigmoid(g) * (x @ up.T)) @ down.T


def attention(
    x: np.ndarray, weights: dict[str, np.ndarray], text: dict, *, latent_eps: float = 1e-6
) -> np.ndarray:
    """Naive causal MLA over a whole sequence from position 0: normed x [T, D] -> [T, D]."""
    nope, pe, v_dim = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    heads, rank = text["num_attention_heads"], text["kv_lora_rank"]
    cos, sin = rotary(np.arange(len(x)), pe, text["rope_theta"], text["rope_scaling"])
    q = rms_norm(x @ weights["q_a_proj"].T, weights["q_a_layernorm"], latent_eps)
    q = (q @ weights["q_b_proj"].T).reshape(len(x), heads, nope + pe)
    joint = x @ weights["kv_a_proj_with_mqa"].T
    latent = rms_norm(joint[:, :rank], weights["kv_a_layernorm"], latent_eps)
    k_pe = rotate_interleaved(joint[:, rank:], cos, sin)
    kv = (latent @ weights["kv_b_proj"].T).reshape(len(x), heads, nope + v_dim)
    future = np.triu(np.ones((len(x), len(x)), bool), k=1)
    outs = []
    for head in range(heads):
        q_pe = rotate_interleaved(q[:, head, nope:], cos, sin)
        scores = q[:, head, :nope] @ kv[:, head, :nope].T + q_pe @ k_pe.T
        scores = np.where(future, -np.inf, scores * softmax_scale(text))
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(probs / probs.sum(-1, keepdims=True) @ kv[:, head, nope:])
    return np.concatenate(outs, axis=-1) @ weights["o_proj"].T


class Target:
    """The whole text model, over the tensors of a published checkpoint."""

    def __init__(self, config: dict, tensors: dict[str, np.ndarray]):
        self.text = config.get("text_config", config)
        self.tensors = {
            name.removeprefix("language_model."): tensor for name, tensor in tensors.items()
        }

    def tensor(self, name: str) -> np.ndarray:
        if f"{name}_packed" in self.tensors:
            values = unpack_int4(self.tensors[f"{name}_packed"])
            return dequantise(values, self.tensors[f"{name}_scale"])
        return self.tensors[name].astype(np.float64)

    def mlp(self, prefix: str, x: np.ndarray) -> np.ndarray:
        parts = (self.tensor(f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down"))
        return swiglu(x, *parts)

    def moe(self, prefix: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, weights = route(
            x,
            self.tensor(f"{prefix}.gate.weight"),
            self.tensor(f"{prefix}.gate.e_score_correction_bias"),
            k=self.text["num_experts_per_tok"],
            normalise=self.text["norm_topk_prob"],
            scale=self.text["routed_scaling_factor"],
        )
        out = self.mlp(f"{prefix}.shared_experts", x)
        for expert in range(self.text["n_routed_experts"]):
            share = np.where(ids == expert, weights, 0).sum(-1, keepdims=True)
            if share.any():
                out = out + share * self.mlp(f"{prefix}.experts.{expert}", x)
        return out, ids, weights

    def forward(self, token_ids: np.ndarray) -> dict[str, np.ndarray]:
        """logits [T, VOCAB], hidden [L, T, D], experts and expert_weights [L_moe, T, K]."""
        text = self.text
        h = self.tensor("model.embed_tokens.weight")[token_ids]
        hidden, experts, expert_weights = [], [], []
        for layer in range(text["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            weights = {
                name: self.tensor(f"{prefix}.self_attn.{name}.weight")
                for name in (
                    *("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa"),
                    *("kv_a_layernorm", "kv_b_proj", "o_proj"),
                )
            }
            h = h + attention(self.norm(h, f"{prefix}.input_layernorm"), weights, text)
            normed = self.norm(h, f"{prefix}.post_attention_layernorm")
            if layer < text["first_k_dense_replace"]:
                h = h + self.mlp(f"{prefix}.mlp", normed)
            else:
                out, ids, shares = self.moe(f"{prefix}.mlp", normed)
                h = h + out
                experts.append(ids)
                expert_weights.append(shares)
            hidden.append(h)
        logits = self.norm(h, "model.norm") @ self.tensor("lm_head.weight").T
        return {
            "logits": logits,
            "hidden": np.stack(hidden),
            "experts": np.stack(experts),
            "expert_weights": np.stack(expert_weights),
        }

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.tensor(f"{name}.weight"), self.text["rms_norm_eps"])
