import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest
from small_engine import MODEL, parameters

from kimi_jax import cache
from kimi_jax.config import DRAFTER_PRESETS, PRESETS
from kimi_jax.engine.plan import (
    GIB,
    DoesNotFit,
    Memory,
    local_memory,
    make_plan,
    reserve_gpu_memory,
    size,
)
from kimi_jax.model.weights import num_bytes

H200 = Memory(device="NVIDIA H200", platform="gpu", total=141 * GIB, usable=126 * GIB)
NODE = Memory(device="8 x NVIDIA H200", platform="gpu", total=1128 * GIB, usable=1008 * GIB)


def small(usable=64 << 20, **options):
    memory = Memory(device="test", platform="gpu", total=usable, usable=usable)
    return make_plan(MODEL, None, dtype=jnp.float32, memory=memory, **options)


def test_the_plan_counts_the_bytes_that_weights_and_cache_really_take():
    plan = small(max_num_seqs=3, page_size=16)
    assert plan.target_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(parameters()))
    held = cache.create(MODEL, None, num_pages=plan.num_pages, page_size=16, dtype=jnp.float32)
    assert plan.cache_bytes == num_bytes(held)
    assert plan.total_bytes <= plan.memory.usable


def test_there_are_pages_for_all_sequences_at_full_length_if_they_fit():
    plan = small(max_num_seqs=3, max_model_len=100, page_size=16)
    assert plan.num_pages == 3 * 7 + 1
    assert plan.max_model_len == 100 and plan.largest_context == MODEL.max_position_embeddings


def test_k26_with_its_drafter_fits_eight_h200_and_not_one():
    model, drafter = PRESETS["kimi-k2.6"], DRAFTER_PRESETS["kimi-k2.6"]
    plan = make_plan(model, drafter, dtype=jnp.bfloat16, memory=NODE)
    assert plan.token_bytes == 70272  # 61 layers of 576 bfloat16 values
    assert plan.drafter_token_bytes == 6 * 2 * 8 * 128 * 2
    assert 550 * GIB < plan.target_bytes < 556 * GIB
    assert 6.4 * GIB < plan.drafter_bytes < 6.6 * GIB
    with pytest.raises(DoesNotFit, match="weights .* GiB.*NVIDIA H200 has 126.00 GiB to use"):
        make_plan(model, drafter, dtype=jnp.bfloat16, memory=H200)


def test_a_context_that_does_not_fit_is_refused_with_the_one_that_does():
    usable = small().total_bytes
    short = small(max_num_seqs=1, max_model_len=8, page_size=8)
    tight = short.total_bytes + 4 * 8 * short.token_bytes  # room for 5 pages of 8 tokens
    with pytest.raises(DoesNotFit, match="max_model_len=41 .*largest context that fits is 40"):
        small(tight, max_num_seqs=1, max_model_len=41, page_size=8)
    fits = small(tight, max_num_seqs=1, max_model_len=40, page_size=8)
    assert fits.total_bytes <= tight < usable


def test_without_a_wish_the_context_is_the_longest_that_fits():
    short = small(max_num_seqs=1, max_model_len=8, page_size=8)
    plan = small(short.total_bytes + 4 * 8 * short.token_bytes, max_num_seqs=1, page_size=8)
    assert plan.max_model_len == plan.largest_context == 40


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="max_model_len=257 exceeds the model's context of 256"):
        small(max_model_len=257)


@pytest.mark.parametrize("name", ["max_num_seqs", "page_size", "max_model_len"])
def test_a_size_below_one_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        small(**{name: 0})


def test_on_a_cpu_the_cache_stays_within_a_fixed_budget():
    memory = Memory(device="cpu", platform="cpu", total=64 * GIB, usable=60 * GIB)
    model = dataclasses.replace(MODEL, max_position_embeddings=1 << 20)
    plan = make_plan(model, None, dtype=jnp.float32, memory=memory, max_num_seqs=64)
    assert 0.99 * GIB < plan.cache_bytes <= GIB


def test_this_machine_has_memory_to_use():
    memory = local_memory(0.5)
    assert 0 < memory.usable <= memory.total


def test_the_share_of_gpu_memory_is_set_unless_the_user_has(monkeypatch):
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)
    reserve_gpu_memory(0.9)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.900"
    reserve_gpu_memory(0.5)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.900"
    with pytest.raises(ValueError, match="gpu_memory_utilization=1.5"):
        reserve_gpu_memory(1.5)


def test_sizes_read_well():
    assert [size(n) for n in (5, 2048, 3 << 20, 5 * GIB)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.00 GiB",
    ]
