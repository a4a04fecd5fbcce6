"""Converting: nothing is lost or changed, and nothing half-written is ever taken for whole."""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import checkpoint_factory
import full_structure
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_factory import (
    change_tensor,
    edit_config,
    edit_shard,
    pack,
    shard_paths,
    tiny_config,
    tiny_drafter_config,
    truncate_shard,
    write_drafter,
    write_model,
)
from conversion import content, converted, equal, stored_array
from fresh_process import run
from reference_numpy import unpack_int4

from kimi_jax.checkpoint import convert as converting
from kimi_jax.checkpoint import hf, layout
from kimi_jax.checkpoint.read import (
    CheckpointError,
    load_drafter,
    load_model,
    open_checkpoint,
    open_drafter,
)
from kimi_jax.checkpoint.verify import verify
from kimi_jax.config import DRAFTER_PRESETS, PRESETS
from kimi_jax.model import weights as model_weights
from kimi_jax.speculation import weights as drafter_weights

TESTS = Path(__file__).parent.parent
CONFIG = tiny_config()
NORM = "language_model.model.norm.weight"
LAYER = "language_model.model.layers.1."
EXPERT = LAYER + "mlp.experts.3.up_proj.weight_"


@pytest.fixture
def source(tmp_path):
    write_model(tmp_path / "source", CONFIG, shards=3)
    return tmp_path / "source"


@pytest.fixture
def output(tmp_path):
    return tmp_path / "output"


def refused(source, output, *parts, drafter=None):
    with pytest.raises(CheckpointError) as error:
        converted(source, output, drafter)
    for part in parts:
        assert part in str(error.value)


# What arrives


def test_codes_and_scales_of_every_expert_are_moved_bit_for_bit(tmp_path, output):
    stored = write_model(tmp_path / "source", CONFIG, shards=4)
    converted(tmp_path / "source", output)
    for layer in (1, 2):
        gate_up, gate_up_scales, down, down_scales = (
            stored_array(output, f"layers.{layer}", f"mlp.experts.{name}")
            for name in ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales")
        )
        for e in range(CONFIG.n_routed_experts):
            start = f"language_model.model.layers.{layer}.mlp.experts.{e}."
            for proj, codes, scales in [
                ("gate_proj", gate_up[e, 0], gate_up_scales[e, 0]),
                ("up_proj", gate_up[e, 1], gate_up_scales[e, 1]),
                ("down_proj", down[e], down_scales[e]),
            ]:
                words = stored[f"{start}{proj}.weight_packed"]
                values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1) - 8.0
                assert np.array_equal(values, unpack_int4(words))
                assert scales.tobytes() == stored[f"{start}{proj}.weight_scale"].tobytes()


def test_a_word_of_values_minus_8_to_minus_1_keeps_that_order(source, output):
    """By hand, in the file and on the disk: the first column is the lowest nibble, offset 8."""

    def first_word(words):
        words[0, 0] = 0x76543210

    change_tensor(source, EXPERT + "packed", first_word)
    converted(source, output)
    row = stored_array(output, "layers.1", "mlp.experts.gate_up_codes")[3, 1, 0, :4]
    assert row.tobytes().hex() == "10325476"
    assert pack(np.arange(-8, 0).reshape(1, -1))[0].tobytes() == row.tobytes()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_converted_folder_loads_as_its_source_does(source, output, dtype):
    converted(source, output)
    there, here = (load_model(folder, dtype=dtype, progress=False) for folder in (source, output))
    assert there[0] == here[0]
    assert equal(there[1], here[1])


def test_the_router_bias_stays_float32_on_disk_and_on_the_device(tmp_path, output):
    stored = write_model(tmp_path / "source", CONFIG)
    converted(tmp_path / "source", output)
    bias = stored[LAYER + "mlp.gate.e_score_correction_bias"]
    on_disk = stored_array(output, "layers.1", "mlp.router_bias")
    _, weights = load_model(output, dtype=jnp.bfloat16, progress=False)
    for found in (on_disk, np.asarray(weights.layers[1].mlp.router_bias)):
        assert found.dtype == np.float32
        assert found.tolist() == bias.tolist()


