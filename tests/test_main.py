"""main.py as a program of its own: streams, files and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_factory
import model_folder
import pytest

MAIN = Path(__file__).parent.parent / "main.py"
PATIENCE = 600  # seconds: test machines may be very busy
# One slot and sampling wherever it does not matter: the programs are then compiled once for all.
ENV = {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder.write(tmp_path_factory.mktemp("model"))


def start(*arguments, **options):
    command = [sys.executable, str(MAIN), *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=os.environ | ENV, **(pipes | options))


def run(*arguments, stdin=""):
    process = start(*arguments)
    out, err = process.communicate(stdin, timeout=PATIENCE)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def refused(*arguments, stdin=""):
    """The message of a run that must fail: it is one, and nothing comes on stdout."""
    code, out, err = run("--verbosity=-1", *arguments, stdin=stdin)
    assert code in (1, 2) and out == ""
    assert err.count("main.py: error: ") == 1 and err.startswith("main.py: error: ")
    return code, err


# What comes out


def test_text_goes_to_stdout_and_everything_else_to_stderr(folder, tmp_path):
    report = tmp_path / "out.json"
    code, out, err = run(
        *("--model", folder, "--prompt", "Hi", "--nochat"),
        *("--max-tokens", "9", "--ignore-eos", "--output-json", report),
    )
    assert code == 0
    [entry] = json.loads(report.read_text())
    assert out == entry["text"] + "\n" * (not entry["text"].endswith("\n"))
    assert "int4_moe: reference" in err and "generated 9" in err
    assert list(tmp_path.iterdir()) == [report]


def test_a_file_of_prompts_gives_a_list_of_results_in_its_order(folder, tmp_path):
    lines = [
        {"prompt": "one", "max_tokens": 3},
        {"prompt": [1, 2, 3], "logprobs": 2, "max_tokens": 4},
        {"messages": [{"role": "user", "content": "hi"}], "thinking": False, "seed": 5},
        {"messages": [{"role": "user", "content": "hi"}], "thinking": False, "seed": 5},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    code, out, err = run(
        *("--model", folder, "--prompt_file", path, "--output_json", "-", "--ignore_eos"),
        *("--max_tokens", "6", "--max_num_seqs", "1"),
    )
    assert code == 0
    entries = json.loads(out)
    assert [entry["usage"]["completion_tokens"] for entry in entries] == [3, 4, 6, 6]
    assert entries[2]["token_ids"] == entries[3]["token_ids"]
    keys = {"text", "reasoning", "token_ids", "finish_reason", "stop_reason", "usage", "stats"}
    assert [set(entry) for entry in entries] == [
        keys | ({"logprobs"} if "logprobs" in line else set()) for line in lines
    ]
    assert set(entries[0]["usage"]) == {"prompt_tokens", "completion_tokens", "reasoning_tokens"}
    assert {"ttft_ms", "tpot_ms", "tok_s", "steps"} <= set(entries[0]["stats"])
    assert [row["token_id"] for row in entries[1]["logprobs"]] == entries[1]["token_ids"]
    assert [len(row["top"]) for row in entries[1]["logprobs"]] == [2] * 4
    assert "4 prompts" in err


def test_a_seed_repeats_the_run_and_another_does_not(folder):
    def text(seed):
        code, out, _ = run(
            *("--model", folder, "--nochat", "--max_tokens", "20", "--seed", seed), stdin="Hello"
        )
        assert code == 0
        return out

    first = text(1)
    assert text(1) == first
    assert text(2) != first


def test_a_conversation_remembers_what_was_said(folder):
    code, out, err = run(
        *("--model", folder, "--interactive", "--nothinking", "--max_tokens", "4"),
        *("--max_num_seqs", "1"),
        *("--ignore_eos", "--temperature", "0", "--system", "S"),
        stdin="first\n\nsecond\n",
    )
    assert code == 0
    prompts = [int(count) for count in re.findall(r"prompt (\d+) tokens", err)]
    assert len(prompts) == 2 and prompts[1] > prompts[0] + len("second") + 4


def test_a_dry_run_prints_the_plan_and_loads_nothing(folder, tmp_path):
    for name in ("config.json", "tiktoken.model"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    code, out, err = run(
        *("--model", tmp_path, "--dry_run", "--load_format", "dummy", "--max_num_seqs", "3")
    )
    assert code == 0
    assert "3 at a time" in out and "128 tokens: the largest context that fits" in out
    assert "tree_mla: reference" in out and "target" in out and "cache" in out
    assert "compiling" not in err


def test_a_profile_is_written_and_gives_the_time_of_each_stage(folder, tmp_path):
    report = tmp_path / "out.json"
    code, _, err = run(
        *("--model", folder, "--nochat", "--prompt", "x", "--max_tokens", "30", "--ignore_eos"),
        *("--profile_dir", tmp_path / "trace", "--profile_steps", "4", "--output_json", report),
    )
    assert code == 0
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    stages = json.loads(report.read_text())[0]["stats"]["stage_ms"]
    assert {"forward", "accept", "commit"} <= set(stages)
    assert stages["forward"] > stages["commit"] > 0
    assert "profile of 4 steps" in err and "profiled, ms a step: " in err


def test_help_names_the_main_flags(folder):
    code, out, err = run("--help")
    assert code == 0 and err == ""
    for flag in ("--prompt", "--model", "--temperature", "--output_json", "--dry_run"):
        assert f"  {flag}" in out.replace("--[no]", "--")


def test_a_drafter_changes_the_steps_and_not_the_text(folder, tmp_path):
    drafter = model_folder.write_drafter(tmp_path / "drafter")
    given = ("--model", folder, "--nochat", "--prompt", "Hello", "--max_tokens", "24")
    given = (*given, "--ignore_eos", "--seed", "3")
    _, plain, err = run(*given, "--nospeculate")
    assert "no drafter: plain decoding" in err and "a tree of" not in err
    code, out, err = run(*given, "--drafter", drafter, "--tree-budget", "8")
    assert code == 0 and out == plain
    assert re.search(r"with a tree of [\d.]+ nodes, acceptance length 1\.\d\d, accepted by", err)


# How it ends early


def until_text(process):
    """Waits for the first character of the answer."""
    first = process.stdout.read(1)
    assert first, process.stderr.read()
    return first


def endless(folder, prompts, *arguments):
    """A run that would go on for a long time."""
    model = ("--model", folder, "--nochat", "--ignore_eos", "--max_num_seqs", "1")
    return start(*model, "--prompt_file", prompts, *arguments)


@pytest.fixture
def many_prompts(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"prompt {i}"}) for i in range(400)))
    return path


def test_ctrl_c_ends_cleanly_with_what_was_generated(folder, many_prompts, tmp_path):
    report = tmp_path / "out.json"
    process = endless(folder, many_prompts, "--output_json", report)
    until_text(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in err and "ended by" in err
    entries = json.loads(report.read_text())
    assert len(entries) == 400
    reasons = {entry["finish_reason"] for entry in entries}
    assert "abort" in reasons
    assert entries[0]["text"] and entries[-1]["text"] == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many.jsonl", "out.json"]


def test_ctrl_c_while_loading_ends_at_once(folder, many_prompts):
    process = endless(folder, many_prompts)
    for line in process.stderr:
        if "compiling" in line:
            break
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and time.monotonic() - begin < PATIENCE / 10
    assert "interrupted before anything was generated" in err and "Traceback" not in err


def test_a_reader_that_goes_away_ends_the_run_quietly(folder, many_prompts):
    with endless(folder, many_prompts) as process:
        until_text(process)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert "Traceback" not in err and "BrokenPipe" not in err


# What is refused


def test_a_wrong_command_line_is_refused_as_such():
    for arguments, message in [
        (["--promt", "x"], "Did you mean: prompt"),
        (["--temperature", "warm"], "temperature=warm"),
        (["x"], "unexpected argument 'x'"),
        (["--prompt", "x", "--prompt_file", "y"], "exclude each other"),
        (["--prompt", "x", "--interactive"], "exclude each other"),
        (["--load_format", "npz", "--prompt", "x"], "load_format=npz"),
    ]:
        code, err = refused(*arguments)
        assert code == 2 and message in err and "See --help." in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "/nowhere is not a folder"),
        (["--temperature", "-1"], "--prompt: temperature=-1.0"),
        (["--top_p", "0"], "--prompt: top_p=0.0"),
        (["--max_tokens", "0"], "--prompt: max_tokens=0"),
        (["--logprobs", "99"], "--prompt: logprobs=99"),
        (["--max_model_len", "4097"], "max_model_len=4097 exceeds the model's context of"),
        (["--output_json", "/nowhere/out.json"], "there is no folder /nowhere"),
    ],
)
def test_a_wrong_value_is_refused_by_name(folder, arguments, message):
    model = [] if "--model" in arguments else ["--model", folder]
    code, err = refused(*model, "--nochat", "--prompt", "x", *arguments)
    assert code == 1 and message in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "the drafter's hidden_size=64, the target's 96"),
        ({"vocab_size": 544}, "the drafter's vocab_size=544, the target's 512"),
        ({"target_layer_ids": (0, 2)}, "target_layer_ids=[0, 2]: [2] lie outside"),
    ],
)
def test_a_drafter_of_another_model_is_refused_by_name(folder, tmp_path, changes, message):
    drafter = model_folder.write_drafter(tmp_path / "drafter", **changes)
    code, err = refused("--model", folder, "--drafter", drafter, "--prompt", "x")
    assert code == 1 and message in err


def test_a_drafter_without_its_taps_is_refused(folder, tmp_path):
    drafter = model_folder.write_drafter(tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    text = json.dumps(config).replace("target_layer_ids", "other_layer_ids")
    (drafter / "config.json").write_text(text)
    code, err = refused("--model", folder, "--drafter", drafter, "--prompt", "x")
    assert code == 1 and "target_layer_ids" in err


def test_a_budget_outside_0_to_63_is_refused(folder):
    code, err = refused("--model", folder, "--tree_budget", "64", "--prompt", "x")
    assert code == 1 and "tree_budget=64: expected 'auto' or a number in 0..63" in err


def test_a_prompt_longer_than_the_context_is_refused_before_loading(folder):
    _, err = refused("--model", folder, "--nochat", stdin="y" * 128)
    assert "standard input: the prompt has 128 tokens; the context" in err
    assert "shorten the prompt to 127 tokens" in err


def test_a_missing_file_of_prompts_is_refused(folder):
    _, err = refused("--model", folder, "--prompt_file", "/nowhere.jsonl")
    assert "/nowhere.jsonl" in err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: checkpoint_factory.delete_shard(f, 1), "model-00002-of-000002.safetensors"),
        (lambda f: checkpoint_factory.truncate_shard(f, 0), "model-00001-of-000002.safetensors"),
        (lambda f: checkpoint_factory.edit_config(f, scoring_func="softmax"), "scoring_func"),
        (lambda f: checkpoint_factory.edit_config(f, hidden_act="gelu"), "hidden_act"),
        (lambda f: checkpoint_factory.edit_config(f, n_routed_experts=7), "n_routed_experts=7"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_its_culprit(tmp_path, damage, message):
    damage(model_folder.write(tmp_path / "model"))
    code, err = refused("--model", tmp_path / "model", "--prompt", "x")
    assert code == 1 and message in err


def test_a_scale_that_is_not_a_number_is_found_when_its_shard_is_read(tmp_path):
    folder = model_folder.write(tmp_path / "model")
    name = "language_model.model.layers.1.mlp.experts.2.down_proj.weight_scale"

    def spoil(scales):
        scales.reshape(-1)[3] = float("nan")

    checkpoint_factory.change_tensor(folder, name, spoil)
    code, err = refused("--model", folder, "--nochat", "--prompt", "x")
    assert code == 1 and name in err and "nan" in err
