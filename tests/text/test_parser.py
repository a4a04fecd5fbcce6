import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.text.control import Control, Text
from kimi_jax.text.parser import Parser, parse

OPEN, CLOSE, END = Control("<think>"), Control("</think>"), Control("<|im_end|>")
SECTION = Control("<|tool_calls_section_begin|>")


def parsed(tokenizer, *pieces, thinking=True):
    return parse(tokenizer, tokenizer.encode_rendered(pieces), thinking=thinking)


def test_output_starts_inside_the_reasoning(tokenizer):
    result = parsed(tokenizer, Text("a"), CLOSE, Text("b"), END)
    assert (result.reasoning, result.content, result.closed) == ("a", "b", True)


def test_a_leading_think_marker_is_dropped(tokenizer):
    result = parsed(tokenizer, OPEN, Text("a"), CLOSE, Text("b"), END)
    assert (result.reasoning, result.content, result.closed) == ("a", "b", True)


def test_a_later_think_marker_is_a_word_of_the_thought(tokenizer):
    result = parsed(tokenizer, Text("a"), OPEN, Text("c"), CLOSE, Text("b"))
    assert (result.reasoning, result.content) == ("a<think>c", "b")


def test_an_immediate_close_gives_content_only(tokenizer):
    result = parsed(tokenizer, CLOSE, Text("b"))
    assert (result.reasoning, result.content) == ("", "b")


def test_in_instant_mode_everything_is_content(tokenizer):
    result = parsed(tokenizer, Text("b"), END, thinking=False)
    assert (result.reasoning, result.content, result.closed) == ("", "b", True)
    assert result.reasoning_tokens == 0


@pytest.mark.parametrize("last", [[END], []], ids=["stop", "length"])
def test_a_thought_that_is_never_closed_stays_reasoning_and_says_so(tokenizer, last):
    result = parsed(tokenizer, Text("hello world"), *last)
    assert (result.reasoning, result.content, result.closed) == ("hello world", "", False)


def test_a_marker_written_as_text_closes_nothing(tokenizer):
    result = parsed(tokenizer, Text("say </think> aloud"), CLOSE, Text("b"))
    assert (result.reasoning, result.content) == ("say </think> aloud", "b")


def test_a_section_of_tool_calls_closes_the_thought_and_stays_in_the_content(tokenizer):
    result = parsed(tokenizer, Text("a"), SECTION, Text("f"))
    assert (result.reasoning, result.content) == ("a", "<|tool_calls_section_begin|>f")
    assert result.closed


def test_reasoning_tokens_count_the_thought_and_its_markers(tokenizer):
    thought, answer = tokenizer.encode("hello world 世界"), tokenizer.encode("hello")
    ids = [tokenizer.special("<think>"), *thought, tokenizer.special("</think>"), *answer]
    assert parse(tokenizer, ids, thinking=True).reasoning_tokens == len(thought) + 2


def test_a_character_cut_by_the_end_of_the_thought_does_not_leak_into_the_content(tokenizer):
    ids = [0xF0, 0x9F, tokenizer.special("</think>"), 0x98, 0x41]
    result = parse(tokenizer, ids, thinking=True)
    assert (result.reasoning, result.content) == ("\ufffd", "\ufffdA")


@given(
    thought=st.lists(st.integers(0, 274)),
    answer=st.lists(st.integers(0, 274)),
    leading=st.booleans(),
)
def test_streamed_halves_equal_the_decoded_halves_at_every_cut(tokenizer, thought, answer, leading):
    start = [tokenizer.special("<think>")] * leading
    ids = [*start, *thought, tokenizer.special("</think>"), *answer]
    close = len(start) + len(thought)
    for cut in range(len(ids) + 1):
        parser = Parser(tokenizer, thinking=True)
        deltas = [parser.push(id) for id in ids[:cut]] + [parser.finish()]
        reasoning = "".join(delta.reasoning for delta in deltas)
        content = "".join(delta.content for delta in deltas)
        assert reasoning == tokenizer.decode(ids[len(start) : min(cut, close)])
        assert content == tokenizer.decode(ids[close + 1 : cut])
        assert parser.closed == (cut > close)


def test_reasoning_and_content_arrive_as_they_are_written(tokenizer):
    parser = Parser(tokenizer, thinking=True)
    ids = tokenizer.encode_rendered([Text("a"), CLOSE, Text("b")])
    deltas = [parser.push(id) for id in ids]
    assert [(delta.reasoning, delta.content) for delta in deltas] == [
        ("a", ""),
        ("", ""),
        ("", "b"),
    ]
