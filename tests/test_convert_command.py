"""`python3 -m convert` as a program: what it prints, and its exit codes."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint_factory import (
    delete_shard,
    tiny_config,
    tiny_drafter_config,
    truncate_shard,
    write_drafter,
    write_model,
)
from conversion import chunk_file, converted, flip_bit

from kimi_jax.checkpoint.read import CheckpointError, open_checkpoint

ROOT = Path(__file__).parent.parent


def start(*arguments) -> subprocess.Popen:
    # Not from the test's own settings: a converter leaves GPUs alone by itself.
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    return subprocess.Popen(
        [sys.executable, "-m", "convert", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen) -> subprocess.CompletedProcess:
    printed, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors, errors
    return subprocess.CompletedProcess(process.args, process.returncode, printed, errors)


def command(*arguments) -> subprocess.CompletedProcess:
    return end(start(*arguments))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write_model(folder, tiny_config(), shards=3)
    write_drafter(folder / "drafter", tiny_drafter_config())
    return folder


def test_convert_states_the_plan_shows_progress_and_reports_each_phase(source, tmp_path):
    done = command("convert", f"--source={source}", f"--output={tmp_path / 'output'}")
    assert done.returncode == 0, done.stderr
    for part in ("read ", "write ", "disk ", "memory "):  # the plan
        assert part in done.stdout
    for phase in ("read    ", "hash    ", "write   ", "in all  "):
        [line] = [
            line for line in done.stdout.splitlines() if line.startswith(phase) and "/s" in line
        ]
        assert "MB in" in line and "MB/s" in line
    assert done.stdout.splitlines()[-1] == f"whole: {tmp_path / 'output'}"
    assert "B/s]" in done.stderr  # the progress bar, with its rate and the time left
    assert (tmp_path / "output" / "drafter" / "manifest.json").exists()  # found in the source


def test_verify_prints_every_pair_of_hashes_and_exits_with_1_at_a_fault(source, tmp_path):
    output = tmp_path / "output"
    converted(source, output, source / "drafter")
    good = command("verify", f"--output={output}", f"--source={source}", "--hashes=-")
    assert good.returncode == 0, good.stderr
    pairs = [line.split() for line in good.stdout.splitlines() if len(line.split()) == 3]
    pairs = [pair for pair in pairs if len(pair[0]) == 64]
    assert len(pairs) > 100
    assert all(theirs == ours for theirs, ours, _ in pairs)
    flip_bit(chunk_file(output, "layers.1", "mlp.experts.down_codes"), 5)
    bad = command("verify", f"--output={output}")
    assert bad.returncode == 1
    assert "FAULT   language_model.model.layers.1.mlp.experts.0.down_proj" in bad.stdout
    assert "NOT EQUAL: 1 faults" in bad.stdout


def test_verify_says_what_became_of_the_drafter(source, tmp_path):
    output = tmp_path / "output"
    converted(source, output)
    alone = command("verify", f"--output={output}", f"--source={source}")
    assert alone.returncode == 0, alone.stderr
    lost = command(
        *("verify", f"--output={output}", f"--source={source}", f"--drafter={source / 'drafter'}")
    )
    assert lost.returncode == 1
    assert "holds no drafter to compare" in lost.stderr
    converted(source, output, source / "drafter")
    (output / "config.json").write_text((output / "config.json").read_text() + " ")
    told = command("verify", f"--output={output}", f"--source={source}", "--drafter=")
    assert told.returncode == 1
    assert "no --drafter is given" in told.stdout
    assert told.stdout.splitlines()[-1] == f"{output}, all in all: NOT EQUAL: 1 faults"


def test_a_place_for_the_hashes_that_cannot_be_is_named(source, tmp_path):
    output = tmp_path / "output"
    converted(source, output)
    before = (output / "manifest.json").read_bytes()
    for path, message in [
        (output / "manifest.json", "lies in"),
        (tmp_path / "nowhere" / "hashes", "is its folder not there?"),
        (tmp_path, "give a file, not a folder"),
    ]:
        done = command("verify", f"--output={output}", f"--hashes={path}")
        assert done.returncode == 1
        assert message in done.stderr
    assert (output / "manifest.json").read_bytes() == before


def test_plan_and_info_only_look(source, tmp_path):
    planned = command("plan", f"--source={source}", f"--output={tmp_path / 'output'}")
    assert planned.returncode == 0, planned.stderr
    assert "longest context" in planned.stdout
    assert not (tmp_path / "output").exists()
    told = command("info", f"--source={source}")
    assert told.returncode == 0
    assert "published" in told.stdout
    assert command("info", f"--output={tmp_path}").returncode == 1  # nothing there


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["convert"], 2, "convert needs --source=FOLDER"),
        (["convrt"], 2, "expected one command of plan, convert, verify, info"),
        (["plan", "--sorce=x"], 2, "Unknown command line flag 'sorce'"),
        (["plan", "--source=/nowhere", "--output=/tmp/x"], 1, "/nowhere is not a folder"),
        (["info", "--source=x", "--drafter=y"], 2, "info does not take --drafter"),
        (["verify", "--output=x", "--drafter=y"], 2, "give both"),
        (["plan", "--source=x", "--output=\udcff"], 2, "the path is not UTF-8"),
    ],
)
def test_a_wrong_command_line_is_named(arguments, code, message):
    done = command(*arguments)
    assert done.returncode == code
    assert message in done.stderr


@pytest.mark.parametrize("fault", ["a shard missing", "a shard truncated", "no drafter"])
def test_a_fault_of_the_source_ends_it_before_anything_is_written(source, tmp_path, fault):
    shutil.copytree(source, tmp_path / "source")
    arguments = [f"--source={tmp_path / 'source'}", f"--output={tmp_path / 'output'}"]
    if fault == "a shard missing":
        name = delete_shard(tmp_path / "source", 1)
        parts = ["1 of 3 shards are missing", name, "incomplete download?"]
    elif fault == "a shard truncated":
        name = truncate_shard(tmp_path / "source", 1)
        parts = [name, "truncated", "incomplete download?"]
    else:
        arguments.append(f"--drafter={tmp_path / 'draft'}")
        parts = [f"{tmp_path / 'draft'} is not a folder"]
    done = command("convert", *arguments)
    assert done.returncode == 1
    for part in parts:
        assert part in done.stderr
    assert not (tmp_path / "output").exists()


def begun(source, output) -> subprocess.Popen:
    """A conversion in the middle of its work."""
    process = start("convert", f"--source={source}", f"--output={output}")
    while not (output / ".conversion" / "source.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    return process


def test_ctrl_c_ends_it_at_once_and_the_same_command_goes_on(source, tmp_path):
    process = begun(source, tmp_path / "output")
    process.send_signal(signal.SIGINT)
    interrupted = end(process)
    assert interrupted.returncode == 130
    assert interrupted.stderr.endswith("interrupted; run the same command again to go on\n")
    with pytest.raises(CheckpointError, match="was not finished"):
        open_checkpoint(tmp_path / "output")
    again = command("convert", f"--source={source}", f"--output={tmp_path / 'output'}")
    assert again.returncode == 0, again.stderr
    open_checkpoint(tmp_path / "output")


def test_a_second_conversion_into_the_folder_of_a_first_is_refused(source, tmp_path):
    process = begun(source, tmp_path / "output")
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(CheckpointError, match="another conversion into this folder is at work"):
        converted(source, tmp_path / "output")
    process.send_signal(signal.SIGCONT)
    assert end(process).returncode == 0  # the first was not disturbed
    open_checkpoint(tmp_path / "output")


def test_a_write_that_fails_is_named_and_what_it_left_is_not_whole(source, tmp_path):
    """As on a disk that fills up: here a limit on the size of files."""
    output = tmp_path / "output"
    process = start("convert", f"--source={source}", f"--output={output}")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    failed = end(process)
    assert failed.returncode == 1
    assert re.search(rf"error: {output}/.*\.conversion/items/.*/c/0", failed.stderr)
    assert "File too large; raise the limit" in failed.stderr
    with pytest.raises(CheckpointError, match="was not finished"):
        open_checkpoint(output)
    assert end(start("convert", f"--source={source}", f"--output={output}")).returncode == 0
    open_checkpoint(output)
