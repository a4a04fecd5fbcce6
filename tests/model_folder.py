"""A small checkpoint folder with a byte tokenizer, for tests that go through files."""

import base64
import dataclasses
from pathlib import Path

import checkpoint_factory

from kimi_jax.config import DrafterConfig, ModelConfig

CONFIG: ModelConfig = checkpoint_factory.tiny_config(
    num_hidden_layers=2,
    vocab_size=512,
    max_position_embeddings=128,
    bos_token_id=256,
    eos_token_ids=(257, 258),
    pad_token_id=511,
)

DRAFTER: DrafterConfig = checkpoint_factory.tiny_drafter_config(
    vocab_size=512, mask_token_id=510, target_layer_ids=(0, 1), max_position_embeddings=128
)


def write(folder: Path) -> Path:
    """The weights are random; every byte is a token, and the 256 special slots follow."""
    checkpoint_factory.write_model(folder, CONFIG)
    lines = [b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    return folder


def write_drafter(folder: Path, **changes) -> Path:
    """A drafter with random weights for `CONFIG`."""
    checkpoint_factory.write_drafter(folder, dataclasses.replace(DRAFTER, **changes))
    return folder
