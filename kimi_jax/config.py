"""Model and drafter configurations: frozen, read once from a Hugging Face `config.json`.

Everything that changes the arithmetic is a field here or was compared with the one supported value
while reading: a checkpoint that would run but compute something else never gets past `from_hf`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kimi_jax import config_json
from kimi_jax.config_json import GROUP_SIZE, Source

MAX_BLOCK = 64
"""Longest block of a drafter; published ones have 8 or 16."""


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN scaling of the rotary frequencies (Peng et al. 2023; DeepSeek-V3's variant)."""

    factor: float  # how many times longer than the original context
    beta_fast: float  # rotations in the original context above which a frequency is kept
    beta_slow: float  # rotations below which a frequency is fully interpolated
    mscale: float  # attention temperature put on cos and sin, relative to mscale_all_dim
    mscale_all_dim: float  # attention temperature put on the softmax scale, squared
    original_max_position_embeddings: int  # context length before scaling, in tokens

    def __post_init__(self) -> None:
        _positive(self, "beta_fast", "beta_slow", "original_max_position_embeddings")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"rope_scaling: factor={self.factor!r} is below 1")

    def temperature(self, mscale: float) -> float:
        """0.1 * mscale * ln(factor) + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def amplitude(self) -> float:
        """Multiplier of cos and sin: 1.0 whenever mscale == mscale_all_dim."""
        return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The text model of a Kimi K2 checkpoint; names are the checkpoint's, sizes in elements."""

    hidden_size: int  # D, width of the residual stream
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    q_lora_rank: int  # Q, rank of the query projection
    kv_lora_rank: int  # R, width of the cached latent
    qk_nope_head_dim: int  # NOPE, part of a query/key head without position
    qk_rope_head_dim: int  # PE, rotated part; the key's is shared by all heads
    v_head_dim: int  # V
    intermediate_size: int  # width of a dense layer's MLP
    moe_intermediate_size: int  # F, width of one routed expert
    first_k_dense_replace: int  # layers 0 .. this - 1 have a dense MLP, the others experts
    n_routed_experts: int  # E
    num_experts_per_tok: int  # K, routed experts that a token uses
    n_shared_experts: int  # shared experts, fused into one MLP of width F * n_shared_experts
    norm_topk_prob: bool  # whether the K routing weights are normalised to sum to 1
    routed_scaling_factor: float  # multiplies the routed sum; the shared expert is not scaled
    rms_norm_eps: float  # epsilon of every norm but the two latent ones
    latent_norm_eps: float = 1e-6  # of the q_a and kv_a norms: transformers' (vLLM, SGLang: 1e-5)
    vocab_size: int  # VOCAB
    max_position_embeddings: int  # longest context, in tokens
    rope_theta: float  # base of the rotary frequencies
    rope_scaling: YarnConfig | None  # None: plain rotary embedding
    group_size: int = GROUP_SIZE  # G, expert weights that share a scale, along the input
    bos_token_id: int  # [BOS]; the chat template does not emit it
    eos_token_ids: tuple[int, ...]  # ids that end a generation, ascending
    pad_token_id: int  # filler for unused places; never read by a live row

    def __post_init__(self) -> None:
        _positive(
            self,
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank"),
            *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("intermediate_size", "moe_intermediate_size", "n_routed_experts"),
            *("num_experts_per_tok", "n_shared_experts", "routed_scaling_factor"),
            *("rms_norm_eps", "latent_norm_eps", "vocab_size", "max_position_embeddings"),
            "rope_theta",
        )
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace={self.first_k_dense_replace} lies outside"
                f" 0..num_hidden_layers ({self.num_hidden_layers})"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds"
                f" n_routed_experts={self.n_routed_experts}"
            )
        if self.group_size != GROUP_SIZE:
            raise ValueError(f"group_size={self.group_size} is not supported; use {GROUP_SIZE}")
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(self, name) % self.group_size:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not a multiple of the quantization group,"
                    f" {self.group_size}"
                )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd; pairs are rotated")
        if not self.eos_token_ids:
            raise ValueError("eos_token_ids is empty; name at least one id that ends a generation")
        for name in ("bos_token_id", "pad_token_id"):
            _in_vocabulary(self, name, getattr(self, name))
        for token in self.eos_token_ids:
            _in_vocabulary(self, "eos_token_ids", token)

    @classmethod
    def from_hf(cls, source: Source) -> ModelConfig:
        """Reads a published configuration.

        Args:
            source: a checkpoint folder, the path of its `config.json`, or the parsed dictionary.
                Both forms are read: `kimi_k25` around a `text_config`, and the bare text form
                (`kimi_k2`, `deepseek_v3`). Beside a file, `generation_config.json` contributes
                its end-of-sequence ids. For a Kimi vocabulary both end tokens stop, whichever
                the files name.

        Raises:
            ValueError: a required field is missing, or a field has a value that this engine does
                not implement; the message names field, value and what is supported.
            FileNotFoundError: there is no `config.json`.
        """
        fields, where = config_json.model_fields(source)
        with _named(where):
            fields["rope_scaling"] = _yarn(fields["rope_scaling"])
            return cls(**fields)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: NOPE + PE."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_row(self) -> int:
        """Values cached per token and layer: R + PE."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Multiplier of q.k before the softmax: (NOPE + PE)^-0.5 * YaRN's temperature squared."""
        scale = self.qk_head_dim**-0.5
        if self.rope_scaling is not None:
            scale *= self.rope_scaling.temperature(self.rope_scaling.mscale_all_dim) ** 2
        return scale

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_hidden_layers - self.first_k_dense_replace

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has routed experts (else a dense MLP)."""
        return layer >= self.first_k_dense_replace


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A DFlash drafter: a Qwen3-shaped decoder over features of the target.

    It has no embedding and no head of its own. Two switches are explicit because published
    engines disagree about them and only the acceptance shows which is right for a checkpoint.
    """

    hidden_size: int  # D, equal to the target's
    num_hidden_layers: int  # layers of the drafter
    num_attention_heads: int  # query heads
    num_key_value_heads: int  # KV, key/value heads; divides the query heads
    head_dim: int  # HD
    intermediate_size: int  # I, width of the MLP
    rms_norm_eps: float  # epsilon of every norm
    vocab_size: int  # equal to the target's
    block_size: int  # anchor + masks
    mask_token_id: int  # id whose target embedding fills the mask slots
    target_layer_ids: tuple[int, ...]  # taps: 0-based layers whose OUTPUT `fc` reads, in its order
    layer_types: tuple[str, ...]  # "sliding_attention" or "full_attention", one per layer
    sliding_window: int | None  # tokens that a sliding layer sees; None without such layers
    rope_theta: float  # base of the rotary frequencies, half-split over the whole head
    rope_scaling: YarnConfig | None  # None: plain rotary embedding
    yarn_amplitude: float = 1.0  # switch: multiplier of cos and sin (1.0 or 1.41589 by engine)
    sliding_causal: bool = False  # switch: whether sliding layers are causal inside the block
    max_position_embeddings: int  # longest context, in tokens

    def __post_init__(self) -> None:
        _positive(
            self,
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "intermediate_size", "rms_norm_eps", "vocab_size", "rope_theta"),
            *("yarn_amplitude", "max_position_embeddings"),
        )
        if not 2 <= self.block_size <= MAX_BLOCK:
            raise ValueError(
                f"block_size={self.block_size}: expected 2..{MAX_BLOCK}, the anchor and its masks"
            )
        _in_vocabulary(self, "mask_token_id", self.mask_token_id)
        if not self.target_layer_ids or len({*self.target_layer_ids}) < len(self.target_layer_ids):
            raise ValueError(
                f"target_layer_ids={list(self.target_layer_ids)}; expected one or more distinct"
                " layers"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of"
                f" num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; pairs are rotated")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers,"
                f" num_hidden_layers={self.num_hidden_layers}"
            )
        for kind in self.layer_types:
            if kind not in ("sliding_attention", "full_attention"):
                raise ValueError(
                    f"layer_types: {kind!r} is not supported;"
                    " supported: 'sliding_attention', 'full_attention'"
                )
        if "sliding_attention" in self.layer_types and (self.sliding_window or 0) < 1:
            raise ValueError(f"sliding_window={self.sliding_window!r}; a sliding layer needs one")
        if self.rope_scaling is None and self.yarn_amplitude != 1:
            raise ValueError(f"yarn_amplitude={self.yarn_amplitude} without rope_scaling")

    @classmethod
    def from_hf(
        cls,
        source: Source,
        *,
        yarn_amplitude: float | None = None,
        sliding_causal: bool | None = None,
    ) -> DrafterConfig:
        """Reads a drafter's published configuration.

        `target_layer_ids`, `block_size` and `mask_token_id` stand at the top level or in
        `dflash_config` and are required: a guess may fit the shapes and still draft badly, which
        nothing else would notice.

        Args:
            source: a drafter folder, the path of its `config.json`, or the parsed dictionary.
            yarn_amplitude: overrides the multiplier of cos and sin. The default is what
                transformers uses: `attention_factor` if it is there, else YaRN's own, which is
                1.0 when mscale and mscale_all_dim are equal.
            sliding_causal: overrides whether sliding layers are causal inside the block. The
                default is the configuration's `is_causal`, else False.

        Raises:
            ValueError: a required field is missing, or a field has a value that this engine does
                not implement; the message names field, value and what is supported.
            FileNotFoundError: there is no `config.json`.
        """
        fields, where = config_json.drafter_fields(source)
        with _named(where):
            yarn = fields["rope_scaling"] = _yarn(fields["rope_scaling"])
            if yarn_amplitude is not None:
                fields["yarn_amplitude"] = yarn_amplitude
            elif fields["yarn_amplitude"] is None:
                fields["yarn_amplitude"] = yarn.amplitude if yarn else 1.0
            if sliding_causal is not None:
                fields["sliding_causal"] = sliding_causal
            return cls(**fields)

    @property
    def depth(self) -> int:
        """DEPTH, tokens drafted per block: every slot but the anchor's."""
        return self.block_size - 1

    def check_against(self, target: ModelConfig) -> None:
        """Raises ValueError, naming the field, unless this drafter fits `target`."""
        remedy = "use the drafter that was trained for this target"
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(self, name), getattr(target, name)
            if ours != theirs:
                raise ValueError(f"the drafter's {name}={ours}, the target's {theirs}; {remedy}")
        outside = [i for i in self.target_layer_ids if not 0 <= i < target.num_hidden_layers]
        if outside:
            raise ValueError(
                f"target_layer_ids={list(self.target_layer_ids)}: {outside} lie outside the"
                f" target's layers 0..{target.num_hidden_layers - 1}; {remedy}"
            )