def test_the_drafter_travels_inside(source, output, tmp_path):
    drafter = tmp_path / "draft"
    write_drafter(drafter, tiny_drafter_config())
    converted(source, output, drafter)
    here = load_drafter(output / "drafter", CONFIG, dtype=jnp.bfloat16, progress=False)
    there = load_drafter(drafter, CONFIG, dtype=jnp.bfloat16, progress=False)
    assert here[0] == there[0]
    assert equal(here[1], there[1])


def test_configuration_tokenizer_and_template_travel_with_the_weights(source, output):
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        (source / name).write_text(f"content of {name}")
    (source / "modeling.py").write_text("not needed")
    converted(source, output)
    names = {path.name for path in output.iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json"),
        *("chat_template.jinja", "LICENSE", "manifest.json", "weights"),
    }
    assert (output / "tiktoken.model").read_text() == "content of tiktoken.model"


def test_the_manifest_names_the_sources_files_with_their_sha256(source, output):
    converted(source, output)
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["source"]["name"] == "source"
    for path in shard_paths(source):
        entry = manifest["source"]["files"][path.name]
        assert entry["size"] == path.stat().st_size
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["source"]["left_out"] == {"vision_tower.": 3, "mm_projector.": 2}


def test_every_tensor_is_recorded_with_its_sha256(tmp_path, output):
    stored = write_model(tmp_path / "source", CONFIG, shards=3)
    converted(tmp_path / "source", output)
    recorded, checked = {}, 0
    for path in (output / "weights").glob("*/tensors.json"):
        record = json.loads(path.read_text())
        checked += record["checked"]
        for tensors in record["tensors"].values():
            recorded |= tensors
    expected = {
        name: hashlib.sha256(value.tobytes()).hexdigest()
        for name, value in stored.items()
        if name.startswith("language_model.") and not name.endswith("weight_shape")
    }
    assert recorded == expected
    assert checked == sum(name.endswith("weight_shape") for name in stored)


# Sources seen in the wild


@pytest.mark.parametrize(
    "variant",
    [
        {"prefix": ""},
        {"weight_shape": np.int64},
        {"weight_shape": None},
        {"vision": False},
        {"shards": 1, "index": False},
    ],
    ids=["no prefix", "int64 shapes", "no shapes", "text only", "one file"],
)
def test_variants_of_the_published_layout_convert(tmp_path, output, variant):
    write_model(tmp_path / "source", CONFIG, **{"shards": 3, **variant})
    converted(tmp_path / "source", output)
    there, here = (
        load_model(folder, dtype=jnp.bfloat16, progress=False)[1]
        for folder in (tmp_path / "source", output)
    )
    assert equal(there, here)
    assert verify(open_checkpoint(output), progress=False).good


def _thinking(config):
    """K2-Thinking: the bare text form."""
    return config["text_config"] | {"rms_norm_eps": 1e-5}


def _k25(config):
    """K2.5: another end of sequence, quantization_config at the top."""
    text = config["text_config"]
    config["quantization_config"] = text.pop("quantization_config")
    config["eos_token_id"] = text["eos_token_id"] = CONFIG.eos_token_ids[0]
    return config


@pytest.mark.parametrize("form", [_thinking, _k25], ids=["K2-Thinking", "K2.5"])
def test_configurations_of_the_family_convert(source, output, form):
    path = source / "config.json"
    path.write_text(json.dumps(form(json.loads(path.read_text()))))
    converted(source, output)
    assert open_checkpoint(output).config == open_checkpoint(source).config


def test_another_quantization_is_refused_by_name(source):
    edit_config(source, quantization_config={"quant_method": "fp8", "fmt": "e4m3"})
    with pytest.raises(ValueError, match='quant_method="fp8" is not supported'):
        open_checkpoint(source)


# How it lies on the disk


