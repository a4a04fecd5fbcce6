"""What the engine hands back: deltas while a request runs, counts and times when it has ended."""

import dataclasses
from collections.abc import Sequence

from kimi_jax.text.parser import Delta, Parser


class StopText:
    """Text that grows, cut at the first stop string.

    The stop string that is completed first wins (of several completed by the same character, the
    longest); the text ends before it. Text at the end that may still become a stop string is held
    back until it does or cannot. The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._taken = 0
        self._whole = False
        self.text = ""
        self.stop: str | None = None  # the stop string that was found

    def append(self, piece: str, *, may_stop: bool = True) -> bool:
        """Adds a piece; returns whether it completed a stop string (never if it may not)."""
        old = len(self.text)
        self.text += piece
        if not piece or not self._stops or not may_stop:
            return False
        begin = max(0, old - self._longest + 1)
        found = []
        for stop in self._stops:
            # The first occurrence that ends in the new piece.
            start = self.text.find(stop, max(begin, old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if found:
            _, start, self.stop = min(found)
            self.text = self.text[:start]
        return bool(found)

    def finish(self) -> None:
        """Nothing follows: nothing is held back any more."""
        self._whole = True

    def take(self) -> str:
        """The text that is certain by now and has not been taken yet."""
        end = len(self.text)
        if not self._whole and self.stop is None:
            end -= self._held()
        piece = self.text[self._taken : end]
        self._taken += len(piece)
        return piece

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        rest = self.text[self._taken :]
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(rest)), longest, -1):
                if rest.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class TextStream:
    """Reasoning and content of one request as its tokens arrive, cut at the first stop string.

    A stop string may end the reasoning or the content, but never spans both.
    """

    def __init__(self, parser: Parser | None, stops: Sequence[str] = (), min_tokens: int = 0):
        """parser None: no text. A token among the first `min_tokens` completes no stop string."""
        self._parser = parser
        self._min_tokens = min_tokens
        self._count = 0
        self._reasoning = StopText(stops)
        self._content = StopText(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._reasoning.stop or self._content.stop

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far that belong to the thinking section, markers included."""
        return self._parser.reasoning_tokens if self._parser else 0

    def push(self, token_id: int) -> bool:
        """Adds a token; returns whether it completed a stop string."""
        self._count += 1
        return self._parser is not None and self._append(self._parser.push(token_id))

    def finish(self) -> bool:
        """No token follows: an unfinished character becomes U+FFFD, and nothing is held back.

        Returns whether that completed a stop string.
        """
        stopped = False
        if self._parser is not None and self.stop is None:
            stopped = self._append(self._parser.finish())
        self._reasoning.finish()
        self._content.finish()
        return stopped

    def take(self) -> tuple[str, str]:
        """(reasoning, content) that are certain by now and have not been taken yet."""
        return self._reasoning.take(), self._content.take()

    def _append(self, delta: Delta) -> bool:
        may_stop = self._count > self._min_tokens
        if delta.reasoning and self._reasoning.append(delta.reasoning, may_stop=may_stop):
            return True
        if delta.content:
            self._reasoning.finish()
            return self._content.append(delta.content, may_stop=may_stop)
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int  # generated, a final stop id included
    reasoning_tokens: int  # of those, the thinking section's, markers included


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Times and counts of a request. Names that vLLM has are vLLM's."""

    ttft_ms: float | None  # from add() to the first token on the host
    tpot_ms: float | None  # mean time per token after the tokens of the first call
    tok_s: float | None  # 1000 / tpot_ms
    e2e_ms: float  # from add() to the end
    steps: int  # decoding steps that gave at least one token
    accepted_per_step: float  # completion_tokens / steps: accepted drafts + the target's own token
    accepted_histogram: tuple[int, ...]  # [a]: steps that accepted a drafted tokens, a = 0 .. DEPTH
    spec_decode_num_drafts: int  # steps that verified a tree
    spec_decode_draft_tokens: int  # tree nodes verified, roots not counted
    spec_decode_accepted_tokens: int  # drafted tokens that were emitted
    spec_decode_acceptance_length: float | None  # 1 + accepted_tokens / num_drafts
    spec_decode_per_position_acceptance_rates: tuple[float, ...]  # [d]: share of drafts with > d


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What one request gained in one call of `Engine.step()`.

    The texts may be behind token_ids: characters that are incomplete, or that may still become a
    stop string, are held back. Joined over a request, each field is that of the whole request. The
    last output carries the reason, usage and stats.

    A final stop id is the last of token_ids and yields no text; a stop string ends with the last of
    token_ids, and the text ends before it.
    """

    request_id: int
    text: str  # the answer
    reasoning: str  # the thoughts before it, if the prompt opened a thinking section
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the tokens, raw target log-softmax at temperature 1
    top_logprobs: tuple[dict[int, float], ...] | None  # the likeliest ids, if asked for
    finish_reason: str | None = None  # "stop", "length" or "abort"; None: it runs on
    stop_reason: str | int | None = None  # the stop string or stop id; or why it ended early
    usage: Usage | None = None
    stats: Stats | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
