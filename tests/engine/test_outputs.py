from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.engine.outputs import StopText, TextStream
from kimi_jax.text.parser import Delta


def stream_of(pieces, stops):
    """(text as streamed, pieces used, stop string found)."""
    stream = StopText(stops)
    seen = ""
    for used, piece in enumerate(pieces, start=1):
        stopped = stream.append(piece)
        seen += stream.take()
        assert stream.text.startswith(seen)
        if stopped:
            return seen, used, stream.stop
    stream.finish()
    seen += stream.take()
    assert seen == stream.text
    return seen, len(pieces), stream.stop


class Thoughts:
    """A parser of made-up tokens: token i yields the i-th delta."""

    def __init__(self, deltas, rest=None):
        self.deltas, self.rest = deltas, rest or Delta()
        self.reasoning_tokens = 0

    def push(self, token_id):
        return self.deltas[token_id]

    def finish(self):
        return self.rest


def content(*pieces, rest=""):
    return Thoughts([Delta(content=piece) for piece in pieces], Delta(content=rest))


def test_without_stop_strings_nothing_is_held_back():
    stream = StopText()
    assert not stream.append("ab") and stream.take() == "ab"
    assert not stream.append("cd") and stream.take() == "cd"


def test_the_text_ends_before_the_stop_string_and_the_tokens_with_the_one_that_completed_it():
    assert stream_of(["hello ", "ST", "OP", " more"], ["STOP"]) == ("hello ", 3, "STOP")


def test_a_beginning_of_a_stop_string_is_held_back_until_it_cannot_become_one():
    stream = StopText(["STOP"])
    shown = []
    for piece in ["a ST", "O", "x"]:
        stream.append(piece)
        shown.append(stream.take())
    assert shown == ["a ", "", "STOx"]


def test_text_held_back_at_the_end_is_released():
    assert stream_of(["a ST"], ["STOP"]) == ("a ST", 1, None)


def test_the_stop_string_completed_first_wins_whatever_the_order():
    for stops in (["abcd", "bc"], ["bc", "abcd"]):
        assert stream_of(["xabcdy"], stops) == ("xa", 1, "bc")


def test_of_two_completed_by_the_same_character_the_longest_wins():
    assert stream_of(["xabc"], ["bc", "abc"]) == ("x", 1, "abc")


def test_a_stop_string_inside_the_first_min_tokens_is_text():
    stream = TextStream(content("ab", "c", "ab", "d"), ["ab"], min_tokens=2)
    assert [stream.push(token) for token in range(3)] == [False, False, True]
    assert (stream.take(), stream.stop) == (("", "abc"), "ab")


def test_a_stop_string_that_begins_in_the_first_min_tokens_and_ends_later_counts():
    stream = TextStream(content("xa", "b"), ["ab"], min_tokens=1)
    assert [stream.push(0), stream.push(1)] == [False, True]
    assert stream.take() == ("", "x")


def test_the_last_unfinished_character_may_complete_a_stop_string():
    stream = TextStream(content("a", rest="\ufffd"), ["\ufffd"])
    assert not stream.push(0)
    assert stream.finish()
    assert (stream.take(), stream.stop) == (("", "a"), "\ufffd")


def test_a_stop_string_does_not_span_reasoning_and_content():
    parser = Thoughts([Delta(reasoning="ab"), Delta(content="cd"), Delta(content="bc")])
    stream = TextStream(parser, ["bc"])
    assert not stream.push(0) and stream.take() == ("a", "")
    assert not stream.push(1) and stream.take() == ("b", "cd")
    assert stream.push(2) and stream.take() == ("", "")


def test_a_stop_string_ends_the_reasoning_too():
    stream = TextStream(Thoughts([Delta(reasoning="so ab")]), ["ab"])
    assert stream.push(0)
    assert (stream.take(), stream.stop) == (("so ", ""), "ab")


def test_without_a_parser_there_is_no_text():
    stream = TextStream(None)
    assert not stream.push(5) and not stream.finish()
    assert stream.take() == ("", "")


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.sets(st.integers(1, 23)),
)
def test_the_cut_does_not_depend_on_the_tokens(text, stops, cuts):
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    marks = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in zip(marks, marks[1:], strict=False)]
    assert stream_of(pieces, stops)[0] == expected
