"""Chat dialogues made from documented functions of the corpus.

Nothing is invented: requests are docstrings or names, answers are the functions themselves (without
their docstring) or the docstrings. ``python3 tiny/chat.py`` writes ``work/text/chat_train.jsonl``
and ``work/text/chat_heldout.jsonl``: one dialogue a line, a list of (text or control name) pieces
in the form of Kimi K2.6's chat template.
"""

import ast
import hashlib
import json
import random
import re
import textwrap
from collections.abc import Iterator

from paths import TEXT

SYSTEM = (
    "You are a helpful assistant.",
    "You are a careful Python programmer.",
    "You write short Python functions.",
    "Answer with code.",
)


def first_sentence(docstring: str) -> str:
    paragraph = re.sub(r"\s+", " ", docstring.strip().split("\n\n")[0])
    match = re.match(r"(.{15,}?[.])(\s|$)", paragraph)
    return (match.group(1) if match else paragraph).strip()


def without_docstring(node: ast.FunctionDef, lines: list[str]) -> str | None:
    """The source, dedented, without decorators and docstring; None if nothing is left."""
    if len(node.body) < 2 or node.body[1].lineno <= node.body[0].end_lineno:
        return None
    head = lines[node.lineno - 1 : node.body[0].lineno - 1]
    tail = lines[node.body[0].end_lineno : node.end_lineno]
    while tail and not tail[0].strip():
        tail = tail[1:]
    source = textwrap.dedent("\n".join(head + tail)).strip()
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    return source