def test_chunks_are_the_finest_pieces_of_any_sharding():
    """At the real dimensions: an eighth of the experts, of their width, of heads, of the words."""
    leaves = layout.stored(model_weights.describe(PRESETS["kimi-k2.6"], jnp.bfloat16))
    chunks = {path: leaf.chunk for path, leaf in leaves.items()}
    assert chunks["layers.7.mlp.experts.gate_up_codes"] == (48, 2, 256, 3584)
    assert chunks["layers.7.mlp.experts.gate_up_scales"] == (48, 2, 256, 224)
    assert chunks["layers.7.mlp.experts.down_codes"] == (48, 7168, 128)
    assert chunks["layers.7.mlp.experts.down_scales"] == (48, 7168, 8)
    assert chunks["layers.7.mlp.shared.gate_up"] == (2, 256, 7168)
    assert chunks["layers.7.attention.q_b"] == (8, 192, 1536)
    assert chunks["layers.7.attention.o"] == (7168, 8, 128)
    assert chunks["layers.7.attention.qkv_a"] == (2112, 7168)
    assert chunks["layers.0.mlp.gate_up"] == (2, 2304, 7168)
    assert chunks["lm_head"] == (20480, 7168)


@pytest.mark.parametrize(
    ("describe", "config"),
    [
        (model_weights.describe, PRESETS["kimi-k2.6"]),
        (drafter_weights.describe, DRAFTER_PRESETS["kimi-k2.6"]),
    ],
    ids=["target", "drafter"],
)
def test_no_chunk_exceeds_a_gibibyte_and_every_one_divides_its_array(describe, config):
    for leaf in layout.stored(describe(config, jnp.bfloat16)).values():
        assert leaf.chunk_bytes <= 1 << 30, leaf
        assert not any(n % c for n, c in zip(leaf.shape, leaf.chunk, strict=True)), leaf


def test_nothing_is_compressed(source, output):
    converted(source, output)
    for leaf in open_checkpoint(output).stored.values():
        folder = layout.item_folder(output, leaf.item)
        assert sum(path.stat().st_size for path, _ in leaf.files(folder)) == leaf.nbytes


def test_arrays_of_many_chunks_are_put_together_in_order(tmp_path, output, monkeypatch):
    monkeypatch.setattr(layout, "MIN_CHUNK", 1)
    write_model(tmp_path / "source", CONFIG)
    converted(tmp_path / "source", output)
    stored = open_checkpoint(output).stored
    assert stored["layers.1.mlp.experts.down_codes"].chunk == (3, 96, 4)
    assert stored["lm_head"].chunk == (36, 96)
    there, here = (
        load_model(folder, dtype=jnp.bfloat16, progress=False)[1]
        for folder in (tmp_path / "source", output)
    )
    assert equal(there, here)
    assert verify(open_checkpoint(output), progress=False).good


# Reading the source


def test_each_file_is_read_once_forwards_and_to_its_end(source, output, monkeypatch):
    reads = []
    preadv = os.preadv

    def counting(descriptor, views, at):
        count = preadv(descriptor, views, at)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        reads.append((name, at, count))
        return count

    monkeypatch.setattr(converting, "RUN", 10_000)
    monkeypatch.setattr(os, "preadv", counting)
    report = converted(source, output)
    assert len(reads) > 20
    assert reads == sorted(reads)
    total = sum(path.stat().st_size for path in shard_paths(source))
    assert report.bytes_read == sum(count for *_, count in reads) == total
    ends = {name: at + count for name, at, count in reads}
    assert ends == {path.name: path.stat().st_size for path in shard_paths(source)}


def test_the_threads_are_counted(source, output, monkeypatch):
    """Two hashers, a writer and its few helpers, on a machine of any size."""
    seen, before, preadv = set(), set(threading.enumerate()), os.preadv

    def looking(descriptor, views, at):
        seen.update({*threading.enumerate()} - before)
        return preadv(descriptor, views, at)

    monkeypatch.setattr(os, "preadv", looking)
    monkeypatch.setattr(converting, "RUN", 10_000)
    monkeypatch.setattr(layout, "MIN_CHUNK", 1)
    converted(source, output)
    names = [thread.name for thread in seen if "tqdm" not in thread.name]  # asleep
    assert {"hash files", "hash tensors", "write"} <= set(names)
    assert len(names) <= 3 + converting.WORKERS <= 7, names


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize(
    "name", [EXPERT + "scale", NORM, LAYER + "self_attn.kv_b_proj.weight"], ids=str
)
def test_a_value_that_is_not_finite_is_named_and_nothing_is_whole(source, output, name, value):
    def poison(values):
        values.reshape(-1)[-2] = value

    shard = change_tensor(source, name, poison)
    refused(source, output, name, shard, f"holds {value}", "download it again")
    assert not (output / "manifest.json").exists()


