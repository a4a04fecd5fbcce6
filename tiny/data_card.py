"""Writes ``kimi_jax/assets/tiny-k2/DATA.md``: what the bundled model was trained on."""

import json

from paths import ASSETS, SOURCES, TEXT, TOKENS

HEAD = """# What tiny-k2 was trained on

Python source, Python's documentation and SQLite's documentation, all under permissive licences,
and chat dialogues made from documented functions of the same source. The corpus itself is not
distributed; `tiny/corpus.py` rebuilds it from the pinned packages below. Their licence texts lie in
`LICENSES/`. The weights are under this repository's licence.

| source | training text (characters) | training tokens |
|---|---|---|
{rows}

Filters: 400 to 400,000 characters a file, at most 120 characters a line on average, few digits and
non-ASCII characters; tests, vendored and generated code left out; exact duplicates, and files of
which over half of the longer lines were seen before, left out. 2 % of the files (by the hash of
their path) are held out; a held-out file that repeats training lines is left out too.

Dialogues: {chat} with functions, and methods beside them. A request is a docstring or a name put
into one of a dozen plain sentences, an answer is the function without its docstring, or the
docstring. `tiny/primer.py` holds 77 small functions that were written for this purpose; none of
them answers one of the 20 requests on which the share of parsing answers is measured.
The drafter was trained on text that the packed model wrote itself.

Held-out token sequences in `heldout.json` are excerpts of at most 513 tokens from held-out files.

Python's standard library (PSF-2.0) is the one of CPython 3.12.1. Other inputs:

| input | version | licence | sha256 |
|---|---|---|---|
"""


def main() -> None:
    text = json.loads((TEXT / "summary.json").read_text())
    ranges = json.loads((TOKENS / "train.json").read_text())["ranges"]
    rows = [
        f"| {name} | {text.get(f'train {name}', 0):,} | {high - low:,} |"
        for name, (low, high) in ranges.items()
    ]
    rows = [row.replace("| 0 |", "| (dialogues) |") for row in rows]
    with (TEXT / "chat_train.jsonl").open() as lines:
        chat = sum('"method": false' in line for line in lines)
    page = HEAD.format(rows="\n".join(rows), chat=f"{chat:,}")
    for e in json.loads(SOURCES.read_text()):
        page += f"| {e['name']} | {e['version']} | {e['licence']} | `{e['sha256']}` |\n"
    (ASSETS / "DATA.md").write_text(page)


if __name__ == "__main__":
    main()
