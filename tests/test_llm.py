import dataclasses
import subprocess
import sys

import model_folder
import numpy as np
import pytest

import kimi_jax
from kimi_jax import LLM, SamplingParams
from kimi_jax.engine.plan import DoesNotFit
from kimi_jax.llm import set_up
from kimi_jax.sampling import INSTANT, THINKING, TINY

PROMPTS = ["Hello", "a much longer prompt, of more than one chunk of sixty-four tokens: " * 2, "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_num_seqs=2, seed=3)


def test_results_come_in_the_order_of_the_prompts_and_are_complete(llm):
    results = llm.generate([p[:90] for p in PROMPTS], GREEDY)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt_token_ids == tuple(prompt[:90].encode())
        assert len(result.token_ids) == len(result.logprobs) == 12
        assert result.text == llm.tokenizer.decode(result.token_ids, skip_special=True)
        assert (result.finish_reason, result.stop_reason) == ("length", "max_tokens")
        assert result.usage.completion_tokens == 12 and result.usage.reasoning_tokens == 0
        assert result.stats.ttft_ms > 0 and result.stats.tok_s > 0 and result.stats.steps == 12


def test_one_prompt_is_a_list_of_one(llm):
    [by_text] = llm.generate("Hello", GREEDY)
    [by_ids] = llm.generate(list(b"Hello"), GREEDY)
    [by_array] = llm.generate(np.frombuffer(b"Hello", np.uint8), GREEDY)
    assert by_text.token_ids == by_ids.token_ids == by_array.token_ids


def test_no_prompt_gives_no_result(llm):
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_sampling(llm):
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (2, 5)]
    assert [len(r.token_ids) for r in llm.generate(["a", "b"], params)] == [2, 5]
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], params)


def test_a_stream_gives_what_generate_gives(llm):
    [whole] = llm.generate("Hello", GREEDY)
    outputs = list(llm.stream("Hello", GREEDY))
    assert "".join(output.text for output in outputs) == whole.text
    assert tuple(token for output in outputs for token in output.token_ids) == whole.token_ids
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].usage == whole.usage


def test_streams_may_be_read_in_turn(llm):
    expected = [r.token_ids for r in llm.generate(["abc", "defg"], GREEDY)]
    streams = [llm.stream("abc", GREEDY), llm.stream("defg", GREEDY)]
    tokens = [[], []]
    for pair in zip(*streams, strict=True):
        for mine, output in zip(tokens, pair, strict=True):
            mine.extend(output.token_ids)
    assert [tuple(mine) for mine in tokens] == expected


def test_closing_a_stream_frees_its_pages(llm):
    free = llm.engine.free_pages
    stream = llm.stream("Hello", dataclasses.replace(GREEDY, max_tokens=100))
    next(stream)
    assert llm.engine.free_pages < free
    stream.close()
    assert llm.engine.free_pages == free and not llm.engine.busy


def test_chat_renders_the_template_and_separates_thoughts(llm):
    messages = [{"role": "user", "content": "hi"}]
    close = llm.tokenizer.special("</think>")
    params = dataclasses.replace(GREEDY, logit_bias={close: 100.0}, max_tokens=3)
    [result] = llm.chat(messages, params)
    think = llm.tokenizer.special("<think>")
    assert result.prompt_token_ids[-1] == think
    assert result.usage.reasoning_tokens == 1
    assert result.token_ids == (close,) * 3
    [instant] = llm.chat(messages, params, thinking=False)
    assert instant.prompt_token_ids[-2:] == (think, close)
    assert instant.usage.reasoning_tokens == 0 and instant.reasoning == ""
    both = llm.chat([messages, messages], params)
    assert [r.token_ids for r in both] == [result.token_ids] * 2


def test_logits_are_those_that_generation_follows(llm):
    [result] = llm.generate("Hello", GREEDY)
    logits = llm.logits((*b"Hello", *result.token_ids))
    assert logits.shape == (17, 512) and logits.dtype == np.float32
    assert tuple(logits[4:-1].argmax(axis=-1)) == result.token_ids
    longer = llm.logits([7] * 100)  # more than one chunk
    np.testing.assert_allclose(longer[:80], llm.logits([7] * 80), atol=1e-4)


def test_logits_of_what_cannot_be_scored_are_refused(llm):
    with pytest.raises(ValueError, match="no tokens"):
        llm.logits([])
    with pytest.raises(ValueError, match="129 tokens exceed the context"):
        llm.logits([1] * 129)
    free = llm.engine.free_pages
    llm.logits([1] * 128)
    assert llm.engine.free_pages == free


def test_the_seed_of_the_constructor_decides_what_requests_without_one_draw(folder, llm):
    params = SamplingParams(temperature=1.0, max_tokens=8)
    drawn = [LLM(folder, max_num_seqs=2, seed=s).generate("x", params)[0] for s in (1, 1, 2)]
    assert drawn[0].token_ids == drawn[1].token_ids != drawn[2].token_ids


def test_random_weights_need_no_shards(tmp_path, folder):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    dummy = LLM(tmp_path, load_format="dummy", max_num_seqs=1)
    [result] = dummy.generate([1, 2, 3], GREEDY)
    assert len(result.token_ids) == 12 and result.text == ""
    with pytest.raises(ValueError, match="has no tokenizer"):
        dummy.generate("text", GREEDY)


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(llm):
    with pytest.raises(ValueError, match="128 tokens; the context .* holds 128"):
        llm.generate("y" * 128, GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16': expected 'bfloat16' or 'float32'"),
        ({"load_format": "npz"}, "load_format='npz'"),
        ({"max_model_len": 129}, "max_model_len=129 exceeds the model's context of 128"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(folder, options, message):
    with pytest.raises(ValueError, match=message):
        set_up(folder, **options)


def test_a_model_too_large_for_the_machine_is_refused_before_it_is_read(tmp_path):
    import json

    from kimi_jax.config import PRESETS, to_hf

    (tmp_path / "config.json").write_text(json.dumps(to_hf(PRESETS["kimi-k2.6"])))
    with pytest.raises(DoesNotFit, match="the model does not fit: weights 5..\\... GiB"):
        set_up(tmp_path, load_format="dummy", gpu_memory_utilization=0.01)


def test_each_model_is_sampled_as_its_card_says(folder):
    setup = set_up(folder)
    assert setup.sampling_params() == setup.sampling_params(thinking=True) == THINKING
    assert setup.sampling_params(thinking=False) == INSTANT
    bundled = set_up()
    assert bundled.sampling_params() == TINY and not bundled.thinks


def test_importing_the_package_does_not_import_jax():
    code = (
        "import sys, kimi_jax; print('jax' in sys.modules, kimi_jax.SamplingParams(top_k=3).top_k)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False 3\n"


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Engine"):
        kimi_jax.Engine  # noqa: B018
