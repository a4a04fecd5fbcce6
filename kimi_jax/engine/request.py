"""A request, and the state of one that the engine holds."""

import dataclasses
import enum
import time
from collections import abc
from collections.abc import Callable

import numpy as np

from kimi_jax.config import ModelConfig
from kimi_jax.engine.outputs import Output, Stats, TextStream, Usage
from kimi_jax.engine.programs import EngineOptions
from kimi_jax.engine.slots import pages_for
from kimi_jax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it. thinking: the prompt has opened a thinking section."""

    prompt: tuple[int, ...]
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    thinking: bool = False


def check_request(
    request: Request, model: ModelConfig, options: EngineOptions, has_tokenizer: bool
) -> None:
    """Raises ValueError if an engine of this model and these sizes can never run the request.

    That is a prompt without tokens, with ids outside the vocabulary, or too long for the context or
    the cache; more stop ids, biased ids or log-probabilities than the engine was built for; stop
    strings without a tokenizer.
    """
    prompt, params = request.prompt, request.params
    check_tokens(prompt, model)
    if len(prompt) >= options.max_model_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens; the context (max_model_len) holds "
            f"{options.max_model_len}, of which at least one must be left for the answer: "
            f"shorten the prompt to {options.max_model_len - 1} tokens, or raise max_model_len"
        )
    needed = pages_for(len(prompt), options.page_size)
    pages = options.num_pages - 1  # without the scratch page
    if needed > pages:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and needs {needed} cache pages of "
            f"{options.page_size}; the cache has {pages}: shorten the prompt to "
            f"{pages * options.page_size} tokens, or give the cache more memory"
        )
    params.check_vocabulary(model.vocab_size)
    for name, number, most in (
        ("stop ids", len(stop_ids(request, model)), options.max_stop_ids),
        ("logit_bias entries", len(params.logit_bias), options.max_logit_bias),
    ):
        if number > most:
            raise ValueError(f"{number} {name}; the engine was built for at most {most}")
    if (params.logprobs or 0) > options.max_logprobs:
        raise ValueError(
            f"logprobs={params.logprobs}; the engine was built for at most "
            f"max_logprobs={options.max_logprobs}"
        )
    if params.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer, and this engine has none")


def check_tokens(tokens: abc.Sequence[int], model: ModelConfig) -> None:
    """Raises ValueError if there are none, or one is outside the vocabulary."""
    if not tokens:
        raise ValueError("the prompt has no tokens; at least one is needed to start from")
    vocab = model.vocab_size
    outside = [token for token in tokens if not 0 <= token < vocab]
    if outside:
        raise ValueError(
            f"the prompt has token id {outside[0]}; the vocabulary has ids 0..{vocab - 1}"
        )


def stop_ids(request: Request, model: ModelConfig) -> tuple[int, ...]:
    """The model's end tokens, unless ignored, and the request's own."""
    params = request.params
    ends = () if params.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*ends, *params.stop_token_ids)))


def noise_seed(seed: int | None, engine_seed: int, index: int) -> np.ndarray:
    """The uint32[2] that keys a request's draws.

    A request's own seed is taken as it is (its low and high word), so the same request gives the
    same text on every engine. Without one, the seed is drawn from the engine's seed and the
    request's index (0 for the first that the engine was given): a run repeats if its requests are
    added in the same order, whatever they are batched with.
    """
    if seed is not None:
        return np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)
    return np.random.SeedSequence([engine_seed, index]).generate_state(2, np.uint32)


class Phase(enum.Enum):
    WAITING = "waiting"  # for a slot and pages
    PREFILL = "prefill"  # its prompt is being written into the cache
    DECODE = "decode"
    ENDED = "ended"


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request under way: what the host knows of it. Its place in the cache is `pages`."""

    id: int
    request: Request
    seed: np.ndarray
    max_length: int  # tokens, the prompt's included, with which it ends at the latest
    text: TextStream
    depth: int  # most drafted tokens that a step can accept
    clock: Callable[[], float] = time.perf_counter

    tokens: list[int] = dataclasses.field(init=False)  # prompt and generated
    phase: Phase = Phase.WAITING
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # positions that the cache holds

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self._added = self.clock()
        self._first: tuple[float, float, int] | None = None  # call start, its end, tokens in it
        self._last = self._added
        self._histogram = [0] * (self.depth + 1)
        self._drafts = 0
        self._draft_tokens = 0
        self._draft_accepted = [0] * (self.depth + 1)
        self._delta = _Delta()

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def held_slot(self) -> int:
        """Its slot, which it has from PREFILL on."""
        assert self.slot is not None
        return self.slot

    def add_step(
        self,
        tokens: list[int],
        logprobs: list[float],
        top_logprobs: list[dict[int, float]] | None,
        *,
        drafted: int,
        stop_id: bool,
    ) -> bool:
        """Takes what one step emitted; returns whether a stop string ended the sequence in it.

        Tokens after the one that completed the stop string are dropped everywhere. stop_id: the
        last of the tokens is one; it yields no text.
        """
        taken = 0
        stopped = False
        for token in tokens:
            taken += 1
            if stop_id and taken == len(tokens):
                break
            if self.text.push(token):
                stopped = True
                break
        self.tokens.extend(tokens[:taken])
        self._delta.tokens.extend(tokens[:taken])
        self._delta.logprobs.extend(logprobs[:taken])
        if top_logprobs is not None:
            self._delta.top_logprobs.extend(top_logprobs[:taken])
        self._histogram[taken - 1] += 1
        if drafted:
            self._drafts += 1
            self._draft_tokens += drafted
            self._draft_accepted[taken - 1] += 1
        return stopped

    def end_call(self, begin: float) -> None:
        """The outputs of a call that began then have been taken."""
        self._last = self.clock()
        if self._first is None and self.generated:
            self._first = (begin, self._last, self.generated)

    def output(self) -> Output:
        """What came since the last output; the sequence runs on."""
        return self._delta_output()

    def ended(self, finish_reason: str, stop_reason: str | int | None) -> Output:
        """The last output. The sequence has no slot and no pages any more."""
        self.phase = Phase.ENDED
        if self.text.finish() and finish_reason != "abort":
            finish_reason, stop_reason = "stop", self.text.stop
        return self._delta_output(
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            usage=Usage(
                prompt_tokens=self.prompt_length,
                completion_tokens=self.generated,
                reasoning_tokens=self.text.reasoning_tokens,
            ),
            stats=self._stats(),
        )

    def _delta_output(self, **end) -> Output:
        delta, self._delta = self._delta, _Delta()
        reasoning, text = self.text.take()
        return Output(
            request_id=self.id,
            text=text,
            reasoning=reasoning,
            token_ids=tuple(delta.tokens),
            logprobs=tuple(delta.logprobs),
            top_logprobs=tuple(delta.top_logprobs) if self.request.params.logprobs else None,
            **end,
        )

    def _stats(self) -> Stats:
        steps = sum(self._histogram)
        ttft = tpot = None
        if self._first is not None:
            start, end, first_tokens = self._first
            ttft = 1e3 * (end - self._added)
            later = self.generated - first_tokens
            # All tokens may come in one call: then its whole time is theirs.
            seconds, tokens = (self._last - end, later) if later else (end - start, first_tokens)
            tpot = 1e3 * seconds / tokens
        accepted = sum(count * number for count, number in enumerate(self._draft_accepted))
        at_least = np.cumsum(self._draft_accepted[::-1])[::-1][1:]
        return Stats(
            ttft_ms=ttft,
            tpot_ms=tpot,
            tok_s=1e3 / tpot if tpot else None,
            e2e_ms=1e3 * (self.clock() - self._added),
            steps=steps,
            accepted_per_step=self.generated / steps if steps else 0.0,
            accepted_histogram=tuple(self._histogram),
            spec_decode_num_drafts=self._drafts,
            spec_decode_draft_tokens=self._draft_tokens,
            spec_decode_accepted_tokens=accepted,
            spec_decode_acceptance_length=1 + accepted / self._drafts if self._drafts else None,
            spec_decode_per_position_acceptance_rates=tuple(
                float(count) / self._drafts for count in at_least
            )
            if self._drafts
            else (),
        )


@dataclasses.dataclass
class _Delta:
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
