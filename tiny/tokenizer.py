"""Trains the byte-pair ranks and writes ``tiktoken.model`` and ``tokenizer_config.json``."""

import base64
import json

import tiktoken
from paths import ASSETS, TEXT
from special import NOT_SPECIAL, NUM_RANKS, PATTERN, SPECIAL

SAMPLE_BYTES = 40_000_000


def load() -> tiktoken.Encoding:
    ranks = {}
    for line in (ASSETS / "tiktoken.model").read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding(
        name="tiny-k2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=SPECIAL
    )


def _byte_of_char() -> dict[str, int]:
    """The inverse of GPT-2's printable alphabet for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    table |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in plain)}
    return table


def train() -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    def sample():
        # Every n-th file, so that the sample has the mixture of the whole.
        size = (TEXT / "train.jsonl").stat().st_size
        every = max(size // SAMPLE_BYTES, 1)
        with (TEXT / "train.jsonl").open() as lines:
            for i, line in enumerate(lines):
                if i % every == 0:
                    yield json.loads(line)["text"]

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_RANKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    byte_of = _byte_of_char()
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[c] for c in token) for token, _ in by_id if len(token) > 1]
    ranks = [bytes([b]) for b in range(256)] + merged
    if len(ranks) != NUM_RANKS or len(set(ranks)) != NUM_RANKS:
        raise ValueError(f"trained {len(ranks)} ranks, expected {NUM_RANKS}: use more text")
    ASSETS.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(ranks)]
    (ASSETS / "tiktoken.model").write_text("".join(lines))


def write_config() -> None:
    """``tokenizer_config.json`` in the published form."""
    decoder = {
        str(token_id): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token_id - NUM_RANKS not in NOT_SPECIAL,
        }
        for name, token_id in SPECIAL.items()
        if not name.startswith("<|reserved_token_")
    }
    config = {
        "added_tokens_decoder": decoder,
        "additional_special_tokens": [
            d["content"] for d in decoder.values() if d["special"] and d["content"][0] == "<"
        ],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (ASSETS / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    train()
    write_config()
    encoding = load()
    text = "def f(x):\n    return x + 1\n\nWürde 漢字 it's"
    assert encoding.decode(encoding.encode(text)) == text
