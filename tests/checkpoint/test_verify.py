"""Verifying: equal says equal, and whatever is not is found by the tensor's name."""

import hashlib
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_factory import (
    change_tensor,
    shard_paths,
    tiny_config,
    tiny_drafter_config,
    write_drafter,
    write_model,
)
from conversion import chunk_file, converted, flip_bit

from kimi_jax.checkpoint import hf, layout
from kimi_jax.checkpoint.info import inspect
from kimi_jax.checkpoint.read import open_checkpoint, open_drafter
from kimi_jax.checkpoint.verify import verify

CONFIG = tiny_config()
LAYER = "language_model.model.layers.1."


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    stored = write_model(folder / "source", CONFIG, shards=3)
    write_drafter(folder / "draft", tiny_drafter_config())
    least, layout.MIN_CHUNK = layout.MIN_CHUNK, 1  # many chunks, as in a large model
    converted(folder / "source", folder / "output", folder / "draft")
    layout.MIN_CHUNK = least
    return folder, stored


@pytest.fixture
def folders(made, tmp_path):
    """Copies that a test may damage."""
    for name in ("source", "output"):
        shutil.copytree(made[0] / name, tmp_path / name)
    return tmp_path / "source", tmp_path / "output"


def faults(output, source=None):
    verdict = verify(
        open_checkpoint(output), hf.open_model(source) if source else None, progress=False
    )
    assert verdict.good == (not verdict.faults)
    return verdict.faults


def test_every_tensor_of_source_and_output_has_the_same_hash(made):
    folder, stored = made
    pairs = {}
    verdict = verify(
        open_checkpoint(folder / "output"),
        hf.open_model(folder / "source"),
        progress=False,
        listener=lambda name, theirs, ours: pairs.update({name: (theirs, ours)}),
    )
    hashes = {
        name: hashlib.sha256(value.tobytes()).hexdigest()
        for name, value in stored.items()
        if name.startswith("language_model.") and not name.endswith("weight_shape")
    }
    assert pairs == {name: (sha256, sha256) for name, sha256 in hashes.items()}
    assert verdict.good
    assert verdict.tensors == verdict.source_tensors == len(hashes)
    assert verdict.lines()[-1] == "equal"


def test_the_drafter_is_verified_as_well(made):
    folder, _ = made
    drafter = open_drafter(folder / "output" / "drafter", CONFIG)
    verdict = verify(drafter, hf.open_drafter(folder / "draft"), progress=False)
    assert verdict.good
    assert verdict.tensors == verdict.source_tensors == 25


def test_its_cost_is_stated(made):
    folder, _ = made
    verdict = verify(open_checkpoint(folder / "output"), progress=False)
    assert verdict.output_seconds > 0
    [line] = [line for line in verdict.lines() if line.startswith("output")]
    assert f"{verdict.output_bytes / 1e6:,.0f} MB in" in line
    assert "MB/s" in line


@pytest.mark.parametrize(
    ("item", "array", "tensor"),
    [
        ("layers.1", "mlp.experts.gate_up_codes", "mlp.experts.0.gate_proj.weight_packed"),
        ("layers.1", "mlp.experts.down_scales", "mlp.experts.0.down_proj.weight_scale"),
        ("layers.1", "attention.w_uv", "self_attn.kv_b_proj.weight"),
        ("layers.1", "attention.qkv_a", "self_attn.q_a_proj.weight"),
        ("layers.1", "mlp.router_bias", "mlp.gate.e_score_correction_bias"),
        ("top", "embed", "embed_tokens.weight"),
    ],
)
def test_one_flipped_bit_of_the_output_is_found_by_name(folders, item, array, tensor):
    source, output = folders
    flip_bit(chunk_file(output, item, array), 2)
    [fault] = faults(output)
    assert tensor in fault
    assert array in fault
    assert "is not what was read from the source" in fault


@pytest.mark.parametrize(
    "tensor",
    [
        "language_model.model.embed_tokens.weight",
        LAYER + "mlp.experts.3.up_proj.weight_packed",
        LAYER + "self_attn.kv_b_proj.weight",
    ],
)
def test_one_flipped_bit_of_the_source_is_found_by_name(folders, tensor):
    source, output = folders

    def flip(values):
        values.reshape(-1).view(np.uint8)[5] ^= 1

    shard = change_tensor(source, tensor, flip)
    [fault] = faults(output, source)
    assert fault == f"{tensor} in {shard} is not what was converted"
    assert not faults(output)  # without the source there is nothing wrong


