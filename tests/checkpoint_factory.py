"""Synthetic Hugging Face checkpoints with the published tensor names, and ways to damage them.

Independent of `kimi_jax.checkpoint`: names, packing and the safetensors format are written out here
once more, so that a test that reads what this file wrote compares two descriptions of the format.

    written = write_model(folder, config, shards=3)      # {name: array}, as stored
    truncate_shard(folder, 1)
    with pytest.raises(CheckpointError): ...
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kimi_jax.config import DrafterConfig, ModelConfig, to_hf

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPE_NAMES = {
    BF16: "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "U8",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Made = tuple[str, Callable[[], np.ndarray]]  # a tensor's name and how to make it


def write_model(
    folder: Path,
    config: ModelConfig,
    *,
    shards: int = 2,
    prefix: str = "language_model.",
    vision: bool = True,
    index: bool = True,
    weight_shape: Any = np.int32,
    seed: int = 0,
    keep: bool = True,
) -> dict[str, np.ndarray]:
    """Writes a target checkpoint.

    Args:
        folder: created if need be.
        config: its dimensions; small ones, any number of layers and experts.
        shards: files to spread the tensors over, in order.
        prefix: "language_model." as in the multimodal releases, or "" as in K2-Thinking.
        vision: whether to add a few tensors of image encoder and projector.
        index: False for a single `model.safetensors` without an index.
        weight_shape: dtype of the experts' `weight_shape`, or None to leave them out.
        seed: of the values.
        keep: whether to return the arrays; False for checkpoints larger than memory.

    Returns:
        the arrays as stored, by their names in the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    eos = {"max_length": config.max_position_embeddings, "eos_token_id": config.eos_token_ids[-1]}
    (folder / "generation_config.json").write_text(json.dumps(eos))
    tensors = list(_model_tensors(config, prefix, weight_shape, np.random.default_rng(seed)))
    if vision:
        tensors += _vision_tensors(np.random.default_rng(seed + 1))
    return _write_shards(folder, tensors, shards, index, keep)


def write_drafter(
    folder: Path,
    config: DrafterConfig,
    *,
    shards: int = 1,
    prefix: str = "",
    index: bool = False,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Writes a drafter checkpoint; see `write_model`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    rng = np.random.default_rng(seed)
    tensors = [(prefix + n, make) for n, make in _drafter_tensors(config, rng)]
    return _write_shards(folder, tensors, shards, index, keep=True)


def tiny_config(**changes: Any) -> ModelConfig:
    """A target in which no two dimensions that could be confused are equal."""
    sizes = {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "intermediate_size": 112,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "vocab_size": 288,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "bos_token_id": 32,
        "eos_token_ids": (33, 34),
        "pad_token_id": 287,
    }
    return ModelConfig(**sizes | changes)


def tiny_drafter_config(**changes: Any) -> DrafterConfig:
    """A drafter for `tiny_config`."""
    sizes = {
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "rms_norm_eps": 1e-5,
        "vocab_size": 288,
        "block_size": 4,
        "mask_token_id": 286,
        "target_layer_ids": (2, 0, 1),
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 16,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
    }
    return DrafterConfig(**sizes | changes)


def pack(values: np.ndarray) -> np.ndarray:
    """Values -8..7 [rows, columns] -> int32 [rows, columns / 8], the first column lowest."""
    codes = (values.astype(np.int64) + 8).reshape(*values.shape[:-1], -1, 8)
    words = sum(codes[..., i] << (4 * i) for i in range(8))
    return np.asarray(words).astype(np.uint32).view(np.int32)


def read_shard(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one file, in file order."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        values = np.frombuffer(data[start:end], DTYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"]).copy()
    return tensors


def shard_paths(folder: Path) -> list[Path]:
    """The folder's shards in order."""
    return sorted(folder.glob("*.safetensors"))


def delete_shard(folder: Path, number: int) -> str:
    """Deletes a shard; returns its name."""
    path = shard_paths(folder)[number]
    path.unlink()
    return path.name


def truncate_shard(folder: Path, number: int, drop: int = 100) -> str:
    """Cuts bytes off a shard's end; returns its name."""
    path = shard_paths(folder)[number]
    path.write_bytes(path.read_bytes()[:-drop])
    return path.name