def test_the_place_of_a_nan_is_right_in_a_tensor_read_in_pieces(source, output, monkeypatch):
    def poison(values):
        values[200, 5] = np.nan

    change_tensor(source, "language_model.model.embed_tokens.weight", poison)
    monkeypatch.setattr(converting, "RUN", 1000)
    refused(source, output, "embed_tokens", "[200, 5]")


def test_an_unpacked_shape_that_contradicts_the_configuration_is_named(source, output):
    shard = change_tensor(source, EXPERT + "shape", lambda value: value[::-1].copy())
    refused(source, output, shard, EXPERT + "shape")


def test_a_file_that_shrinks_after_opening_is_named(source, output):
    checkpoint = hf.open_model(source)
    name = truncate_shard(source, 1)
    with pytest.raises(CheckpointError, match=name):
        converting.convert(checkpoint, output, progress=False)


def test_a_file_that_changes_while_it_is_read_is_named(source, output, monkeypatch):
    path, preadv = shard_paths(source)[1], os.preadv

    def meddling(descriptor, views, at):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            os.utime(path, ns=(1, 1))
        return preadv(descriptor, views, at)

    monkeypatch.setattr(os, "preadv", meddling)
    refused(source, output, path.name, "changed while it was being converted")


def test_a_download_whose_hash_differs_from_the_hubs_is_named(source, output):
    """A download into a folder leaves the hub's sha256 of each file beside it."""
    beside = source / ".cache" / "huggingface" / "download"
    beside.mkdir(parents=True)
    for number, path in enumerate(shard_paths(source)):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        sha256 = sha256 if number != 1 else "0" * 64
        (beside / f"{path.name}.metadata").write_text(f"{'a' * 40}\n{sha256}\n1.0\n")
    refused(source, output, shard_paths(source)[1].name, "0" * 64, "download it again")


def test_a_download_in_the_hubs_cache_is_checked_and_its_revision_kept(source, output, tmp_path):
    revision = "2" * 40
    snapshot = tmp_path / "models--moonshotai--Kimi-K2.6" / "snapshots" / revision
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in source.iterdir():
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob)
    converted(snapshot, output)
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["source"]["repository"] == "moonshotai/Kimi-K2.6"
    assert manifest["source"]["revision"] == revision
    shutil.rmtree(output)
    damaged = (snapshot / shard_paths(source)[0].name).resolve()
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    refused(snapshot, output, shard_paths(source)[0].name, "the file is damaged")


# What is whole and what is not


def test_an_empty_folder_is_converted_into(source, output):
    output.mkdir()
    report = converted(source, output)
    assert report.items_made == 4
    open_checkpoint(output)


def test_an_empty_folder_is_not_a_checkpoint(output):
    output.mkdir()
    with pytest.raises(CheckpointError, match="has no config.json"):
        open_checkpoint(output)


def test_a_folder_without_its_manifest_is_not_a_checkpoint(source, output):
    converted(source, output)
    (output / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="was not finished; run it again"):
        open_checkpoint(output)


def test_a_whole_conversion_is_left_alone(source, output):
    converted(source, output)
    before = content(output)
    report = converted(source, output)
    assert (report.items_made, report.items_kept, report.bytes_read) == (0, 4, 0)
    assert content(output) == before


