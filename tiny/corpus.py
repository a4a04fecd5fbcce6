"""Text of the corpus: extract, filter, de-duplicate, split.

``python3 tiny/corpus.py`` writes ``work/text/train.jsonl`` and ``work/text/heldout.jsonl``, one
object ``{source, path, text}`` a file. The split is by file: 2 % by the hash of its path.
"""

import hashlib
import html.parser
import json
import re
import subprocess
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from paths import PACKAGES, SOURCES, TEXT, WORK
from sources import download
from tqdm import tqdm

SKIP_PARTS = re.compile(
    r"(^|/)(tests?|testing|_?vendor(ed)?|third_party|extern|externals|locale|migrations|idle_test|"
    r"encodings|lib2to3|site-packages|_pb2\.py|.*_pb2(_grpc)?\.py|conftest\.py|test_[^/]*)(/|$)"
)
PACKAGE_CAP = {"sympy": 6_000_000, "transformers": 16_000_000}
DEFAULT_CAP = 12_000_000
SEEN_LINES_LIMIT = 0.5  # a file with more known lines than this is a near-duplicate


class _TextOfHtml(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag, attrs) -> None:
        if tag in ("script", "style", "svg", "head"):
            self.hidden += 1
        elif tag in ("p", "div", "tr", "table", "h1", "h2", "h3", "h4", "ul", "ol"):
            self.parts.append("\n")
        elif tag == "li":
            self.parts.append("\n* ")

    def handle_endtag(self, tag) -> None:
        if tag in ("script", "style", "svg", "head"):
            self.hidden -= 1

    def handle_data(self, data) -> None:
        if self.hidden <= 0:
            self.parts.append(data)


def text_of_html(page: str) -> str:
    parser = _TextOfHtml()
    parser.feed(page)
    text = re.sub(r"[ \t]+\n", "\n", "".join(parser.parts))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def without_licence_header(text: str) -> str:
    """Drops a leading comment block that states a licence: it is the same in every file."""
    match = re.match(r"((?:[ \t]*#[^\n]*\n|[ \t]*\n)+)", text)
    if match and re.search(r"licen[cs]e|copyright", match.group(1), re.I):
        return text[match.end() :]
    return text


def acceptable(text: str) -> bool:
    """The filters: size, line length, share of non-ASCII characters and of digits."""
    if not 400 <= len(text) <= 400_000:
        return False
    lines = text.count("\n") + 1
    if len(text) / lines > 120:
        return False
    if sum(map(text.count, "0123456789")) > 0.15 * len(text):
        return False
    return len(text.encode("utf-8", "replace")) <= 1.04 * len(text)


def raw_files() -> Iterator[tuple[str, str, str]]:
    """(source, path, text) of every candidate file, in a fixed order."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.rglob("*.py")):
        name = "stdlib/" + path.relative_to(stdlib).as_posix()
        if not SKIP_PARTS.search(name):
            yield "stdlib", name, path.read_text("utf-8", "replace")
    for entry in json.loads(SOURCES.read_text()):
        file = PACKAGES / entry["file"]
        if entry["kind"] == "debian":
            root = WORK / "unpacked" / entry["name"]
            if not root.exists():
                root.mkdir(parents=True)
                subprocess.run(["dpkg", "-x", str(file), str(root)], check=True)
            docs = entry["name"] == "python3.11-doc"
            for path in sorted(root.rglob("*.rst.txt" if docs else "*.html")):
                if path.is_symlink() or "changelog" in path.name or "releaselog" in path.parts:
                    continue
                name = f"{entry['name']}/{path.relative_to(root).as_posix()}"
                text = path.read_text("utf-8", "replace")
                yield ("pydocs", name, text) if docs else ("sqlite", name, text_of_html(text))
            continue
        budget = PACKAGE_CAP.get(entry["name"], DEFAULT_CAP)
        with zipfile.ZipFile(file) as wheel:
            names = [n for n in wheel.namelist() if n.endswith((".py", ".rst", ".md"))]
            names = [n for n in names if not SKIP_PARTS.search(n) and ".dist-info/" not in n]
            for name in sorted(names, key=lambda n: hashlib.sha1(n.encode()).hexdigest()):
                text = wheel.read(name).decode("utf-8", "replace")
                budget -= len(text)
                if budget < 0:
                    break
                yield "pypi", f"{entry['name']}/{name}", text


def held_out(path: str) -> bool:
    return int(hashlib.sha1(path.encode()).hexdigest()[:8], 16) % 50 == 0


def known_share(text: str, seen: set[int]) -> tuple[float, set[int]]:
    lines = {hash(line) for raw in text.splitlines() if len(line := raw.strip()) > 20}
    return (len(lines & seen) / max(len(lines), 1)), lines


def main() -> None:
    download()
    TEXT.mkdir(parents=True, exist_ok=True)
    files = []
    exact: set[str] = set()
    for source, path, text in tqdm(raw_files(), desc="read", unit=" files", mininterval=5):
        text = without_licence_header(text.replace("\r\n", "\n")).lstrip("\n")
        digest = hashlib.sha1(text.encode("utf-8", "replace")).hexdigest()
        if acceptable(text) and digest not in exact:
            exact.add(digest)
            files.append((source, path, text))
    seen: set[int] = set()
    counts: Counter[tuple[str, str]] = Counter()
    writers = {s: (TEXT / f"{s}.jsonl").open("w") for s in ("train", "heldout")}
    # Held-out files come last, so that one that repeats training lines can be dropped.
    for split in ("train", "heldout"):
        for source, path, text in files:
            if held_out(path) != (split == "heldout"):
                continue
            share, lines = known_share(text, seen)
            if share > SEEN_LINES_LIMIT:
                counts["near-duplicate", split] += 1
                continue
            seen |= lines
            counts[source, split] += len(text)
            record = {"source": source, "path": path, "text": text}
            writers[split].write(json.dumps(record) + "\n")
    for writer in writers.values():
        writer.close()
    summary = {f"{split} {source}": n for (source, split), n in sorted(counts.items())}
    (TEXT / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
