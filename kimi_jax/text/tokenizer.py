"""Text to token ids and back: a tiktoken rank file, K2.6's split pattern, 256 special slots.

Source: tokenization_kimi.py of the published checkpoint (pattern, slots, chunking of long text).
One difference, on purpose: upstream encodes with `allowed_special="all"`, so a control string typed
by a user becomes a control token. Here `encode` never makes one; prompts get theirs from `Control`
pieces (`encode_rendered`).
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import tiktoken

from kimi_jax.text.control import EOS, IM_END, N_SPECIAL, Control, Piece, Text, special_slots

# Runs of Han characters are tokens of their own; words carry an English contraction and at most one
# leading character; numbers come in threes. `&&` is set intersection (tiktoken's regex engine).
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Upstream's limits: tiktoken panics on very long input, and its merge loop is quadratic in the
# length of one pre-token, so neither a text nor a run without (or of only) spaces may be longer.
MAX_CHUNK_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUNS = re.compile(r"\s+|\S+")


def read_ranks(path: str | Path) -> dict[bytes, int]:
    """Reads a tiktoken rank file: lines of `base64(token) rank`, ranks 0, 1, 2, ...

    (tiktoken's own reader keeps a copy under the system's temporary folder, by path, and would
    serve it after the file has changed.)

    Raises:
        ValueError: a line that is no such pair, ranks out of order, a repeated token, or a file
            that cannot spell every byte.
    """
    ranks: dict[bytes, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                encoded, rank_text = line.split()
                token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
            except (ValueError, binascii.Error) as error:
                raise ValueError(
                    f"{path}, line {number}: expected 'base64-token rank', found {line[:80]!r}; "
                    "is the download incomplete, or a Git LFS pointer?"
                ) from error
            if rank != len(ranks):
                raise ValueError(
                    f"{path}, line {number}: rank {rank} where {len(ranks)} is due; "
                    "the ranks must be 0, 1, 2, ... in order (incomplete download?)"
                )
            if token in ranks:
                raise ValueError(
                    f"{path}, line {number}: {token!r} already has rank {ranks[token]}"
                )
            ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} of the 256 single bytes have no rank, the first is "
            f"{missing[0]:#04x}; such a vocabulary cannot spell every text"
        )
    return ranks


def _chunks(text: str) -> Iterator[str]:
    """Cuts `text` where upstream does; the chunks joined are the text."""
    for start in range(0, len(text), MAX_CHUNK_CHARS):
        chunk = text[start : start + MAX_CHUNK_CHARS]
        cut = 0
        for run in _RUNS.finditer(chunk):
            for end in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield chunk[cut:end]
                cut = end
        yield chunk[cut:]


class StreamDecoder:
    """Decodes one id at a time: the pieces joined are `Tokenizer.decode` of all ids.

    Bytes that may still become a character are held back; what remains incomplete at the end
    becomes U+FFFD in `finish`, as in a full decode.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, possibly empty."""
        if self._skip_special and token_id in self._tokenizer.hidden_ids:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """The rest, once no id follows. The decoder is then ready for another text."""
        return self._utf8.decode(b"", final=True)


class Tokenizer:
    """A byte-pair vocabulary with K2.6's split pattern and control tokens.

    Args:
        ranks: token bytes -> rank, 0 .. len(ranks) - 1.
        added_tokens: `added_tokens_decoder` of tokenizer_config.json, see `special_slots`.
    """

    def __init__(self, ranks: dict[bytes, int], added_tokens: dict | None = None):
        slots = special_slots(len(ranks), added_tokens)
        self._special = {slot.name: slot.id for slot in slots}
        self._encoding = tiktoken.Encoding(
            "kimi",
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self._special,
            explicit_n_vocab=len(ranks) + N_SPECIAL,
        )
        #: Ids that `decode(..., skip_special=True)` leaves out.
        self.hidden_ids = frozenset(slot.id for slot in slots if slot.hidden)
        #: Number of token ids, special slots included.
        self.vocab_size = len(ranks) + N_SPECIAL
        #: Both tokens that end a turn: K2.6 emits `<|im_end|>`, and `[EOS]` after it.
        self.stop_ids = (self.special(IM_END), self.special(EOS))

    @classmethod
    def from_folder(cls, path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Reads `tiktoken.model` and, if it is there, `tokenizer_config.json`.

        Args:
            path: a Hugging Face folder.
            vocab_size: the model configuration's `vocab_size`, to be checked against the files.

        Raises:
            FileNotFoundError: no `tiktoken.model` in the folder.
            ValueError: a malformed file, or a vocabulary of another size than the model's.
        """
        folder = Path(path)
        model = folder / "tiktoken.model"
        if not model.is_file():
            raise FileNotFoundError(
                f"{model} is missing: the tokenizer needs the checkpoint's rank file; "
                "copy it from where the weights came from"
            )
        config = folder / "tokenizer_config.json"
        added = None
        if config.is_file():
            try:
                added = json.loads(config.read_text(encoding="utf-8")).get("added_tokens_decoder")
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{config} is not a JSON object: {error}") from error
            if added is not None and not isinstance(added, dict):
                raise ValueError(f"{config}: added_tokens_decoder is not an object: {added!r:.80}")
        ranks = read_ranks(model)
        if vocab_size is not None and len(ranks) + N_SPECIAL != vocab_size:
            raise ValueError(
                f"{model} has {len(ranks)} ranks, with {N_SPECIAL} special slots a vocabulary of "
                f"{len(ranks) + N_SPECIAL}, but config.json says vocab_size {vocab_size}; "
                "the two files belong to different models, or one is incomplete"
            )
        return cls(ranks, added)

    def special(self, name: str) -> int:
        """The id of a control token. Raises ValueError for a name that no slot has."""
        try:
            return self._special[name]
        except KeyError:
            raise ValueError(f"{name!r} is not a control token of this tokenizer") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Control strings in it stay text; no id of a special slot results."""
        ids: list[int] = []
        for chunk in _chunks(text):
            ids += self._encoding.encode_ordinary(chunk)
        return ids

    def encode_rendered(self, pieces: Iterable[Piece]) -> list[int]:
        """Token ids of a rendered prompt: one per `Control`, and each run of `Text` as one text.

        Neighbouring texts are joined first, since tokens may span them.
        """
        ids: list[int] = []
        for is_text, run in groupby(pieces, key=lambda piece: isinstance(piece, Text)):
            if is_text:
                ids += self.encode("".join(piece.text for piece in run if isinstance(piece, Text)))
            else:
                ids += [self.special(piece.name) for piece in run if isinstance(piece, Control)]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; they need not be whole characters."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(
                f"token id {token_id} is outside the vocabulary 0..{self.vocab_size - 1}"
            )
        return self._encoding.decode_single_token_bytes(int(token_id))

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave out the ids in `hidden_ids`. Markers of tool calls and thinking are
                not among them unless tokenizer_config.json says so.
        """
        kept = (id for id in ids if not (skip_special and id in self.hidden_ids))
        return b"".join(self.token_bytes(id) for id in kept).decode("utf-8", errors="replace")

    def stream(self, *, skip_special: bool = False) -> StreamDecoder:
        """A decoder for ids that arrive one at a time."""
        return StreamDecoder(self, skip_special=skip_special)
