"""The bundled model's tokenizer, against tiktoken used as the published tokenizer uses it."""

import base64
import json

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.text.control import OFFSETS
from kimi_jax.text.parser import parse
from kimi_jax.text.template import render, render_text
from kimi_jax.text.tokenizer import Tokenizer

BASE = 1792  # ranks of tiny-k2; the special slots follow

# The published pattern, alternatives joined as tokenization_kimi.py joins them.
PUBLISHED_PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
MIXED = [
    "\"Hello\" 世界—I'm here since 2024年12月, and don't   stop.\n\n",
    "def reverse(text: str) -> str:\n    return text[::-1]\n",
    "😀🇮🇱👩‍👩‍👧 שלום עולם, Ünïcödé e\u0301 한국어 ไทย",
    "\t\tx = [1, 22, 333, 4444]  # WE'LL see\r\n",
]
CONVERSATION = [
    {"role": "system", "content": "You write short Python functions."},
    {"role": "user", "content": MIXED[0], "name": "Ada"},
    {"role": "assistant", "content": MIXED[1], "reasoning": MIXED[2]},
    {"role": "tool", "content": MIXED[3], "tool_call_id": "functions.run:0"},
    {"role": "user", "content": "Once more."},
]


@pytest.fixture(scope="module")
def tiny(bundled) -> Tokenizer:
    config = json.loads((bundled / "config.json").read_text())
    vocab_size = config.get("text_config", config)["vocab_size"]
    return Tokenizer.from_folder(bundled, vocab_size=vocab_size)


@pytest.fixture(scope="module")
def reference(bundled) -> tiktoken.Encoding:
    ranks = {}
    for line in (bundled / "tiktoken.model").read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    names = {name: BASE + offset for name, offset in OFFSETS.items()}
    return tiktoken.Encoding(
        "tiny-k2", pat_str=PUBLISHED_PATTERN, mergeable_ranks=ranks, special_tokens=names
    )


def test_control_tokens_have_k26s_offsets(tiny):
    assert {name: tiny.special(name) - BASE for name in OFFSETS} == dict(OFFSETS)
    assert tiny.vocab_size == BASE + 256
    assert tiny.stop_ids == (1794, 1793)


@pytest.mark.parametrize("text", MIXED)
def test_ids_equal_the_references(tiny, reference, text):
    ids = tiny.encode(text)
    assert ids == reference.encode_ordinary(text)
    assert tiny.decode(ids) == text


@given(text=st.text())
def test_any_text_has_the_references_ids_and_round_trips(tiny, reference, text):
    ids = tiny.encode(text)
    assert ids == reference.encode_ordinary(text)
    assert tiny.decode(ids) == text


def test_ordinary_text_uses_merged_tokens(tiny):
    assert len(tiny.encode(MIXED[1])) < len(MIXED[1].encode()) / 2


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_a_rendered_chat_has_the_ids_that_upstream_gives_its_text(
    tiny, reference, thinking, preserve
):
    options = {"thinking": thinking, "preserve_thinking": preserve}
    ids = tiny.encode_rendered(render(CONVERSATION, **options))
    assert ids == reference.encode(render_text(CONVERSATION, **options), allowed_special="all")


@given(
    ids=st.lists(st.one_of(st.integers(0, BASE - 1), st.integers(0, BASE + 255)), max_size=40),
    skip=st.booleans(),
)
def test_streamed_pieces_equal_the_full_decode(tiny, ids, skip):
    stream = tiny.stream(skip_special=skip)
    pieces = [stream.push(id) for id in ids] + [stream.finish()]
    assert "".join(pieces) == tiny.decode(ids, skip_special=skip)


@pytest.mark.parametrize("text", MIXED)
def test_streams_equal_the_full_decode_at_every_cut(tiny, text):
    ids = tiny.encode(text)
    for cut in range(len(ids) + 1):
        stream = tiny.stream()
        pieces = [stream.push(id) for id in ids[:cut]]
        assert text.startswith("".join(pieces))
        assert "".join(pieces) + stream.finish() == tiny.decode(ids[:cut])


def test_an_answer_is_separated_from_its_thoughts(tiny):
    ids = [
        *tiny.encode(MIXED[2]),
        tiny.special("</think>"),
        *tiny.encode(MIXED[1]),
        *tiny.stop_ids,
    ]
    result = parse(tiny, ids, thinking=True)
    assert (result.reasoning, result.content) == (MIXED[2], MIXED[1])
