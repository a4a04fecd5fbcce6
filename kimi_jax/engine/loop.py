"""The engine: requests in, text out, one call of the compiled step at a time.

A request's life: `add` checks it and puts it in a queue; when a slot and the pages of its prompt
are free it is admitted (first come, first served), its prompt is written into the cache chunk by
chunk, and then it decodes, several steps a call, until a stop id, a stop string, its limit or an
`abort`. Slot and pages are then free for the next, between two calls.

When the pages run out, the oldest sequences go on, and younger ones sit a call out. If nothing
could go on, the youngest gives its pages back and is queued again, with what it has generated: it
starts over by writing all of it into the cache. A sequence that is alone and still has no page
ends, with the reason "out of pages". None of this changes what a sequence generates: its draws
depend on its seed and positions only.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from absl import logging

from kimi_jax.engine.budget import Budget, Choice, FixedBudget
from kimi_jax.engine.outputs import Output, TextStream
from kimi_jax.engine.programs import Program, Programs
from kimi_jax.engine.request import (
    Phase,
    Request,
    Sequence,
    check_request,
    check_tokens,
    noise_seed,
    stop_ids,
)
from kimi_jax.engine.slots import PagePool, pages_for
from kimi_jax.model.weights import Weights
from kimi_jax.sampling import SamplingParams
from kimi_jax.sharding.processes import ALONE, Processes
from kimi_jax.speculation.weights import DrafterWeights
from kimi_jax.step import StepOutput, StepPlan
from kimi_jax.text.parser import Parser
from kimi_jax.text.tokenizer import Tokenizer

USELESS_AFTER = 50
"""Steps with a tree and not one accepted token, after which the engine complains."""

_STOP_ID = 1  # StepOutput.finish


class Engine:
    """`add` requests, call `step` while `busy`, `abort` any time in between. Not thread-safe."""

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        drafter: DrafterWeights | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        budget: Budget | None = None,
        processes: Processes = ALONE,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """tokenizer None: outputs have token ids and no text, and stop strings are refused.

        budget: how many tree nodes sequences get; None: none, which is plain decoding. With several
        `processes` each has an engine, and makes the same calls.
        """
        self.programs = programs
        self.options = programs.options
        self._weights = weights
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._clock = clock
        self._processes = processes
        self._budget = budget or FixedBudget(0)
        self._depth = programs.plan(budget=max(self._budget.buckets)).depth
        self._state = programs.new_state()
        self._table = programs.new_table()
        # Groups of devices along data have slots of their own, in order, and pages of their own.
        groups = programs.layout.data_size
        self._pools = [PagePool(self.options.num_pages // groups) for _ in range(groups)]
        self._slots_each = self.options.max_num_seqs // groups
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._slots: list[Sequence | None] = [None] * self.options.max_num_seqs
        self._sequences: dict[int, Sequence] = {}
        self._ended: list[Output] = []
        self._next_id = 0
        self._prefilled = False  # whether the current step has sent prompts to the device
        self._met: set[StepPlan | str] = set()
        self._drafts = self._accepted = 0
        self._warned = False

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._sequences or self._ended)

    @property
    def free_pages(self) -> int:
        return sum(pool.free for pool in self._pools)

    def pages(self) -> dict[int, tuple[int, ...]]:
        """Cache pages by the id of the request that holds them."""
        return {sequence.id: tuple(sequence.pages) for sequence in self._held()}

    def phase(self, request_id: int) -> Phase:
        """How far a request is; ENDED also for one that the engine does not know."""
        sequence = self._sequences.get(request_id)
        return sequence.phase if sequence else Phase.ENDED

    @property
    def compilations(self) -> int:
        """Programs built by this process so far; it does not grow once the engine is warm."""
        return self.programs.counter.built

    def warm_up(self, *plans: StepPlan) -> None:
        """Builds the programs and runs each once with idle slots, so that no first use is slow."""
        self.programs.warm_up(*plans)
        self._meet("prefill")
        blank = np.zeros(self.options.prefill_chunk, np.int32)
        chunk = self.programs.chunk(0, self._table.page_row(0), blank, 0, 0)
        self._state = self.programs.prefill(self._weights, self._drafter, self._state, *chunk)
        for plan in plans:
            self._run(plan)

    def add(self, request: Request) -> int:
        """Queues a request and returns its id.

        Raises:
          ValueError: it can never run, see `request.check_request`.
        """
        check_request(request, self.programs.model, self.options, self._tokenizer is not None)
        params = request.params
        self._require_programs(params)
        index, self._next_id = self._next_id, self._next_id + 1
        room = self.options.max_model_len
        if params.max_tokens is not None:
            room = min(room, len(request.prompt) + params.max_tokens)
        parser = Parser(self._tokenizer, thinking=request.thinking) if self._tokenizer else None
        sequence = Sequence(
            id=index,
            request=request,
            seed=noise_seed(params.seed, self.options.seed, index),
            max_length=room,
            text=TextStream(parser, params.stop, params.min_tokens),
            depth=self._depth,
            clock=self._clock,
        )
        self._sequences[index] = sequence
        self._waiting.append(sequence)
        return index

    def abort(self, request_id: int) -> Output | None:
        """Ends a request; returns its last output, or None if it has already ended."""
        sequence = self._sequences.get(request_id)
        return self._end(sequence, "abort", None) if sequence else None

    def step(self) -> list[Output]:
        """Admits, prefills and decodes once; returns what each sequence gained."""
        self._admit()
        self._prefill()
        outputs = self._decode()
        ended, self._ended = self._ended, []
        return ended + outputs

    def score(self, tokens: list[int]) -> np.ndarray:
        """Teacher-forced logits, float32 [T, VOCAB]: row t is what the model says after token t.

        It borrows free pages of the cache, between two steps. Raises ValueError if the tokens are
        none, outside the vocabulary, or more than the context or the free pages hold.
        """
        return np.concatenate(self._forced(tokens, "score", self.programs.score))

    def routes(self, tokens: list[int]) -> np.ndarray:
        """The experts that each token chooses, int32 [L_moe, T, K]; otherwise like `score`."""
        parts = self._forced(tokens, "routes", self.programs.routes)
        return np.concatenate(parts).swapaxes(0, 1)

    def _forced(self, tokens: list[int], name: str, program: Program) -> list[np.ndarray]:
        """Sends tokens through a program, chunk by chunk; its rows of each chunk's real tokens."""
        check_tokens(tokens, self.programs.model)
        if len(tokens) > self.options.max_model_len:
            raise ValueError(
                f"{len(tokens)} tokens exceed the context (max_model_len) of "
                f"{self.options.max_model_len}"
            )
        group = max(range(len(self._pools)), key=lambda group: self._pools[group].free)
        pages = self._pools[group].allocate(pages_for(len(tokens), self.options.page_size))
        try:
            row = np.zeros(self.options.pages_per_sequence, np.int32)
            row[: len(pages)] = pages
            parts = []
            for start in range(0, len(tokens), self.options.prefill_chunk):
                part, count = self._chunk(tokens, start)
                chunk = self.programs.chunk(group, row, part, start, count)
                cache = self._state.cache
                self._meet(name)
                rows, latent = program(self._weights, cache.latent, *chunk)
                self._state = dataclasses.replace(
                    self._state, cache=dataclasses.replace(cache, latent=latent)
                )
                mine = rows if len(self._pools) == 1 else rows[group]
                parts.append(np.asarray(mine)[:count])
            return parts
        finally:
            self._pools[group].release(pages)

    def step_seconds(self, plan: StepPlan, sequences: int, *, context: int, calls: int) -> float:
        """Seconds of a step over so many made-up sequences: the fastest of a few calls.

        For measurements, while the engine is idle. Raises ValueError if the cache is too small.
        """
        assert not self.busy
        steps = self.options.steps_per_call * (calls + 1) * (self._depth + 1)
        length = min(context, self.options.max_model_len - steps - 1)
        if sequences > self.options.max_num_seqs or length < 1:
            raise ValueError(
                f"{sequences} sequences of {context} tokens and {steps} more exceed "
                f"max_num_seqs={self.options.max_num_seqs} or "
                f"max_model_len={self.options.max_model_len}"
            )
        pages = [
            self._pools[self._group(slot)].allocate(
                pages_for(length + steps, self.options.page_size)
            )
            for slot in range(sequences)
        ]
        for slot, held in enumerate(pages):
            self._table.set(
                slot,
                page_table=held,
                length=length,
                token=slot,
                active=True,
                max_length=self.options.max_model_len,
                stop_ids=(),
                temperature=float(plan.sampled),
                n_live=plan.budget,
            )
        seconds = []
        for _ in range(calls + 1):
            begin = self._clock()
            self._run(plan)
            seconds.append(self._clock() - begin)
        for slot, held in enumerate(pages):
            self._table.clear(slot)
            self._pools[self._group(slot)].release(held)
        return min(seconds[1:]) / self.options.steps_per_call

    # Requests

    def _needs(self, params: Iterable[SamplingParams]) -> dict[str, Any]:
        """What the programs must be able to do for requests like these."""
        params = list(params)
        logprobs = self.options.max_logprobs if any(one.logprobs for one in params) else 0
        return {
            "sampled": any(one.temperature > 0 for one in params),
            "num_logprobs": logprobs,
        }

    def _require_programs(self, params: SamplingParams) -> None:
        """Starts to build programs for a request that none serves; `warm_up` comes before that."""
        needs = self._needs([params])
        for bucket in self._budget.buckets:
            if self.programs.covering(budget=bucket, **needs) is None:
                self.programs.start(self.programs.plan(budget=bucket, **needs | {"sampled": True}))

    def _end(self, sequence: Sequence, reason: str, detail: str | int | None) -> Output:
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        else:
            self._leave_slot(sequence)
        self._budget.forget(sequence.id)
        del self._sequences[sequence.id]
        return sequence.ended(reason, detail)

    # Slots and pages

    def _group(self, slot: int) -> int:
        """The group along data that a slot belongs to."""
        return slot // self._slots_each

    def _held(self, group: int | None = None) -> list[Sequence]:
        """Sequences in a slot (of one group), oldest first."""
        held = [s for s in self._slots if s is not None]
        if group is not None:
            held = [s for s in held if self._group(s.held_slot) == group]
        return sorted(held, key=lambda s: s.id)

    def _decoding(self, group: int | None = None) -> list[Sequence]:
        return [sequence for sequence in self._held(group) if sequence.phase is Phase.DECODE]

    def _wanted(self, sequence: Sequence) -> int:
        """Pages that a sequence lacks for the longest that one call can make it."""
        longest = len(sequence.tokens) + self.options.steps_per_call * (self._depth + 1)
        # The last token of a sequence is not cached.
        positions = min(longest, sequence.max_length) - 1
        return max(0, pages_for(positions, self.options.page_size) - len(sequence.pages))

    def _admit(self) -> None:
        """Gives free slots to those that wait, while their prompts find pages."""
        while self._waiting and None in self._slots:
            sequence = self._waiting[0]
            free = [slot for slot, held in enumerate(self._slots) if held is None]
            # The emptiest group, and its first slot.
            slot = max(free, key=lambda slot: (self._pools[self._group(slot)].free, -slot))
            pool, held = self._pools[self._group(slot)], self._held(self._group(slot))
            needed = pages_for(len(sequence.tokens), self.options.page_size)
            # Those that run keep what they want for a call, else the newcomer would soon be sent
            # back by them.
            spare = pool.free - sum(self._wanted(other) for other in held)
            if needed > (spare if held else pool.free):
                if not held:
                    self._ended.append(self._end(sequence, "length", "out of pages"))
                    continue
                return
            self._waiting.popleft()
            self._take_slot(sequence, slot, pool.allocate(needed))

    def _take_slot(self, sequence: Sequence, slot: int, pages: list[int]) -> None:
        params = sequence.request.params
        self._slots[slot] = sequence
        sequence.slot, sequence.pages, sequence.cached = slot, pages, 0
        sequence.phase = Phase.PREFILL
        self._table.set(
            slot,
            page_table=pages,
            max_length=sequence.max_length,
            min_length=sequence.prompt_length + params.min_tokens,
            stop_ids=stop_ids(sequence.request, self.programs.model),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=sequence.seed,
            bias_ids=list(params.logit_bias),
            bias_values=list(params.logit_bias.values()),
        )

    def _leave_slot(self, sequence: Sequence) -> None:
        slot = sequence.held_slot
        self._table.clear(slot)
        self._slots[slot] = None
        self._pools[self._group(slot)].release(sequence.pages)
        sequence.slot, sequence.pages = None, []

    def _send_back(self, sequence: Sequence) -> None:
        """Takes a sequence's slot and pages; it waits again, before all that never ran."""
        logging.info("request %d waits for pages, to start over", sequence.id)
        self._leave_slot(sequence)
        sequence.phase = Phase.WAITING
        self._waiting.appendleft(sequence)

    def _reserve(self) -> list[Sequence]:
        """Finds pages for a call, oldest sequence first; returns those that can take part."""
        ready = [s for group in range(len(self._pools)) for s in self._reserve_in(group)]
        return sorted(ready, key=lambda sequence: sequence.id)

    def _reserve_in(self, group: int) -> list[Sequence]:
        pool = self._pools[group]
        while decoding := self._decoding(group):
            ready = []
            for sequence in decoding:
                extra = pool.allocate(min(self._wanted(sequence), pool.free))
                sequence.pages.extend(extra)
                # Positions that have a page, and the last token, which needs none.
                fits = len(sequence.pages) * self.options.page_size + 1
                if len(sequence.tokens) < fits:
                    ready.append(sequence)
                self._table.set(
                    sequence.held_slot,
                    page_table=sequence.pages,
                    max_length=min(sequence.max_length, fits),
                )
            if ready:
                return ready
            held = self._held(group)
            if len(held) > 1:
                self._send_back(held[-1])
            else:
                self._ended.append(self._end(held[0], "length", "out of pages"))
        return []

    # Calls

    def _prefill(self) -> None:
        """Writes prompts into the cache, oldest first, up to the tokens that one step may spend."""
        left = self.options.prefill_tokens
        self._prefilled = False
        for sequence in self._held():
            if sequence.phase is not Phase.PREFILL:
                continue
            end = len(sequence.tokens) - 1
            row = self._table.page_row(sequence.held_slot)
            group = self._group(sequence.held_slot)
            while sequence.cached < end and left > 0:
                tokens, count = self._chunk(sequence.tokens[:end], sequence.cached)
                chunk = self.programs.chunk(group, row, tokens, sequence.cached, count)
                self._state = self.programs.prefill(
                    self._weights, self._drafter, self._state, *chunk
                )
                self._prefilled = True
                sequence.cached += count
                left -= len(tokens)
            if sequence.cached == end:
                sequence.phase = Phase.DECODE
                self._table.set(sequence.held_slot, length=end, token=sequence.tokens[end])

    def _chunk(self, tokens: list[int], start: int) -> tuple[np.ndarray, int]:
        """int32 [C] from `start` on, filled up with zeros, and how many are real."""
        chunk = np.zeros(self.options.prefill_chunk, np.int32)
        part = tokens[start : start + len(chunk)]
        chunk[: len(part)] = part
        return chunk, len(part)

    def _decode(self) -> list[Output]:
        """One call of the compiled steps over all sequences that have pages for it."""
        ready = self._reserve()
        if not ready:
            return []
        plans = self._plans(ready)
        built = [bucket for bucket, plan in plans.items() if self.programs.built(plan)]
        # By the clock, and by what is compiled: process 0's.
        bucket, chosen = self._processes.decide(
            lambda: dataclasses.astuple(
                self._budget.choose([sequence.id for sequence in ready], built)
            )
        )
        choice = Choice(bucket=bucket, nodes=tuple(chosen))
        nodes = dict(zip(ready, choice.nodes, strict=True))
        for sequence in self._decoding():
            self._table.set(
                sequence.held_slot, active=sequence in nodes, n_live=nodes.get(sequence, 0)
            )
        begin = self._clock()
        host = self._run(plans[choice.bucket])
        seconds = (self._clock() - begin) / self.options.steps_per_call
        emitted = {s.id: _counts(host, s.held_slot) for s in ready}
        # Behind a prefill the call's time is not its own: it was still at work when the call began.
        self._budget.observe(choice, emitted, None if self._prefilled else seconds)
        self._watch_drafter(choice, emitted)
        return [self._collect(sequence, host, begin) for sequence in ready]

    def _watch_drafter(self, choice: Choice, emitted: dict[int, list[int]]) -> None:
        """Says so, once, if trees have done nothing at all: a broken drafter shows nowhere else."""
        for nodes, counts in zip(choice.nodes, emitted.values(), strict=True):
            if nodes:
                self._drafts += len(counts)
                self._accepted += sum(counts) - len(counts)
        if self._drafts >= USELESS_AFTER and not self._accepted and not self._warned:
            self._warned = True
            logging.warning(
                "the drafter has not helped once in %d steps: does it belong to this model? "
                "(--nospeculate decodes without it)",
                self._drafts,
            )

    def _plans(self, sequences: list[Sequence]) -> dict[int, StepPlan]:
        """The program for these sequences in each bucket."""
        needs = self._needs(sequence.request.params for sequence in sequences)
        return {
            bucket: self.programs.covering(budget=bucket, **needs)
            or self.programs.plan(budget=bucket, **needs)
            for bucket in self._budget.buckets
        }

    def _run(self, plan: StepPlan) -> StepOutput:
        """One call; its outputs as numpy arrays with a leading axis of steps."""
        program = self.programs.decode(plan)
        self._meet(plan)
        self._state, output = program(
            self._weights, self._drafter, self._table.place(self._state), self._table.control()
        )
        return jax.device_get(output)

    def _meet(self, program: StepPlan | str) -> None:
        """Before a program's first call: the other processes have compiled it, too."""
        if program not in self._met:
            self._met.add(program)
            self._processes.meet()

    def _collect(self, sequence: Sequence, host: StepOutput, begin: float) -> Output:
        """Takes a sequence's share of a call's outputs, up to where it ends."""
        slot = sequence.held_slot
        stopped, finish = False, 0
        for step in range(host.count.shape[0]):
            count = int(host.count[step, slot])
            finish = int(host.finish[step, slot])
            if count:
                stopped = sequence.add_step(
                    host.tokens[step, slot, :count].tolist(),
                    host.logprobs[step, slot, :count].tolist(),
                    self._top(sequence, host, step, count),
                    drafted=int(host.nodes[step, slot]),
                    stop_id=finish == _STOP_ID,
                )
            if stopped or finish:
                break
        sequence.end_call(begin)
        if stopped:
            return self._end(sequence, "stop", sequence.text.stop)
        if finish == _STOP_ID:
            return self._end(sequence, "stop", sequence.tokens[-1])
        if len(sequence.tokens) >= sequence.max_length:
            return self._end(sequence, "length", self._limit(sequence))
        # It runs on; one that has filled its pages does when it gets more.
        sequence.cached = len(sequence.tokens) - 1
        self._table.advanced(
            slot, length=sequence.cached, token=sequence.tokens[-1], active=finish == 0
        )
        return sequence.output()

    def _limit(self, sequence: Sequence) -> str:
        params = sequence.request.params
        at_most = params.max_tokens is not None and sequence.generated >= params.max_tokens
        return "max_tokens" if at_most else "max_model_len"

    def _top(
        self, sequence: Sequence, host: StepOutput, step: int, count: int
    ) -> list[dict[int, float]] | None:
        number = sequence.request.params.logprobs
        if not number:
            return None
        ids = host.top_ids[step, sequence.slot, :count, :number].tolist()
        values = host.top_logprobs[step, sequence.slot, :count, :number].tolist()
        return [dict(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]


def _counts(host: StepOutput, slot: int) -> list[int]:
    """Tokens of each step that gave the slot any."""
    return [count for count in host.count[:, slot].tolist() if count]
