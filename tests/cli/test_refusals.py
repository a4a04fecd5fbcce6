"""Input of the wrong type or form is refused by name, before anything is loaded."""

import types

import pytest

from kimi_jax.cli import prompts, report, speculation
from kimi_jax.cli.run import prepare_folder
from kimi_jax.sampling import SamplingParams
from kimi_jax.text.template import render


def read(tmp_path, data: bytes) -> list[prompts.Job]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    return prompts.read_file(str(path), chat=True, system=None)


@pytest.mark.parametrize(
    ("data", "culprit"),
    [
        (b"[" * 100_000, "line 1: not JSON"),
        (b'{"prompt": "a"}\n\xff\xfe', "not UTF-8 text: invalid start byte at byte 16"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "line 1: logit_bias"),
    ],
)
def test_a_file_that_is_no_list_of_prompts_is_refused_by_place(tmp_path, data, culprit):
    with pytest.raises(ValueError, match=culprit):
        read(tmp_path, data)


def test_a_file_that_is_not_there_is_named_with_its_flag(tmp_path):
    with pytest.raises(ValueError, match="--prompt_file=.*none: No such file"):
        prompts.read_file(str(tmp_path / "none"), chat=True, system=None)


def test_a_byte_order_mark_and_null_fields_mean_nothing(tmp_path):
    data = b'\xef\xbb\xbf{"prompt": "a", "stop": null, "logit_bias": null}'
    [job] = read(tmp_path, data)
    assert job.sampling == {}


def test_a_role_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match=r"messages\[0\]: role \['user'\]"):
        render([{"role": ["user"], "content": "a"}])


@pytest.mark.parametrize("value", [2**31, 2**70])
def test_a_top_k_beyond_its_array_is_refused(value):
    with pytest.raises(ValueError, match=f"top_k={value}"):
        SamplingParams(top_k=value)


def drafting(**given):
    blank = {"speculative_config": None, "drafter": None, "tree_budget": None, "speculate": True}
    return speculation.options(types.SimpleNamespace(**blank | given))


@pytest.mark.parametrize("budget", ["1_0", "3.7", "x", ""])
def test_a_budget_that_is_no_plain_number_is_refused(budget):
    with pytest.raises(ValueError, match=f"tree_budget='{budget}'"):
        drafting(tree_budget=budget)


@pytest.mark.parametrize(
    "config", ['{"tree_budget": true}', '{"tree_budget": 3.7}', '{"model": 5}']
)
def test_a_speculative_config_of_the_wrong_type_is_refused(config):
    with pytest.raises(ValueError, match="tree_budget=|model=5"):
        drafting(speculative_config=config)


def test_no_speculation_and_a_budget_of_zero_agree():
    assert drafting(speculate=False, tree_budget="0") == {"drafter": None, "tree_budget": 0}


def test_results_and_traces_need_a_place_before_the_work():
    with pytest.raises(ValueError, match="--output_json=/proc/x.json: .* cannot be written to"):
        report.check_writable("/proc/x.json")
    with pytest.raises(ValueError, match="--profile_dir=/proc/nope"):
        prepare_folder("/proc/nope")
