"""A made-up rank file of the published format: 256 bytes, some merges, 256 special slots.

Several merges end inside a UTF-8 character, so that streams are cut there.
"""

import base64
import json
from pathlib import Path

import pytest

import kimi_jax
from kimi_jax.text.tokenizer import Tokenizer

MERGES = [
    b"he",
    b"ll",
    b"hell",
    b"hello",
    b" w",
    b"or",
    b" wor",
    b"ld",
    b" world",
    b"<|",
    b"|>",
    b"im",
    b"end",
    b"\xe4\xb8",  # the first two bytes of U+4E16
    b"\xe4\xb8\x96\xe7",  # U+4E16 and the first byte of the next character
    b"\xf0\x9f",
    b"\xf0\x9f\x98",  # three of an emoji's four bytes
    b"\xd7\xa9\xd7",  # a Hebrew letter and half of the next
    b" \xd7",
]


def write_ranks(path: Path, tokens: list[bytes]) -> None:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    path.write_bytes(b"".join(lines))


def made_up_tokens() -> list[bytes]:
    return [bytes([byte]) for byte in range(256)] + MERGES


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with a tokenizer of 256 + 19 ranks, and no names but K2.6's own."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_ranks(path / "tiktoken.model", made_up_tokens())
    return path


@pytest.fixture(scope="session")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture
def make_folder(tmp_path):
    """Writes a tokenizer folder: `make_folder(tokens=..., added=...)`."""

    def make(tokens: list[bytes] | None = None, added: dict | None = None) -> Path:
        write_ranks(tmp_path / "tiktoken.model", made_up_tokens() if tokens is None else tokens)
        if added is not None:
            config = json.dumps({"added_tokens_decoder": added})
            (tmp_path / "tokenizer_config.json").write_text(config)
        return tmp_path

    return make


@pytest.fixture(scope="session")
def bundled() -> Path:
    """The bundled model's folder."""
    return Path(kimi_jax.__file__).parent / "assets" / "tiny-k2"
