"""The stream of the closing phase: text, short plain dialogues and the primer.

``python3 tiny/chat_short.py`` writes ``work/tokens/closing.*``: the documents of the training
stream (a slice of the large source), the dialogues whose answer is a short function, and those made
of ``primer.py``, with the regions named as in ``CLOSING`` of ``unloop.py``.
"""

import json
import random

import chat
import numpy as np
from paths import HERE, TEXT, TOKENS
from tokens import encode_pieces, pack, unpack

PYPI_SLICE = 0.5
VARIANTS = 16  # dialogues a primer function


def short(pieces: list) -> bool:
    """One turn whose answer is a function of at most 12 lines and 420 characters."""
    texts = [value for control, value in pieces if not control]
    answer = texts[-1]
    return (
        answer.startswith("```python\ndef ")
        and len(answer) <= 420
        and answer.count("\n") <= 13
        and sum(t == "user" for t in texts) == 1
    )


def primer_dialogues() -> list[list[int]]:
    source = (HERE / "primer.py").read_text()
    rng = random.Random(0)
    out = []
    for function in chat.functions(source, shortest=20):
        for _ in range(VARIANTS):
            parts = chat.turns(function, rng)
            system = rng.choice(chat.SYSTEM) if rng.random() < 0.1 else None
            out.append(encode_pieces(chat.dialogue(parts, system, rng.random() < 0.2)))
    rng.shuffle(out)
    return out


def main() -> None:
    stream = unpack(TOKENS / "train.xz")
    index = json.loads((TOKENS / "train.json").read_text())["ranges"]
    starts = np.load(TOKENS / "train_starts.npz")
    parts, ranges, all_starts, offset = [], {}, {}, 0

    def add(name: str, tokens: np.ndarray, begins: np.ndarray) -> None:
        nonlocal offset
        parts.append(tokens)
        ranges[name] = [offset, offset + len(tokens)]
        all_starts[name] = (begins + offset).astype(np.int32)
        offset += len(tokens)

    for name in ("stdlib", "pydocs", "sqlite", "pypi", "chat"):
        low, high = index[name]
        if name == "pypi":
            high = low + int((high - low) * PYPI_SLICE)
        begins = starts[name]
        add(name, stream[low:high], begins[(begins >= low) & (begins < high)] - low)
    dialogues = []
    with (TEXT / "chat_train.jsonl").open() as lines:
        for line in lines:
            record = json.loads(line)
            if not record["method"] and short(record["pieces"]):
                dialogues.append(encode_pieces(record["pieces"]))
    random.Random(1).shuffle(dialogues)
    for name, group in (("short", dialogues), ("primer", primer_dialogues())):
        lengths = np.array([len(d) for d in group])
        add(name, np.concatenate(group).astype(np.uint16), np.cumsum(lengths) - lengths)
        print(name, len(group), "dialogues")
    tokens = np.concatenate(parts)
    digest = pack(tokens, TOKENS / "closing.xz")
    np.savez_compressed(TOKENS / "closing_starts.npz", **all_starts)
    content = {"ranges": ranges, "tokens": len(tokens), "sha256": digest}
    (TOKENS / "closing.json").write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content))


if __name__ == "__main__":
    main()