@pytest.mark.parametrize("damage", ["missing", "truncated", "no record"])
def test_only_what_is_not_proven_is_made_again(source, output, damage):
    converted(source, output)
    before = content(output)
    item = layout.item_folder(output, "layers.1")
    chunk = item / "state" / "mlp.router" / "c" / "0" / "0"
    if damage == "missing":
        chunk.unlink()
    elif damage == "truncated":
        chunk.write_bytes(chunk.read_bytes()[:-1])
    else:
        (item / "tensors.json").unlink()
    report = converted(source, output)
    assert (report.items_made, report.items_kept) == (1, 3)
    total = sum(path.stat().st_size for path in shard_paths(source))
    assert 0 < report.bytes_read < total  # hashes of the files are known: only its tensors
    assert content(output) == before


def test_a_drafter_can_be_added_to_a_whole_conversion(source, output, tmp_path):
    converted(source, output)
    drafter = tmp_path / "draft"
    write_drafter(drafter, tiny_drafter_config())
    report = converted(source, output, drafter)
    assert (report.items_made, report.items_kept) == (3, 4)
    at_once = tmp_path / "at once"
    converted(source, at_once, drafter)
    assert content(output) == content(at_once)
    open_drafter(output / "drafter", CONFIG)


def test_a_shard_that_was_downloaded_again_is_converted_again(source, output):
    """Same headers, other content: only the items that draw from it are made again."""
    converted(source, output)

    def other(tensors):
        name = next(n for n in tensors if n.endswith("layers.2.self_attn.q_a_proj.weight"))
        tensors[name] = tensors[name][::-1].copy()

    edit_shard(source, 1, other)
    report = converted(source, output)
    assert 0 < report.items_made < 4
    there, here = (
        load_model(folder, dtype=jnp.bfloat16, progress=False)[1] for folder in (source, output)
    )
    assert equal(there, here)
    assert verify(open_checkpoint(output), hf.open_model(source), progress=False).good


@pytest.mark.parametrize("name", ["manifest.json", ".conversion/source.json"])
def test_a_damaged_journal_is_named_and_its_remedy_works(source, output, name):
    converted(source, output)
    path = output / name
    if name != "manifest.json":
        (output / "manifest.json").unlink()
        path.parent.mkdir(exist_ok=True)
    path.write_text("{")
    refused(source, output, f"{path} is damaged", "delete it and convert again")
    path.unlink()
    converted(source, output)
    assert verify(open_checkpoint(output), hf.open_model(source), progress=False).good


def test_a_folder_with_something_else_is_refused(source, output):
    output.mkdir()
    (output / "thesis.tex").write_text("irreplaceable")
    refused(source, output, "is not empty and not a conversion", "thesis.tex")
    assert [path.name for path in output.iterdir()] == ["thesis.tex"]


def test_a_conversion_of_another_source_is_refused(source, output, tmp_path):
    converted(source, output)
    other = tmp_path / "other"
    write_model(other, CONFIG, shards=2)
    refused(other, output, "conversion of another source", "other names")
    edit_config(source, rms_norm_eps=1e-6)
    refused(source, output, "conversion of another source", "config.json differs")


def test_two_conversions_into_one_folder_at_once_are_refused(source, output):
    lock = output / ".conversion" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(source, output, "another conversion into this folder is at work")
    converted(source, output)  # the lock went with its holder


def test_a_failed_run_releases_the_folder(source, output):
    path = shard_paths(source)[2]
    good = path.read_bytes()

    def poison(values):
        values[-1] = np.nan

    change_tensor(source, NORM, poison)
    refused(source, output, NORM)
    path.write_bytes(good)
    converted(source, output)
    assert verify(open_checkpoint(output), progress=False).good