def edit_shard(folder: Path, number: int, edit: Callable[[dict[str, np.ndarray]], Any]) -> str:
    """Rewrites a shard after `edit` has changed its {name: array}; the index stays as it is."""
    path = shard_paths(folder)[number]
    tensors = read_shard(path)
    edit(tensors)
    write_shard(path, ((name, lambda v=value: v) for name, value in tensors.items()))
    return path.name


def reindex(folder: Path) -> None:
    """Writes an index that agrees with the shards."""
    weight_map = {name: path.name for path in shard_paths(folder) for name in read_shard(path)}
    _write_index(folder, weight_map, sum(p.stat().st_size for p in shard_paths(folder)))


def change_tensor(
    folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]
) -> str:
    """Replaces tensor `name` by `change(array)`; returns the name of its shard."""
    number, _ = next(
        (i, path) for i, path in enumerate(shard_paths(folder)) if name in read_shard(path)
    )

    def edit(tensors: dict[str, np.ndarray]) -> None:
        changed = change(tensors[name])
        if changed is not None:
            tensors[name] = changed

    return edit_shard(folder, number, edit)


def rename_tensor(folder: Path, old: str, new: str) -> None:
    """Renames a tensor in its shard and in the index."""
    for number, path in enumerate(shard_paths(folder)):
        if old in read_shard(path):
            edit_shard(folder, number, lambda tensors: tensors.update({new: tensors.pop(old)}))
    reindex(folder)


def add_tensor(folder: Path, name: str, value: np.ndarray) -> None:
    """Adds a tensor to the last shard and to the index."""
    edit_shard(folder, -1, lambda tensors: tensors.update({name: value}))
    reindex(folder)


