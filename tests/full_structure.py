"""Makes a checkpoint with all of K2.6's structure and little of its size.

    python3 tests/full_structure.py FOLDER

61 layers, 384 experts, 64 shards and the published names: 208,000 tensors. The dimensions are cut
so that it takes about 2 GB.
"""

import sys
from pathlib import Path

import checkpoint_factory

from kimi_jax.config import PRESETS, ModelConfig

REAL = PRESETS["kimi-k2.6"]


def config(*, hidden_size: int = 256, expert_width: int = 192) -> ModelConfig:
    """Experts of 83 KB and, in all, 2 GB."""
    return checkpoint_factory.tiny_config(
        num_hidden_layers=REAL.num_hidden_layers,
        first_k_dense_replace=REAL.first_k_dense_replace,
        n_routed_experts=REAL.n_routed_experts,
        num_experts_per_tok=REAL.num_experts_per_tok,
        hidden_size=hidden_size,
        moe_intermediate_size=expert_width,
        num_attention_heads=8,
        q_lora_rank=64,
        kv_lora_rank=32,
        intermediate_size=512,
        vocab_size=2048,
        bos_token_id=1792,
        eos_token_ids=(1793, 1794),
        pad_token_id=2047,
    )


def write(folder: Path, **sizes: int) -> ModelConfig:
    """Writes it with the image encoder's names too; returns its configuration."""
    made = config(**sizes)
    checkpoint_factory.write_model(folder, made, shards=64, keep=False)
    return made


if __name__ == "__main__":
    write(Path(sys.argv[1]))
