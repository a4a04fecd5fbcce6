"""A small random model with a byte vocabulary, and engines over it that share compiled programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import step
from kimi_jax.config import DrafterConfig, ModelConfig, YarnConfig
from kimi_jax.engine.loop import Engine
from kimi_jax.engine.programs import EngineOptions, Programs
from kimi_jax.engine.request import Request
from kimi_jax.model import weights
from kimi_jax.speculation import weights as drafter_weights
from kimi_jax.text.tokenizer import Tokenizer

MODEL = ModelConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=64,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.0,
    rms_norm_eps=1e-5,
    vocab_size=512,
    max_position_embeddings=256,
    rope_theta=10000.0,
    rope_scaling=YarnConfig(
        factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=64,
    ),
    bos_token_id=256,
    eos_token_ids=(257, 258),
    pad_token_id=511,
)
OPTIONS = EngineOptions(
    max_num_seqs=4,
    max_model_len=128,
    num_pages=4 * 16 + 1,
    page_size=8,
    prefill_chunk=16,
    prefill_tokens=48,
    steps_per_call=3,
    max_stop_ids=4,
    max_logit_bias=4,
    max_logprobs=5,
    seed=7,
)


@functools.cache
def parameters():
    return weights.random(MODEL, jnp.float32, jax.random.key(0))


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer({bytes([value]): value for value in range(256)})


@functools.cache
def programs(options: EngineOptions = OPTIONS) -> Programs:
    return Programs(MODEL, None, options, jnp.float32)


class Whole:
    """All outputs of one request, joined."""

    def __init__(self):
        self.outputs = []

    def __getattr__(self, name):
        if name in ("text", "reasoning"):
            return "".join(getattr(output, name) for output in self.outputs)
        if name in ("token_ids", "logprobs", "top_logprobs"):
            parts = [getattr(output, name) for output in self.outputs]
            return None if None in parts else [item for part in parts for item in part]
        return getattr(self.outputs[-1], name)


def drain(engine: Engine) -> dict[int, Whole]:
    """Runs the engine until it is idle; by request id."""
    wholes: dict[int, Whole] = {}
    while engine.busy:
        for output in engine.step():
            whole = wholes.setdefault(output.request_id, Whole())
            assert not whole.outputs or not whole.finished, "an output after the last one"
            whole.outputs.append(output)
    assert all(whole.finished for whole in wholes.values())
    return wholes


def alone(engine: Engine, request: Request) -> Whole:
    """What an idle engine makes of a request."""
    index = engine.add(request)
    return drain(engine)[index]


def teacher_forced(tokens) -> np.ndarray:
    """float32 [T, VOCAB] logits of one pass over all tokens."""
    padded = np.zeros(128, np.int32)
    padded[: len(tokens)] = tokens
    latent = jnp.zeros((MODEL.num_hidden_layers, 17, 8, MODEL.cache_row), jnp.float32)
    plan = step.StepPlan(model=MODEL)
    logits, _ = step.score(
        parameters(), latent, np.arange(1, 17), padded, 0, len(tokens), plan=plan
    )
    return np.asarray(logits)[: len(tokens)]


DRAFTER = DrafterConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    rms_norm_eps=1e-5,
    vocab_size=512,
    block_size=4,
    mask_token_id=510,
    target_layer_ids=(0, 1),
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=16,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=256,
)
LIKELY = (65, 66, 67, 68)
"""Tokens with large rows in the head that target and drafter share, each beside its negative: one
of a pair is always likely for both, so trees that hold both are often right."""


@functools.cache
def agreeing_parameters():
    target = parameters()
    rows = 8.0 * target.lm_head[jnp.array(LIKELY[::2])]
    head = target.lm_head.at[jnp.array(LIKELY[::2])].set(rows)
    head = head.at[jnp.array(LIKELY[1::2])].set(-rows)
    drafter = drafter_weights.random(DRAFTER, jnp.float32, jax.random.key(1))
    return target.replace(lm_head=head), drafter


@functools.cache
def speculating_programs() -> Programs:
    return Programs(MODEL, DRAFTER, OPTIONS, jnp.float32)


def speculating_engine(budget, **options) -> Engine:
    target, drafter = agreeing_parameters()
    return Engine(speculating_programs(), target, drafter, tokenizer(), budget=budget, **options)
