import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.text.control import OFFSETS, Control, Text
from kimi_jax.text.tokenizer import (
    MAX_CHUNK_CHARS,
    MAX_RUN_CHARS,
    Tokenizer,
    _chunks,
)

SAMPLES = [
    "hello world",
    "世界, and 世世 once more",
    "I'm, you're, WE'LL, don't: 12345 years",
    "😀 flags 🇮🇱 and families 👩‍👩‍👧",
    "שלום עולם",
    "a\r\n\r\n  b\t\tc   \n",
    "\u0000\ufffd\uffff\U0010ffff",
    "",
]
tricky = st.text(st.sampled_from("helo wrd世界שלום😀👩‍'\n 19<|im_end|>\u0301\ufffd"))
texts = st.one_of(st.text(), tricky)


@given(text=texts)
def test_encode_and_decode_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", SAMPLES)
def test_samples_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_are_used(tokenizer):
    ids = tokenizer.encode("hello world")
    assert [tokenizer.token_bytes(id) for id in ids] == [b"hello", b" world"]


def test_text_is_split_as_k26_splits_it(make_folder):
    """Each expected pre-token is one token here, so the ids show where the text was cut."""
    text = "\"Hello世界—I'm HERE'LL in 2024年12月,don't stop...\n\n  now  \tHTTPServer e\u0301t"
    expected = [
        '"Hello',  # one leading character belongs to the word
        "世界",  # Han runs stand alone
        "—I'm",
        " HERE'LL",  # contractions in either case
        " in",
        " ",
        "202",  # digits in threes
        "4",
        "年",
        "12",
        "月",
        ",don't",
        " stop",
        "...\n\n",  # punctuation takes its line ends along
        " ",
        " now",
        "  ",
        "\tHTTPServer",
        " e\u0301t",  # marks belong to letters
    ]
    assert "".join(expected) == text
    longer = list(dict.fromkeys(piece.encode() for piece in expected if len(piece.encode()) > 1))
    tokenizer = Tokenizer.from_folder(make_folder([bytes([byte]) for byte in range(256)] + longer))
    pieces = [tokenizer.token_bytes(id).decode() for id in tokenizer.encode(text)]
    assert pieces == expected


def test_control_strings_in_text_stay_text(tokenizer):
    for name in [*OFFSETS, "<|reserved_token_280|>"]:
        ids = tokenizer.encode(f"a{name}b")
        assert max(ids) < 256 + 19, name
        assert tokenizer.decode(ids) == f"a{name}b"


@given(text=st.lists(st.sampled_from([*OFFSETS, "<|", "x", " ", "世"])).map("".join))
def test_no_text_yields_a_special_id(tokenizer, text):
    assert all(id < 256 + 19 for id in tokenizer.encode(text))


def test_pieces_become_one_id_per_control_token_and_text_between(tokenizer):
    pieces = [Control("<|im_user|>"), Text("hello"), Control("<|im_end|>"), Control("<think>")]
    assert tokenizer.encode_rendered(pieces) == [275 + 3, *tokenizer.encode("hello"), 277, 275 + 22]


def test_neighbouring_texts_are_encoded_as_one(tokenizer):
    split = tokenizer.encode_rendered([Text("hel"), Text("lo wor"), Text("ld")])
    assert split == tokenizer.encode("hello world")
    assert split != tokenizer.encode("hel") + tokenizer.encode("lo wor") + tokenizer.encode("ld")


def test_an_unknown_control_token_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"<\|nope\|>"):
        tokenizer.encode_rendered([Control("<|nope|>")])


def test_both_end_tokens_are_stop_ids(tokenizer):
    assert set(tokenizer.stop_ids) == {
        tokenizer.special("<|im_end|>"),
        tokenizer.special("[EOS]"),
    }


def test_skip_special_hides_turn_markers_but_not_tool_and_think_markers(tokenizer):
    names = ["<think>", "</think>", "<|tool_call_begin|>", "<|im_end|>", "[EOS]"]
    ids = tokenizer.encode("a") + [tokenizer.special(name) for name in names]
    assert tokenizer.decode(ids) == "a<think></think><|tool_call_begin|><|im_end|>[EOS]"
    assert tokenizer.decode(ids, skip_special=True) == "a<think></think><|tool_call_begin|>"


@pytest.mark.parametrize("id", [-1, 275 + 256])
def test_an_id_outside_the_vocabulary_is_named(tokenizer, id):
    with pytest.raises(ValueError, match=f"{id} is outside the vocabulary 0..530"):
        tokenizer.decode([id])


# Streaming


