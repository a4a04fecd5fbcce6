"""Token streams for training: ``work/tokens/tokens.xz`` and its index ``tokens.json``.

The stream is uint16, little-endian: each source's documents end with [EOS]; dialogues end with
<|im_end|> of the last turn. The index holds each region's range and the starts of the dialogues.
Token planes are stored apart (low bytes, then high bytes): it compresses better.
"""

import hashlib
import json
import lzma
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import batched

import numpy as np
from paths import TEXT, TOKENS
from special import EOS, SPECIAL, VOCAB
from tokenizer import load

SOURCE_ORDER = ("stdlib", "pydocs", "sqlite", "pypi")
_encoding = None


def encoding():
    global _encoding
    _encoding = _encoding or load()
    return _encoding


def encode_text(text: str) -> list[int]:
    """Control strings inside text stay text."""
    return encoding().encode(text, disallowed_special=())


def encode_pieces(pieces: list) -> list[int]:
    ids: list[int] = []
    for control, value in pieces:
        ids += [SPECIAL[value]] if control else encode_text(value)
    return ids


def _documents(lines: tuple[str, ...]) -> list[tuple[str, np.ndarray]]:
    out = []
    for line in lines:
        record = json.loads(line)
        out.append((record["source"], np.array([*encode_text(record["text"]), EOS], np.uint16)))
    return out


def _dialogues(lines: tuple[str, ...]) -> list[tuple[str, np.ndarray]]:
    records = [json.loads(line) for line in lines]
    return [
        ("method" if r["method"] else "chat", np.array(encode_pieces(r["pieces"]), np.uint16))
        for r in records
    ]


def encode_split(split: str) -> dict[str, list[np.ndarray]]:
    streams: dict[str, list[np.ndarray]] = {}
    with ProcessPoolExecutor(2) as pool:
        for name, work in ((f"{split}.jsonl", _documents), (f"chat_{split}.jsonl", _dialogues)):
            with (TEXT / name).open() as lines:
                for result in pool.map(work, batched(lines, 400)):
                    for source, ids in result:
                        streams.setdefault(source, []).append(ids)
    return streams


def pack(tokens: np.ndarray, path) -> str:
    """Writes the stream; returns the sha256 of the uncompressed uint16 tokens."""
    planes = tokens.astype("<u2").view(np.uint8).reshape(-1, 2).T
    path.write_bytes(lzma.compress(np.ascontiguousarray(planes).tobytes(), preset=3))
    return hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()


def unpack(path) -> np.ndarray:
    planes = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8).reshape(2, -1)
    return np.ascontiguousarray(planes.T).view("<u2").reshape(-1)


def main() -> None:
    TOKENS.mkdir(parents=True, exist_ok=True)
    for split in ("train", "heldout"):
        streams = encode_split(split)
        order = [*SOURCE_ORDER, "chat", "method"]
        ranges, starts, parts, offset = {}, {}, [], 0
        for source in order:
            documents = streams.get(source, [])
            size = sum(map(len, documents))
            lengths = np.array([len(d) for d in documents])
            starts[source] = (offset + np.cumsum(lengths) - lengths).astype(int).tolist()
            ranges[source] = [offset, offset + size]
            parts += documents
            offset += size
        tokens = np.concatenate(parts)
        assert tokens.max() < VOCAB
        digest = pack(tokens, TOKENS / f"{split}.xz")
        index = {"ranges": ranges, "tokens": len(tokens), "sha256": digest}
        np.savez_compressed(
            TOKENS / f"{split}_starts.npz", **{k: np.array(v, np.int32) for k, v in starts.items()}
        )
        (TOKENS / f"{split}.json").write_text(json.dumps(index, indent=1) + "\n")
        print(split, json.dumps(index), file=sys.stderr)


if __name__ == "__main__":
    main()
