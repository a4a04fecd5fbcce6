"""Planning and inspecting: what headers tell, in seconds, also at the real size."""

import json
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from checkpoint_factory import (
    shard_paths,
    tiny_config,
    tiny_drafter_config,
    truncate_shard,
    write_drafter,
    write_model,
)
from conversion import chunk_file, converted

from kimi_jax.checkpoint import hf, names, plan
from kimi_jax.checkpoint.info import inspect
from kimi_jax.checkpoint.plan import make_plan
from kimi_jax.checkpoint.shards import CheckpointError
from kimi_jax.config import DRAFTER_PRESETS, PRESETS, to_hf

CONFIG = tiny_config()
GIB = 1 << 30


@pytest.fixture
def source(tmp_path):
    write_model(tmp_path / "source", CONFIG, shards=3)
    return tmp_path / "source"


def write_headers(folder, config, table, shards):
    """A checkpoint of the real size that takes no disk: headers, and holes for the tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    sizes = {"BF16": 2, "F32": 4, "I32": 4}
    tensors = [*table.items()]
    weight_map = {}
    for number in range(shards):
        header, end = {}, 0
        for name, expected in tensors[
            len(tensors) * number // shards : len(tensors) * (number + 1) // shards
        ]:
            size = sizes[expected.dtypes[0]]
            for n in expected.shape:
                size *= n
            header[name] = {
                "dtype": expected.dtypes[0],
                "shape": expected.shape,
                "data_offsets": [end, end + size],
            }
            end += size
        path = folder / f"model-{number + 1:05d}-of-{shards:06d}.safetensors"
        weight_map |= dict.fromkeys(header, path.name)
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def bytes_read() -> int:
    """By this process so far, from files and whatever else."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_the_real_checkpoint_is_planned_from_headers_alone(tmp_path):
    target, draft = PRESETS["kimi-k2.6"], DRAFTER_PRESETS["kimi-k2.6"]
    write_headers(tmp_path / "source", target, names.model_tensors(target), 61)
    write_headers(tmp_path / "draft", draft, names.drafter_tensors(draft), 1)
    headers = sum(8 + header_bytes(path) for path in tmp_path.glob("*/*.safetensors"))
    before = bytes_read()
    source, drafter = hf.open_model(tmp_path / "source"), hf.open_drafter(tmp_path / "draft")
    made = make_plan(source, tmp_path / "output", drafter)
    lines = made.lines()
    assert bytes_read() - before < 4 * headers  # and the index, and configurations
    text = "\n".join(lines)
    # 554.3 GiB are published, 0.87 of them for images; the drafter takes 6.48.
    assert made.bytes_to_write == pytest.approx((554.26 - 0.87 + 6.48) * GIB, rel=1e-3)
    assert made.bytes_to_read == pytest.approx(made.bytes_to_write, rel=1e-3)
    assert "69 items, 0 of them whole" in text
    largest = max(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    assert made.host_bytes <= 3 * largest + GIB
    assert max(leaf.chunk_bytes for job in made.jobs for leaf in job.stored.values()) <= GIB
    rows = {line.split()[0]: line for line in lines[-6:]}
    assert [*rows] == ["single", "tp", "ep", "mixed", "context", "data_parallel_size=8,"]
    assert rows["single"].count("does not fit") == 3
    # An eighth of everything but what every device holds.
    weights = float(rows["tp"].split()[1])
    assert 69 < weights < 73
    # Three cards with 86, 126 and 241 GiB to use: the last two hold the model's whole context.
    assert rows["tp"].count("262144 tokens") == 2, rows["tp"]


def test_the_plan_says_what_is_read_written_and_left_out(source, tmp_path):
    drafter = tmp_path / "draft"
    write_drafter(drafter, tiny_drafter_config())
    made = make_plan(hf.open_model(source), tmp_path / "output", hf.open_drafter(drafter))
    text = "\n".join(made.lines())
    files = [*shard_paths(source), *shard_paths(drafter)]
    assert made.bytes_to_read == sum(path.stat().st_size for path in files)
    for part in ("3 vision_tower.* left out", "2 mm_projector.* left out", "7 items", "free"):
        assert part in text
    assert not (tmp_path / "output").exists()  # nothing is written


def test_what_is_whole_already_is_not_planned_again(source, tmp_path):
    converted(source, tmp_path / "output")
    made = make_plan(hf.open_model(source), tmp_path / "output", None)
    assert made.bytes_to_read == made.bytes_to_write == 0


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(source, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 1000))
    made = make_plan(hf.open_model(source), tmp_path / "output", None)
    with pytest.raises(CheckpointError, match=r"takes .* of disk, but 1000 B are free"):
        made.check()