def functions(text: str, shortest: int = 40) -> Iterator[dict]:
    """Documented short functions and methods of one module."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    bodies = [(module.body, False)]
    bodies += [(n.body, True) for n in module.body if isinstance(n, ast.ClassDef)]
    for body, in_class in bodies:
        for node in body:
            if not isinstance(node, ast.FunctionDef) or not node.body:
                continue
            docstring = ast.get_docstring(node)
            if not docstring or not 20 <= len(docstring) <= 900:
                continue
            sentence = first_sentence(docstring)
            if not 12 <= len(sentence) <= 200 or not sentence.isascii():
                continue
            source = without_docstring(node, lines)
            if source is None or not source.isascii():
                continue
            if not shortest <= len(source) <= 900 or source.count("\n") >= 24:
                continue
            if "NotImplementedError" in source or source.endswith(("pass", "...")):
                continue  # a stub is no answer
            if any(len(line) > 100 for line in source.splitlines()):
                continue
            method = in_class and bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
            yield {
                "name": node.name,
                "arguments": ", ".join(a.arg for a in node.args.args),
                "sentence": sentence,
                "docstring": docstring,
                "source": source,
                "method": method,
            }


def lowered(sentence: str) -> str:
    """'Return the sum.' -> 'return the sum.' (an acronym keeps its capitals)."""
    return sentence[0].lower() + sentence[1:] if sentence[1:2].islower() else sentence


def third_person(sentence: str) -> str | None:
    """'Return the sum.' -> 'returns the sum.'; None if the first word does not look like a verb."""
    verb, _, rest = sentence.partition(" ")
    if not re.fullmatch(r"[A-Z][a-z]+", verb) or not rest:
        return None
    verb = verb.lower()
    if verb.endswith("s") and not verb.endswith("ss"):
        return f"{verb} {rest}"
    if verb in ("the", "this", "a", "an", "if", "for", "in", "helper", "like", "and", "given"):
        return None
    if verb.endswith(("s", "x", "ch", "sh")):
        return f"{verb}es {rest}"
    if verb.endswith("y") and verb[-2:-1] not in "aeiou":
        return f"{verb[:-1]}ies {rest}"
    return f"{verb}s {rest}"


def request(function: dict, rng: random.Random) -> str:
    noun = "method" if function["method"] else "function"
    sentence, name = function["sentence"], function["name"]
    signature = f"`def {name}({function['arguments']})`"
    that = third_person(sentence)
    words = name.strip("_").replace("_", " ").lower()
    forms = [
        f"Write a Python {noun}: {sentence} {signature}",
        f"Write a Python {noun}: {sentence} {signature}",
        f"Write a Python {noun} `{name}`. {sentence}",
        f"Write a Python {noun} called `{name}`. It should {lowered(sentence)}",
        f"Implement {signature}: {sentence}",
    ]
    if that:
        forms += [f"Write a Python {noun} that {that}"] * 5
        forms += [f"Write a {noun} that {that}", f"Please write a Python {noun} that {that}"]
        forms += [f"Write a Python {noun} named `{name}` that {that}"]
        forms += [f"Write a Python {noun} to {lowered(sentence)}"] * 2
    if len(words) > 5 and " " in words:
        forms += [f"Write a Python {noun} to {words}."] * 2
    return rng.choice(forms)


def code(source: str) -> str:
    return f"```python\n{source}\n```"


def turns(function: dict, rng: random.Random) -> list[tuple[str, str, str]]:
    """One or more (user, reasoning, answer) turns about a function."""
    sentence = function["sentence"]
    paragraph = re.sub(r"\s+", " ", function["docstring"].split("\n\n")[0]).strip()
    kind = rng.random()
    if kind < 0.10:
        return [(f"What does this function do?\n\n{code(function['source'])}", "", paragraph)]
    # Reasoning is what the source says about the function beyond the request.
    thought = f"The function is `{function['name']}({function['arguments']})`. {paragraph}"
    first = (request(function, rng), thought, code(function["source"]))
    if kind < 0.20:
        by_name = f"What does `{function['name']}` do?"
        question = rng.choice(["What does it do?", "Explain it.", by_name])
        return [first, (question, "It follows from the code.", paragraph or sentence)]
    return [first]


def dialogue(parts: list[tuple[str, str, str]], system: str | None, thinking: bool) -> list:
    """Pieces of the chat template: [True, control name] or [False, text]."""
    pieces: list = []

    def control(*names: str) -> None:
        pieces.extend([True, name] for name in names)

    if system:
        control("<|im_system|>")
        pieces.append([False, "system"])
        control("<|im_middle|>")
        pieces.append([False, system])
        control("<|im_end|>")
    for number, (user, thought, answer) in enumerate(parts):
        control("<|im_user|>")
        pieces.append([False, "user"])
        control("<|im_middle|>")
        pieces.append([False, user])
        control("<|im_end|>", "<|im_assistant|>")
        pieces.append([False, "assistant"])
        control("<|im_middle|>", "<think>")
        if thinking and number == len(parts) - 1:  # earlier turns lose their reasoning
            pieces.append([False, thought])
        control("</think>")
        pieces.append([False, answer])
        control("<|im_end|>")
    return pieces


def main() -> None:
    for split in ("train", "heldout"):
        count = 0
        seen: set[str] = set()
        with (
            (TEXT / f"{split}.jsonl").open() as lines,
            (TEXT / f"chat_{split}.jsonl").open("w") as out,
        ):
            for line in lines:
                record = json.loads(line)
                if not record["path"].endswith(".py"):
                    continue
                seed = hashlib.sha1(record["path"].encode()).hexdigest()
                rng = random.Random(seed)
                previous = None
                for function in functions(record["text"]):
                    if function["source"] in seen:
                        continue
                    seen.add(function["source"])
                    parts = turns(function, rng)
                    if previous and rng.random() < 0.08:
                        parts = [*turns(previous, rng)[:1], *parts]
                    system = rng.choice(SYSTEM) if rng.random() < 0.15 else None
                    pieces = dialogue(parts, system, thinking=rng.random() < 0.2)
                    out.write(json.dumps({"method": function["method"], "pieces": pieces}) + "\n")
                    previous = function
                    count += 1
        print(split, count, "dialogues")


if __name__ == "__main__":
    main()