def test_a_change_outside_the_tensors_of_the_source_is_found_by_file(folders):
    source, output = folders
    path = shard_paths(source)[2]
    flip_bit(path, path.stat().st_size - 1)  # in the image encoder, which is left out
    [fault] = faults(output, source)
    assert path.name in fault and "not the file that was converted" in fault


def test_swapped_chunks_are_found_by_the_names_of_their_tensors(folders):
    _, output = folders
    paths = [chunk_file(output, "layers.1", "mlp.experts.down_codes", n) for n in (0, -1)]
    first, last = (path.read_bytes() for path in paths)
    paths[0].write_bytes(last)
    paths[1].write_bytes(first)
    found = faults(output)
    assert len(found) == CONFIG.n_routed_experts
    assert all("down_proj.weight_packed" in fault for fault in found)


def test_swapped_tensors_are_told_as_such(folders):
    _, output = folders
    norms = [chunk_file(output, "layers.1", f"{name}_norm") for name in ("input", "post_attention")]
    first, second = (path.read_bytes() for path in norms)
    norms[0].write_bytes(second)
    norms[1].write_bytes(first)
    found = faults(output)
    assert f"it is {LAYER}post_attention_layernorm.weight: swapped?" in found[0]
    assert len(found) == 2


def test_swapped_items_are_found(folders):
    _, output = folders
    a, b = (output / "weights" / f"layers.{number}" for number in (1, 2))
    a.rename(output / "c")
    b.rename(a)
    (output / "c").rename(b)
    found = faults(output)
    assert any("layers.1/tensors.json is not the manifest's: swapped?" in fault for fault in found)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_found_by_name(folders, value):
    _, output = folders
    path = chunk_file(output, "layers.1", "mlp.experts.gate_up_scales")
    data = np.frombuffer(path.read_bytes(), jnp.bfloat16).copy()
    data[0] = value
    path.write_bytes(data.tobytes())
    found = faults(output)
    name = LAYER + "mlp.experts.0.gate_proj.weight_scale"
    assert any(f"{name!r} holds {value} at [0, 0]" in fault for fault in found)


def test_all_faults_are_found_not_only_the_first(folders):
    _, output = folders
    for item in ("layers.0", "layers.1", "layers.2"):
        flip_bit(chunk_file(output, item, "attention.o"), 0)
    assert len(faults(output)) == 3


def test_a_damaged_record_is_named(folders):
    _, output = folders
    path = output / "weights" / "layers.1" / "tensors.json"
    record = json.loads(path.read_text())
    record["checked"] += 1
    path.write_text(json.dumps(record))
    [fault] = faults(output)
    assert "layers.1/tensors.json is damaged" in fault


def test_a_changed_configuration_is_found(folders):
    _, output = folders
    path = output / "config.json"
    path.write_text(path.read_text().replace("1e-05", "2e-05"))
    assert faults(output) == ["config.json is not as it was in the source"]


def test_a_drafter_that_was_lost_or_exchanged_is_a_fault(made, tmp_path):
    output = tmp_path / "output"
    shutil.copytree(made[0] / "output", output)
    assert faults(output) == []
    (output / "drafter").rename(tmp_path / "drafter")
    [fault] = faults(output)
    assert "was converted with this model is not there" in fault
    assert inspect(output).state == "damaged"
    write_drafter(tmp_path / "draft", tiny_drafter_config(), seed=7)
    converted(made[0] / "source", tmp_path / "other", tmp_path / "draft")
    shutil.copytree(tmp_path / "other" / "drafter", output / "drafter")
    [fault] = faults(output)
    assert "is another one" in fault
    shutil.rmtree(output / "drafter")
    converted(made[0] / "source", output)  # without one, and so it says from now on
    assert faults(output) == []
    assert inspect(output).state == "whole"


def test_a_small_file_of_the_source_that_changed_is_named(made, folders):
    source, output = folders
    (source / "tokenizer_config.json").write_text("{}")
    [fault] = faults(output, source)
    assert "tokenizer_config.json in" in fault
    assert "is not what was converted; convert again" in fault


def test_a_damaged_item_is_named_with_the_way_to_make_it_again(made, folders):
    source, output = folders
    flip_bit(chunk_file(output, "layers.1", "mlp.experts.down_codes"), 5)
    verdict = verify(open_checkpoint(output), progress=False)
    assert verdict.lines()[-1] == f"  {output / 'weights' / 'layers.1'}"
    shutil.rmtree(output / "weights" / "layers.1")
    converted(source, output, made[0] / "draft")
    assert faults(output) == []