def to_hf(config: ModelConfig | DrafterConfig) -> dict[str, Any]:
    """The `config.json` of `config` in its published form; `from_hf` reads it back equal."""
    write = config_json.model_json if isinstance(config, ModelConfig) else config_json.drafter_json
    return write(asdict(config))


def _yarn(fields: dict[str, Any] | None) -> YarnConfig | None:
    return None if fields is None else YarnConfig(**fields)


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} is not positive and finite")


def _in_vocabulary(config: ModelConfig | DrafterConfig, name: str, token: int) -> None:
    if not 0 <= token < config.vocab_size:
        raise ValueError(f"{name}: id {token} lies outside vocab_size={config.vocab_size}")


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Puts the source's name before the messages of the dataclasses' own checks."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


PRESETS: dict[str, ModelConfig] = {
    "kimi-k2.6": ModelConfig(
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        first_k_dense_replace=1,
        n_routed_experts=384,
        num_experts_per_tok=8,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
        rms_norm_eps=1e-5,
        vocab_size=163840,
        max_position_embeddings=262144,
        rope_theta=50000.0,
        rope_scaling=YarnConfig(
            factor=64.0,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
        ),
        bos_token_id=163584,
        eos_token_ids=(163585, 163586),
        pad_token_id=163839,
    ),
    "tiny-k2": ModelConfig(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=256,
        first_k_dense_replace=1,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.0,
        rms_norm_eps=1e-5,
        vocab_size=2048,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rope_scaling=YarnConfig(
            factor=8.0,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=512,
        ),
        bos_token_id=1792,
        eos_token_ids=(1793, 1794),
        pad_token_id=2047,
    ),
}
"""Targets by name: the published model and the bundled one."""

DRAFTER_PRESETS: dict[str, DrafterConfig] = {
    "kimi-k2.6": DrafterConfig(
        hidden_size=7168,
        num_hidden_layers=6,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=18432,
        rms_norm_eps=1e-5,
        vocab_size=163840,
        block_size=8,
        mask_token_id=163838,
        target_layer_ids=(1, 12, 24, 35, 47, 58),
        layer_types=("sliding_attention",) * 5 + ("full_attention",),
        sliding_window=2048,
        rope_theta=50000.0,
        rope_scaling=PRESETS["kimi-k2.6"].rope_scaling,
        max_position_embeddings=262144,
    ),
    "tiny-k2": DrafterConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        intermediate_size=384,
        rms_norm_eps=1e-5,
        vocab_size=2048,
        block_size=8,
        mask_token_id=2046,
        target_layer_ids=(1, 3, 4),
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=64,
        rope_theta=10000.0,
        rope_scaling=PRESETS["tiny-k2"].rope_scaling,
        max_position_embeddings=4096,
    ),
}
"""Drafters by the name of their target."""