def remove_tensor(folder: Path, name: str) -> None:
    """Removes a tensor from its shard and from the index."""
    for number, path in enumerate(shard_paths(folder)):
        if name in read_shard(path):
            edit_shard(folder, number, lambda tensors: tensors.pop(name))
    reindex(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes fields of the text configuration."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(changes)
    path.write_text(json.dumps(config))


def write_shard(path: Path, tensors: Iterable[Made]) -> dict[str, np.ndarray]:
    """Writes one safetensors file; returns its arrays."""
    arrays = {name: make() for name, make in tensors}
    header, end = {}, 0
    for name, value in arrays.items():
        header[name] = {
            "dtype": DTYPE_NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [end, end + value.nbytes],
        }
        end += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in arrays.values():
            file.write(np.ascontiguousarray(value).tobytes())
    return arrays


def _write_shards(
    folder: Path, tensors: list[Made], shards: int, index: bool, keep: bool
) -> dict[str, np.ndarray]:
    written: dict[str, np.ndarray] = {}
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        part = tensors[len(tensors) * number // shards : len(tensors) * (number + 1) // shards]
        name = f"model-{number + 1:05d}-of-{shards:06d}.safetensors"
        name = name if index else "model.safetensors"
        arrays = write_shard(folder / name, part)
        total += sum(value.nbytes for value in arrays.values())
        weight_map |= dict.fromkeys(arrays, name)
        if keep:
            written |= arrays
    if index:
        _write_index(folder, weight_map, total)
    else:
        assert shards == 1, "without an index there is one file"
    return written


def _write_index(folder: Path, weight_map: dict[str, str], total: int) -> None:
    data = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(data))


def _model_tensors(
    c: ModelConfig, prefix: str, weight_shape: Any, rng: np.random.Generator
) -> Iterator[Made]:
    """The published order: layer by layer, then embedding, norm and head."""
    hidden, heads = c.hidden_size, c.num_attention_heads
    model = prefix + "model."

    def matrix(*shape: int) -> Callable[[], np.ndarray]:
        return lambda: _normal(rng, shape, shape[-1] ** -0.5)

    def norm(width: int) -> Callable[[], np.ndarray]:
        return lambda: _normal(rng, (width,), 0.1, mean=1.0)

    def mlp(name: str, width: int) -> Iterator[Made]:
        yield name + "gate_proj.weight", matrix(width, hidden)
        yield name + "up_proj.weight", matrix(width, hidden)
        yield name + "down_proj.weight", matrix(hidden, width)

    for i in range(c.num_hidden_layers):
        layer = f"{model}layers.{i}."
        attention, moe = layer + "self_attn.", layer + "mlp."
        kv_head = c.qk_nope_head_dim + c.v_head_dim
        yield layer + "input_layernorm.weight", norm(hidden)
        yield attention + "q_a_proj.weight", matrix(c.q_lora_rank, hidden)
        yield attention + "q_a_layernorm.weight", norm(c.q_lora_rank)
        yield attention + "q_b_proj.weight", matrix(heads * c.qk_head_dim, c.q_lora_rank)
        yield (
            attention + "kv_a_proj_with_mqa.weight",
            matrix(c.kv_lora_rank + c.qk_rope_head_dim, hidden),
        )
        yield attention + "kv_a_layernorm.weight", norm(c.kv_lora_rank)
        yield attention + "kv_b_proj.weight", matrix(heads * kv_head, c.kv_lora_rank)
        yield attention + "o_proj.weight", matrix(hidden, heads * c.v_head_dim)
        yield layer + "post_attention_layernorm.weight", norm(hidden)
        if i < c.first_k_dense_replace:
            yield from mlp(moe, c.intermediate_size)
            continue
        yield moe + "gate.weight", matrix(c.n_routed_experts, hidden)
        yield moe + "gate.e_score_correction_bias", lambda: _close_biases(rng, c.n_routed_experts)
        for expert in range(c.n_routed_experts):
            width = c.moe_intermediate_size
            for proj, rows, columns in [
                ("gate_proj", width, hidden),
                ("up_proj", width, hidden),
                ("down_proj", hidden, width),
            ]:
                yield from _packed(
                    f"{moe}experts.{expert}.{proj}.weight_", rows, columns, weight_shape, rng
                )
        yield from mlp(moe + "shared_experts.", c.moe_intermediate_size * c.n_shared_experts)
    yield model + "embed_tokens.weight", lambda: _normal(rng, (c.vocab_size, hidden), 1.0)
    yield model + "norm.weight", norm(hidden)
    yield prefix + "lm_head.weight", matrix(c.vocab_size, hidden)


def _packed(
    start: str, rows: int, columns: int, weight_shape: Any, rng: np.random.Generator
) -> Iterator[Made]:
    center = columns**-0.5 / 4.6  # 4.6: the standard deviation of a uniform code

    def words() -> np.ndarray:
        bits = rng.integers(0, 2**32, (rows, columns // 8), np.uint32)
        return bits.view(np.int32)

    def scales() -> np.ndarray:
        return (center * 2 ** rng.uniform(-0.5, 0.5, (rows, columns // 32))).astype(BF16)

    yield start + "packed", words
    yield start + "scale", scales
    if weight_shape is not None:
        yield start + "shape", lambda: np.array([rows, columns], weight_shape)


def _drafter_tensors(c: DrafterConfig, rng: np.random.Generator) -> Iterator[Made]:
    hidden, head, width = c.hidden_size, c.head_dim, c.intermediate_size
    heads, kv = c.num_attention_heads * head, c.num_key_value_heads * head
    shapes = {
        "fc.weight": (hidden, len(c.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(c.num_hidden_layers):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (heads, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (kv, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (kv, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, heads),
            f"layers.{i}.self_attn.q_norm.weight": (head,),
            f"layers.{i}.self_attn.k_norm.weight": (head,),
            f"layers.{i}.mlp.gate_proj.weight": (width, hidden),
            f"layers.{i}.mlp.up_proj.weight": (width, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, width),
        }
    for name, shape in shapes.items():
        mean, std = (1.0, 0.1) if len(shape) == 1 else (0.0, shape[-1] ** -0.5)
        yield name, lambda s=shape, m=mean, d=std: _normal(rng, s, d, mean=m)


def _vision_tensors(rng: np.random.Generator) -> list[Made]:
    shapes = {
        "vision_tower.patch_embed.proj.weight": (8, 3, 2, 2),
        "vision_tower.encoder.blocks.0.wqkv.weight": (24, 8),
        "vision_tower.encoder.final_layernorm.bias": (8,),
        "mm_projector.pre_norm.weight": (8,),
        "mm_projector.proj.0.weight": (32, 32),
    }
    return [(name, lambda s=shape: _normal(rng, s, 1.0)) for name, shape in shapes.items()]


def _close_biases(rng: np.random.Generator, experts: int) -> np.ndarray:
    """Correction biases as released models have them: near 7, closer than bfloat16 can tell."""
    return (7 + 0.001 * rng.permutation(experts)).astype(np.float32)


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], std: float, mean: float = 0.0
) -> np.ndarray:
    return (mean + std * rng.standard_normal(shape, np.float32)).astype(BF16)
