"""Writes the drafter in the published DFlash layout and its mask row into the target's embedding.

python3 tiny/export_drafter.py --params work/run/drafter.npz
"""

import argparse
import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from export import EMBED, SHARDS
from paths import ASSETS
from safetensors.numpy import load_file, save_file
from shape import DRAFT, TINY, DraftShape, drafter_config
from special import MASK

PER_LAYER = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
FILE = "model.safetensors"


def write(dp: dict, target: Path, d: DraftShape = DRAFT) -> None:
    """`target`: the target's folder; the drafter goes to its subfolder ``drafter``."""
    folder = target / "drafter"
    folder.mkdir(parents=True, exist_ok=True)
    single = {name: dp[name] for name in ("fc", "hidden_norm", "norm")}
    tensors = {f"{name}.weight": value for name, value in single.items()}
    for i in range(d.layers):
        for name, published in PER_LAYER.items():
            tensors[f"layers.{i}.{published}.weight"] = dp[name][i]
    tensors = {k: np.asarray(v, np.float32).astype(ml_dtypes.bfloat16) for k, v in tensors.items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    (folder / FILE).chmod(0o644)
    (folder / "config.json").write_text(json.dumps(drafter_config(TINY, d), indent=2) + "\n")
    embed = dict(load_file(target / SHARDS[0]))
    rows = np.array(embed[EMBED])
    rows[MASK] = np.asarray(dp["mask"], np.float32).astype(ml_dtypes.bfloat16)
    save_file({EMBED: rows}, target / SHARDS[0], metadata={"format": "pt"})
    (target / SHARDS[0]).chmod(0o644)


def read(target: Path, d: DraftShape = DRAFT) -> dict:
    """The packed drafter as float32 parameters of `drafter`."""
    t = {k: v.astype(np.float32) for k, v in load_file(target / "drafter" / FILE).items()}
    out = {name: t[f"{name}.weight"] for name in ("fc", "hidden_norm", "norm")}
    for name, published in PER_LAYER.items():
        out[name] = np.stack([t[f"layers.{i}.{published}.weight"] for i in range(d.layers)])
    out["mask"] = load_file(target / SHARDS[0])[EMBED][MASK].astype(np.float32)
    return {k: jnp.asarray(v) for k, v in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=Path)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--target", type=Path, default=ASSETS)
    args = parser.parse_args()
    if args.random:
        import drafter

        dp = drafter.init(TINY, DRAFT, seed=0)
    else:
        dp = dict(np.load(args.params))
    write(dp, args.target)


if __name__ == "__main__":
    main()