def test_a_machine_without_the_memory_is_refused_with_the_numbers(source, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "available_memory", lambda: 1 << 20)
    made = make_plan(hf.open_model(source), tmp_path / "output", None)
    with pytest.raises(CheckpointError, match=r"of memory, but 1\.0 MiB are available"):
        made.check()


def test_the_memory_of_this_machine_is_known():
    available = plan.available_memory()
    assert available is not None and available > 1 << 20


@pytest.mark.parametrize("inside", ["", "converted"])
def test_an_output_inside_the_source_is_refused(source, inside):
    with pytest.raises(CheckpointError, match="lies in the source folder"):
        make_plan(hf.open_model(source), source / inside, None)


def test_an_output_that_is_a_file_or_under_one_is_refused(source, tmp_path):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "output"):
        with pytest.raises(CheckpointError, match=f"{tmp_path / 'file'} is a file; choose"):
            make_plan(hf.open_model(source), output, None)


def test_an_output_that_cannot_be_written_to_is_refused(source, tmp_path, monkeypatch):
    (tmp_path / "shelf").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # to an administrator nothing is
    with pytest.raises(CheckpointError, match="shelf cannot be written to; choose"):
        make_plan(hf.open_model(source), tmp_path / "shelf" / "output", None)


def test_a_source_without_its_tokenizer_is_told(source, tmp_path):
    def files():
        lines = make_plan(hf.open_model(source), tmp_path / "output", None).lines()
        return next(line for line in lines if line.startswith("files"))

    assert "no tiktoken.model" in files()
    (source / "tiktoken.model").write_text("")
    assert files().endswith("config.json, generation_config.json, tiktoken.model")


def test_a_drafter_that_devices_cannot_share_is_planned_whole():
    """As the engine does it."""
    config = tiny_config(n_routed_experts=8, num_attention_heads=8, moe_intermediate_size=256)
    rows = {line.split()[0]: line for line in plan.device_lines(config, tiny_drafter_config())}
    assert "tokens" in rows["tp"], rows


# What a folder is


def test_a_published_folder_is_told(source):
    found = inspect(source)
    assert (found.kind, found.state) == ("published", "whole")
    details = dict(found.details)
    assert details["role"] == "target"
    assert details["model"] == "3 layers, hidden size 96, 6 experts"
    assert "in 3 files" in details["tensors"]


def test_a_converted_folder_tells_its_version_and_origin(source, tmp_path):
    drafter = tmp_path / "draft"
    write_drafter(drafter, tiny_drafter_config())
    converted(source, tmp_path / "output", drafter)
    found = inspect(tmp_path / "output")
    assert (found.kind, found.state) == ("converted", "whole")
    details = dict(found.details)
    assert details["version"].startswith("1, by kimi-jax ")
    assert details["source"] == "source, 3 files"
    assert details["drafter"] == "converted, whole"
    assert dict(inspect(drafter).details)["role"] == "drafter"


def test_an_unfinished_conversion_is_partial(source, tmp_path):
    output = tmp_path / "output"
    converted(source, output)
    (output / "manifest.json").unlink()
    shutil.rmtree(output / "weights" / "layers.1")
    found = inspect(output)
    assert (found.kind, found.state) == ("unfinished conversion", "partial")
    assert dict(found.details)["items"].startswith("3 of ")


def test_a_damaged_conversion_is_told_with_its_fault(source, tmp_path):
    output = tmp_path / "output"
    converted(source, output)
    path = chunk_file(output, "layers.2", "mlp.router")
    path.write_bytes(b"")
    found = inspect(output)
    assert (found.kind, found.state) == ("converted", "damaged")
    assert "mlp.router" in dict(found.details)["fault"]


def test_a_damaged_download_is_told_with_its_fault(source):
    name = truncate_shard(source, 1)
    found = inspect(source)
    assert (found.kind, found.state) == ("published", "damaged")
    assert name in dict(found.details)["fault"]


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_folder_without_a_checkpoint_is_unknown(tmp_path, name):
    (tmp_path / "empty").mkdir()
    assert inspect(tmp_path / name).kind == "unknown"


def test_a_place_that_holds_something_else_is_refused_before_anything_is_made(source, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for output, fault in [
        ("notes", "is not empty and not a conversion"),
        ("link", "is a link to .*nowhere, which is not there"),
        ("link/inside", "is a link to .*nowhere, which is not there"),
    ]:
        with pytest.raises(CheckpointError, match=fault):
            make_plan(hf.open_model(source), tmp_path / output, None)
