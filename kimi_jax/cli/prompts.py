"""What is to be continued: --prompt, --prompt_file, stdin, each with its sampling."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_jax.llm import Message, Prompt, Setup
from kimi_jax.sampling import SamplingParams

SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt as the user gave it. where: for messages, e.g. "prompts.jsonl, line 3"."""

    prompt: Prompt
    where: str
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    thinking: bool | None = None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Job":
        """From its fields, which may have been JSON in between: its keys are strings."""
        sampling = dict(fields["sampling"])
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {int(id): v for id, v in sampling["logit_bias"].items()}
        return cls(**{**fields, "sampling": sampling})

    def request(self, setup: Setup, sampling: Mapping[str, Any], thinking: bool | None):
        """The engine's request: the model's own sampling, then the command line's, then its own.

        Raises ValueError that says which prompt is meant.
        """
        thinking = thinking if self.thinking is None else self.thinking
        try:
            defaults = setup.sampling_params(thinking=thinking)
            params = dataclasses.replace(defaults, **{**sampling, **self.sampling})
            return setup.request(self.prompt, params, thinking=thinking)
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{self.where}: {error}") from error


def as_chat(text: str, system: str | None) -> list[Message]:
    """A conversation of one question."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": text}]


def as_text(data: bytes, where: str) -> str:
    """UTF-8, with or without a byte order mark; ValueError names where it is not."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def job(text: str, *, where: str, chat: bool, system: str | None) -> Job:
    return Job(prompt=as_chat(text, system) if chat else text, where=where)


def read_file(path: str, *, chat: bool, system: str | None) -> list[Job]:
    """Reads JSON Lines: {"prompt": text or token ids} or {"messages": [...]} a line.

    A line may also hold "thinking" and fields of SamplingParams, for itself alone. A text is one
    user message if `chat`; token ids are always taken as they are.

    Raises:
      ValueError: the file cannot be read; a line that is no such thing, by its number; a file
        without a line.
    """
    jobs = []
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--prompt_file={path}: {error.strerror}") from error
    for number, line in enumerate(as_text(data, f"--prompt_file={path}").splitlines(), start=1):
        if line.strip():
            where = f"{Path(path).name}, line {number}"
            try:
                jobs.append(_line(line, where=where, chat=chat, system=system))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
    if not jobs:
        raise ValueError(f'{path} holds no prompt; expected lines such as {{"prompt": "Hello"}}')
    return jobs


def _line(line: str, *, where: str, chat: bool, system: str | None) -> Job:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, found {type(entry).__name__}")
    known = {"prompt", "messages", "thinking", *SAMPLING_FIELDS}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError('expected either "prompt" or "messages"')
    thinking = entry.get("thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise ValueError(f"thinking={thinking!r}: expected true or false")
    # null is how other programs' files say that a field is not given.
    sampling = {name: entry[name] for name in SAMPLING_FIELDS if entry.get(name) is not None}
    if isinstance(sampling.get("logit_bias"), dict):
        # JSON's keys are strings.
        try:
            sampling["logit_bias"] = {int(id): v for id, v in sampling["logit_bias"].items()}
        except ValueError as error:
            raise ValueError(f"logit_bias: keys are token ids ({error})") from error
    return Job(
        prompt=_prompt(entry, chat=chat, system=system),
        where=where,
        sampling=sampling,
        thinking=thinking,
    )


def _prompt(entry: dict[str, Any], *, chat: bool, system: str | None) -> Prompt:
    if "messages" in entry:
        messages = entry["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ValueError('"messages" must be a list of objects with "role" and "content"')
        if not messages:
            raise ValueError('"messages" is empty')
        if system and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return messages
    prompt = entry["prompt"]
    if isinstance(prompt, str):
        return as_chat(prompt, system) if chat else prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise ValueError('"prompt" must be text or a list of token ids')
