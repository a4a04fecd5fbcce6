"""Separates what the model thought from what it answers, whole or as tokens arrive.

It works on token ids: `</think>` is one control token, so the same characters written as ordinary
text (in a discussion of chat templates, say) end nothing.

In thinking mode the prompt has already opened `<think>`: the output starts inside the reasoning,
and no opening marker need come. `</think>` ends the reasoning; so does the start of a section of
tool calls. In instant mode everything is content.

A thought that is never closed stays reasoning and the content is empty, whether the output ended at
a stop token or at its limit. A stream has already delivered those words as reasoning when the end
comes, and the whole must equal the stream. `closed` tells the two apart from an empty answer, so
that a caller can act on it (offer the reasoning, ask for more tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kimi_jax.text.control import THINK_CLOSE, THINK_OPEN, TOOL_SECTION_BEGIN
from kimi_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Delta:
    """New text of either kind; both may be empty."""

    reasoning: str = ""
    content: str = ""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A whole output.

    Attributes:
        reasoning: the thoughts, without markers.
        content: the answer.
        closed: the reasoning came to an end (always so in instant mode).
        reasoning_tokens: tokens spent on the reasoning, markers included.
    """

    reasoning: str
    content: str
    closed: bool
    reasoning_tokens: int


class Parser:
    """Separates one output as its tokens arrive: `push` each id, then `finish`.

    Hidden control tokens (`Tokenizer.hidden_ids`, the stop tokens among them) yield no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool):
        self._open = tokenizer.special(THINK_OPEN)
        self._close = tokenizer.special(THINK_CLOSE)
        self._section = tokenizer.special(TOOL_SECTION_BEGIN)
        self._decoder = tokenizer.stream(skip_special=True)
        self._seen = 0
        #: The reasoning came to an end.
        self.closed = not thinking
        #: Tokens spent on the reasoning so far, markers included.
        self.reasoning_tokens = 0

    def push(self, token_id: int) -> Delta:
        """The text that `token_id` completes."""
        first, self._seen = self._seen == 0, self._seen + 1
        if self.closed:
            return Delta(content=self._decoder.push(token_id))
        if token_id == self._section:
            self.closed = True
            return Delta(reasoning=self._decoder.finish(), content=self._decoder.push(token_id))
        self.reasoning_tokens += 1
        if token_id == self._close:
            self.closed = True
            return Delta(reasoning=self._decoder.finish())
        if token_id == self._open and first:
            return Delta()
        return Delta(reasoning=self._decoder.push(token_id))

    def finish(self) -> Delta:
        """The rest, once no id follows: U+FFFD where a character was cut short."""
        rest = self._decoder.finish()
        return Delta(content=rest) if self.closed else Delta(reasoning=rest)


def parse(tokenizer: Tokenizer, token_ids: Iterable[int], *, thinking: bool) -> Parsed:
    """Separates a whole output.

    Args:
        tokenizer: the tokenizer that the ids belong to.
        token_ids: the generated ids, without the prompt.
        thinking: the mode that the prompt was rendered in.
    """
    parser = Parser(tokenizer, thinking=thinking)
    deltas = [parser.push(token_id) for token_id in token_ids]
    deltas.append(parser.finish())
    return Parsed(
        reasoning="".join(delta.reasoning for delta in deltas),
        content="".join(delta.content for delta in deltas),
        closed=parser.closed,
        reasoning_tokens=parser.reasoning_tokens,
    )
