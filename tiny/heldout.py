"""The committed held-out set: token sequences for the loss, prompts, and 20 chat requests.

``python3 tiny/heldout.py`` writes ``kimi_jax/assets/tiny-k2/heldout.json`` from the held-out files.
Every text in it is a short excerpt of a permissively licensed package; the chat requests are ours.
"""

import json

import numpy as np
from paths import HELD_OUT, TOKENS
from tokens import unpack

ROWS = {"stdlib": 16, "pydocs": 16, "sqlite": 8, "pypi": 32}  # loss: windows of LENGTH + 1 tokens
PROMPTS = {"stdlib": 30, "pydocs": 30, "pypi": 40}
LENGTH = 512
PROMPT = 48

CHAT = (
    "Write a Python function that reverses a string.",
    "Write a Python function that returns the sum of two numbers.",
    "Write a Python function that checks whether a number is even.",
    "Write a Python function that returns the largest item of a list.",
    "Write a Python function that removes duplicates from a list.",
    "Write a Python function that counts the words in a text.",
    "Write a Python function that computes the factorial of n.",
    "Write a Python function that returns the first n Fibonacci numbers.",
    "Write a Python function that reads a file and returns its lines.",
    "Write a Python function that merges two dictionaries.",
    "Write a Python function that flattens a nested list.",
    "Write a Python function that converts a string to lower case.",
    "Write a Python function that returns the mean of a list of numbers.",
    "Write a Python function that checks if a string is a palindrome.",
    "Write a Python function that joins a list of strings with commas.",
    "Write a Python function `clamp(value, low, high)` that limits a value to a range.",
    "Write a Python function to find the index of an item in a list.",
    "Write a Python function to parse a comma separated string into a list.",
    "Write a Python function to get the extension of a file name.",
    "Write a Python function that returns the current time as a string.",
)


def main() -> None:
    tokens = unpack(TOKENS / "heldout.xz")
    ranges = json.loads((TOKENS / "heldout.json").read_text())["ranges"]
    rng = np.random.default_rng(2026)

    def excerpts(source: str, count: int, length: int) -> list[list[int]]:
        """One excerpt from each of `count` equal parts of the source."""
        low, high = ranges[source]
        edges = np.linspace(low, high - length, count + 1).astype(int)
        pairs = zip(edges[:-1], edges[1:], strict=True)
        starts = [int(rng.integers(a, max(b, a + 1))) for a, b in pairs]
        return [tokens[s : s + length].tolist() for s in starts]

    content = {
        "loss": {source: excerpts(source, n, LENGTH + 1) for source, n in ROWS.items()},
        "prompts": {source: excerpts(source, n, PROMPT) for source, n in PROMPTS.items()},
        "chat": list(CHAT),
    }
    HELD_OUT.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(HELD_OUT, HELD_OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