# Interruptions


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A source with many items, and a drafter."""
    folder = tmp_path_factory.mktemp("pair")
    config = tiny_config(num_hidden_layers=8)
    write_model(folder / "source", config, shards=7)
    write_drafter(folder / "draft", tiny_drafter_config())
    return folder / "source", folder / "draft"


def interrupt(study, pair, folder, number):
    program = (Path(__file__).parent / "interruptions.py").read_text()
    return json.loads(run(program, TESTS, study, *pair, folder, number))


def test_killed_at_ten_random_moments_and_run_again_it_equals_an_undisturbed_run(pair, tmp_path):
    found = interrupt("random", pair, tmp_path, 10)
    assert all(equal_again for *_, equal_again in found), found
    # The moments were moments of work, or this would say little.
    assert sum(killed for killed, *_ in found) >= 9, found  # the last may come too late
    assert len({items for _, items, _ in found}) >= 4, found


def test_killed_again_and_again_it_still_gets_there(pair, tmp_path, full):
    kills, equal_again = interrupt("repeated", pair, tmp_path, 20 if full else 4)
    assert equal_again
    assert kills >= 2


def test_stopped_before_any_change_of_the_folder_it_equals_an_undisturbed_run(tmp_path, full):
    """Not at random: the process ends instead of its n-th renaming, for every n or every fifth."""
    pair = tmp_path / "source", tmp_path / "draft"
    write_model(pair[0], tiny_config(num_hidden_layers=2))
    write_drafter(pair[1], tiny_drafter_config(target_layer_ids=(1, 0)))
    found = interrupt("every", pair, tmp_path, 1 if full else 5)
    assert len(found) >= 4
    assert all(equal_again for *_, equal_again in found), found


# Memory


def measure(source, output, devices, monkeypatch):
    """(peak memory before, after, bytes read) of a process with simulated devices."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
    program = (Path(__file__).parent / "peak_memory.py").read_text()
    before, after, read = map(int, run(program, TESTS, source, output).split())
    total = sum(path.stat().st_size for path in shard_paths(source))
    shard = max(path.stat().st_size for path in shard_paths(source))
    shutil.rmtree(output)
    assert read <= 1.05 * total
    return before, after, shard, total


@pytest.mark.parametrize("devices", [1, 8])
def test_peak_memory_is_a_few_shards(tmp_path, monkeypatch, devices, full):
    """All layers and shards of K2.6; with --full all experts too, 2 GB, else 0.4 GB."""
    source = tmp_path / "source"
    if full:
        full_structure.write(source)
    else:
        config = tiny_config(
            hidden_size=512, moe_intermediate_size=512, n_routed_experts=14, num_hidden_layers=61
        )
        checkpoint_factory.write_model(source, config, shards=64, keep=False)
    try:
        before, after, shard, total = measure(source, tmp_path / "output", devices, monkeypatch)
    finally:
        shutil.rmtree(source)
    if full:
        assert after <= 3 * shard + (1 << 30) < total, (after, shard)
    else:  # the program itself apart
        assert after - before <= 3 * shard + (128 << 20) < total / 2, (before, after, shard)


def test_going_on_without_the_drafter_that_was_begun_is_refused(source, output, tmp_path):
    """Half of it would stay inside a model that then does not load."""
    write_drafter(tmp_path / "draft", tiny_drafter_config())
    edit_shard(tmp_path / "draft", 0, lambda tensors: next(iter(tensors.values())).fill(np.nan))
    refused(source, output, "nan", drafter=tmp_path / "draft")
    refused(source, output, f"{output / 'drafter'}: the conversion of a drafter was begun")
    with pytest.raises(CheckpointError, match=f"--drafter=... --output={output}$"):
        open_drafter(output / "drafter", CONFIG)
    shutil.rmtree(output / "drafter")
    converted(source, output)
    open_checkpoint(output)


@pytest.mark.parametrize("where", ["source", "output"])
def test_a_small_file_that_changed_since_is_copied_again(source, output, where):
    (source / "tokenizer_config.json").write_text('{"a": 1}')
    converted(source, output)
    name = "tokenizer_config.json"
    if where == "source":
        (source / name).write_text('{"a": 2}')
    else:
        (output / name).unlink()
    report = converted(source, output)
    assert (report.items_made, report.bytes_read) == (0, 0)
    assert (output / name).read_bytes() == (source / name).read_bytes()
    assert verify(open_checkpoint(output), hf.open_model(source), progress=False).good


def test_times_that_are_damaged_are_named(source, output):
    """The seal does not cover them."""
    converted(source, output)
    data = json.loads((output / "manifest.json").read_text())
    for times in (None, {}, {"finished": "x", "mtime_ns": {}}):
        (output / "manifest.json").write_text(json.dumps({**data, "times": times}))
        refused(source, output, "manifest.json is damaged")
