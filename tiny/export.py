"""Writes the target as a Hugging Face folder in the published layout, and reads it back.

``python3 tiny/export.py --params work/run/target.npz`` packs trained float32 masters (routed
experts to INT4, the rest to bfloat16). ``embed_tokens`` has a shard of its own: drafter training
rewrites one row of it. ``--random`` writes untrained weights, for trying the layout.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import model
import numpy as np
from paths import ASSETS
from quant import GROUP, dequantize, pack, quantize, unpack
from safetensors.numpy import load_file, save_file
from shape import TINY, Shape, generation_config, target_config

EMBED = "language_model.model.embed_tokens.weight"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PER_LAYER = {  # stacked over all layers
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q_a": "self_attn.q_a_proj.weight",
    "q_norm": "self_attn.q_a_layernorm.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_norm": "self_attn.kv_a_layernorm.weight",
    "kv_b": "self_attn.kv_b_proj.weight",
    "o": "self_attn.o_proj.weight",
}
DENSE = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
EXPERT = {"e_gate": "gate_proj", "e_up": "up_proj", "e_down": "down_proj"}
SHARED = {"s_gate": "gate_proj", "s_up": "up_proj", "s_down": "down_proj"}


def _bf16(x) -> np.ndarray:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)


def tensors_of(params: dict, s: Shape) -> dict[str, np.ndarray]:
    """Published names -> arrays."""
    layer = "language_model.model.layers.{}.".format
    out = {
        EMBED: _bf16(params["embed"]),
        "language_model.model.norm.weight": _bf16(params["norm"]),
        "language_model.lm_head.weight": _bf16(params["head"]),
    }
    for i in range(s.layers):
        for name, published in PER_LAYER.items():
            out[layer(i) + published] = _bf16(params[name][i])
    for name, published in DENSE.items():
        out[layer(0) + f"mlp.{published}.weight"] = _bf16(params[name])
    for j in range(s.moe_layers):
        mlp = layer(j + 1) + "mlp."
        out[mlp + "gate.weight"] = _bf16(params["router"][j])
        bias = np.asarray(params["router_bias"][j], np.float32)
        out[mlp + "gate.e_score_correction_bias"] = bias
        for name, published in SHARED.items():
            out[mlp + f"shared_experts.{published}.weight"] = _bf16(params[name][j])
        for name, published in EXPERT.items():
            codes, scales = quantize(jnp.asarray(params[name][j], jnp.float32))
            for e in range(s.experts):
                expert = mlp + f"experts.{e}.{published}."
                out[expert + "weight_packed"] = pack(np.asarray(codes[e]))
                out[expert + "weight_scale"] = np.asarray(scales[e])
                out[expert + "weight_shape"] = np.array(codes[e].shape, np.int32)
    return out


def write(params: dict, folder: Path, s: Shape = TINY) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(params, s)
    shards = ({EMBED: tensors.pop(EMBED)}, tensors)
    weight_map, size = {}, 0
    for file, content in zip(SHARDS, shards, strict=True):
        save_file(content, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(content, file)
        size += sum(t.nbytes for t in content.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    configs = {"config": target_config(s), "generation_config": generation_config(s)}
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def read(folder: Path, s: Shape = TINY) -> dict:
    """The packed folder as parameters of `model`: float32, experts dequantised."""
    t = {k: v for file in SHARDS for k, v in load_file(folder / file).items()}
    layer = "language_model.model.layers.{}.".format

    def get(name: str) -> np.ndarray:
        return np.asarray(t[name]).astype(np.float32)

    def expert(name: str) -> np.ndarray:
        codes = unpack(t[name + ".weight_packed"]).reshape(-1, GROUP)
        return (codes * get(name + ".weight_scale").reshape(-1, 1)).reshape(shape_of(name))

    def shape_of(name: str) -> tuple[int, ...]:
        return tuple(t[name + ".weight_shape"].tolist())

    moe = [layer(j + 1) + "mlp." for j in range(s.moe_layers)]
    p = {
        "embed": get(EMBED),
        "norm": get("language_model.model.norm.weight"),
        "head": get("language_model.lm_head.weight"),
        "router": np.stack([get(m + "gate.weight") for m in moe]),
        "router_bias": np.stack([get(m + "gate.e_score_correction_bias") for m in moe]),
    }
    for name, published in PER_LAYER.items():
        p[name] = np.stack([get(layer(i) + published) for i in range(s.layers)])
    for name, published in DENSE.items():
        p[name] = get(layer(0) + f"mlp.{published}.weight")
    for name, published in SHARED.items():
        p[name] = np.stack([get(m + f"shared_experts.{published}.weight") for m in moe])
    for name, published in EXPERT.items():
        p[name] = np.stack(
            [
                np.stack([expert(m + f"experts.{e}.{published}") for e in range(s.experts)])
                for m in moe
            ]
        )
    return {k: jnp.asarray(v) for k, v in p.items()}


@jax.jit
def engine_view(params: dict) -> dict:
    """Float32 masters as the engine will see them: bfloat16-rounded, experts fake-quantised."""
    out = {}
    for name, value in params.items():
        value = jnp.asarray(value, jnp.float32)
        if name in model.ROUTED:
            out[name] = dequantize(*quantize(value))
        elif name == "router_bias":
            out[name] = value
        else:
            out[name] = jax.lax.reduce_precision(value, 8, 7)  # as bfloat16
    return out


def check(params: dict, folder: Path, s: Shape = TINY) -> None:
    """logits(packed) == logits(fake-quantised), float32."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 1792, (2, 64)))
    packed = model.forward(read(folder, s), tokens, shape=s)[0]
    fake = model.forward(engine_view(params), tokens, shape=s)[0]
    if not np.array_equal(np.asarray(packed), np.asarray(fake)):
        raise ValueError(f"{folder}: packed weights differ from the fake-quantised ones")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=Path)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--folder", type=Path, default=ASSETS)
    args = parser.parse_args()
    params = model.init(TINY, seed=0) if args.random else dict(np.load(args.params))
    write(params, args.folder)
    check(params, args.folder)


if __name__ == "__main__":
    main()