def streamed(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    return "".join([stream.push(id) for id in ids] + [stream.finish()])


@given(text=texts)
def test_streamed_text_equals_the_full_decode_at_every_cut(tokenizer, text):
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        assert streamed(tokenizer, ids[:cut]) == tokenizer.decode(ids[:cut])


@given(ids=st.lists(st.integers(0, 530)), skip=st.booleans())
def test_streamed_broken_bytes_equal_the_full_decode(tokenizer, ids, skip):
    expected = tokenizer.decode(ids, skip_special=skip)
    assert streamed(tokenizer, ids, skip_special=skip) == expected


@given(bytes_=st.lists(st.sampled_from(list("é世😀ש".encode()) + [0x41, 0xFF, 0xC0, 0x80])))
def test_streamed_pieces_of_characters_equal_the_full_decode(tokenizer, bytes_):
    assert streamed(tokenizer, bytes_) == bytes(bytes_).decode("utf-8", errors="replace")


def test_no_piece_shows_half_a_character(tokenizer):
    stream = tokenizer.stream()
    pieces = [stream.push(byte) for byte in "a😀ש".encode()]
    assert pieces == ["a", "", "", "", "😀", "", "ש"]
    assert stream.finish() == ""


def test_an_incomplete_character_becomes_a_replacement_only_at_the_end(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push(byte) for byte in b"\xf0\x9f\x98"] == ["", "", ""]
    assert stream.finish() == "\ufffd"


def test_a_finished_stream_starts_afresh(tokenizer):
    stream = tokenizer.stream()
    stream.push(0xF0)
    stream.finish()
    assert stream.push(0x41) == "A"


# Long text


def test_short_text_is_one_chunk():
    text = ("word " * 20_000)[: MAX_CHUNK_CHARS // 4]
    assert list(_chunks(text)) == [text]


@pytest.mark.parametrize("run", ["x", " "])
def test_a_run_is_cut_after_25000_characters(run):
    text = "a b" + run * 60_000 + "c d"
    first = text.index(run * 1000)
    start = first - 1 if run == "x" else first  # the 'b' belongs to the run of non-spaces
    assert [len(chunk) for chunk in _chunks(text)][:2] == [start + MAX_RUN_CHARS, MAX_RUN_CHARS]
    assert "".join(_chunks(text)) == text


def test_a_run_of_exactly_the_limit_is_not_cut():
    assert len(list(_chunks("x" * MAX_RUN_CHARS))) == 1
    assert len(list(_chunks("x" * (MAX_RUN_CHARS + 1)))) == 2


def test_text_is_cut_at_400000_characters():
    text = "word " * 90_000
    assert [len(chunk) for chunk in _chunks(text)] == [MAX_CHUNK_CHARS, 50_000]


@given(text=st.text(st.sampled_from("a \n世"), max_size=40))
def test_cut_text_joins_to_the_text(text):
    import kimi_jax.text.tokenizer as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CHUNK_CHARS", 7)
        patch.setattr(module, "MAX_RUN_CHARS", 3)
        chunks = list(module._chunks(text))
    assert "".join(chunks) == text
    assert all(len(run) <= 3 for chunk in chunks for run in module._RUNS.findall(chunk))


def test_long_text_without_a_space_is_encoded(tokenizer):
    text = "世" * 100_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


# Files


def test_a_vocabulary_of_another_size_than_the_models_is_refused(folder):
    assert Tokenizer.from_folder(folder, vocab_size=531).vocab_size == 531
    with pytest.raises(ValueError, match=r"275 ranks.*531.*vocab_size 163840"):
        Tokenizer.from_folder(folder, vocab_size=163840)


def test_a_missing_rank_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tiktoken\.model is missing"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "culprit"),
    [
        (lambda lines: lines[:100] + [b"garbage\n"] + lines[100:], "line 101"),
        (lambda lines: lines[:100] + lines[101:], "line 101: rank 101 where 100 is due"),
        (lambda lines: lines[:200], "56 of the 256 single bytes"),
        (lambda lines: lines + [base64.b64encode(b"he") + b" 275\n"], "b'he' already has rank 256"),
        (lambda lines: [b"version https://git-lfs.github.com/spec/v1\n"], "LFS"),
    ],
)
def test_a_spoilt_rank_file_is_refused_with_the_place(make_folder, spoil, culprit):
    path = make_folder() / "tiktoken.model"
    path.write_bytes(b"".join(spoil(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=culprit):
        Tokenizer.from_folder(path.parent)


def test_names_are_read_from_the_tokenizer_config(make_folder):
    tokenizer = Tokenizer.from_folder(make_folder(added={"280": {"content": "<|extra|>"}}))
    assert tokenizer.special("<|extra|>") == 280
    assert tokenizer.special("<|im_end|>") == 277


@pytest.mark.parametrize("config", ["{", "[]", '{"added_tokens_decoder": []}'])
def test_a_spoilt_tokenizer_config_is_named(make_folder, config):
    path = make_folder()
    (path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(path)
