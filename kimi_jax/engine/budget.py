"""How many tree nodes each sequence gets in the next call.

Best-first trees nest, so a budget is data inside a compiled bucket: a program of 8 nodes serves
budgets 1..8. A tree changes how fast text comes, never which: these choices are about time alone.
"""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

BUCKETS = (0, 8, 16, 63)
"""Numbers of nodes that programs are compiled for."""

MAX_BUDGET = BUCKETS[-1]

UNTUNED = BUCKETS[:2]
"""What is compiled as long as nobody has measured whether more nodes pay (`main.py --tune`)."""

# Tokens a step by bucket, of a small model with a drafter of its own (greedy, 96 prompts of Python
# text): where to start from. Their ratios also carry what one bucket has shown over to another.
PRIOR = {0: 1.0, 8: 2.8, 16: 3.1, 63: 3.6}

PRIOR_STEPS = 4.0  # weight of the prior against steps that were seen
MEMORY_STEPS = 200.0  # steps after which what was seen counts half
PROBE_SHARE = 0.015  # of the time may go to trying again what was slower when last tried
HOPELESS = 0.05  # accepted drafts a step below which a sequence gets no tree


def bucket_for(budget: int) -> int:
    """The smallest bucket that serves a budget; ValueError outside 0..63."""
    if not 0 <= budget <= MAX_BUDGET:
        raise ValueError(f"tree_budget={budget}: expected 'auto' or a number in 0..{MAX_BUDGET}")
    return next(bucket for bucket in BUCKETS if bucket >= budget)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """bucket: of the program to run; nodes: budget by sequence, in the order that was asked."""

    bucket: int
    nodes: tuple[int, ...]


class Budget(Protocol):
    """A rule that chooses budgets, and hears what came of them."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """The buckets that it may choose: they are compiled before anything runs."""
        ...

    def choose(self, sequences: Sequence[int], built: Container[int]) -> Choice:
        """For a call over these sequences (by id); built: buckets whose programs are there.

        Another bucket may be chosen, but the call then waits for its program.
        """
        ...

    def observe(
        self, choice: Choice, emitted: Mapping[int, Sequence[int]], seconds: float | None
    ) -> None:
        """emitted: tokens of each step by sequence; seconds: of a step, None if unreliable."""
        ...

    def forget(self, sequence: int) -> None:
        """A sequence has ended."""
        ...


class FixedBudget:
    """The same number of nodes always."""

    def __init__(self, budget: int):
        self._budget = budget
        self.buckets = (bucket_for(budget),)

    def choose(self, sequences: Sequence[int], built: Container[int] = BUCKETS) -> Choice:
        return Choice(bucket=self.buckets[0], nodes=(self._budget,) * len(sequences))

    def observe(
        self, choice: Choice, emitted: Mapping[int, Sequence[int]], seconds: float | None
    ) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass


class Mean:
    """A mean that forgets."""

    def __init__(self) -> None:
        self.total = 0.0
        self.weight = 0.0

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            keep = 0.5 ** (1 / MEMORY_STEPS)
            self.total = keep * self.total + value
            self.weight = keep * self.weight + 1

    def blended(self, prior: float) -> float:
        """With the prior counted as PRIOR_STEPS values."""
        return (self.total + PRIOR_STEPS * prior) / (self.weight + PRIOR_STEPS)


StepTimes = Mapping[tuple[int, int], float]
"""Seconds of a step by (bucket, sequences)."""


class AutoBudget:
    """The bucket with the most tokens per second, from measured step times and acceptance.

    Step times come from a table, if the machine has been tuned, and from the calls themselves. A
    bucket without a time is tried once. When plain decoding wins, a tree is tried again now and
    then, as long as the tries cost less than PROBE_SHARE of the time: text changes, and a drafter
    that was useless on one part may be good on the next.
    """

    def __init__(self, times: StepTimes | None = None):
        self.buckets = tuple(sorted({bucket for bucket, _ in times})) if times else UNTUNED
        self._table = dict(times or {})
        self._measured: dict[tuple[int, int], float] = {}
        self._overall = {bucket: Mean() for bucket in self.buckets}
        self._by_sequence: dict[int, dict[int, Mean]] = {}
        self._steps = 0  # of the last call
        self._elapsed = 0.0
        self._spent_probing = 0.0
        self._probing = False

    def choose(self, sequences: Sequence[int], built: Container[int] = BUCKETS) -> Choice:
        count = len(sequences)
        self._probing = False
        # Plain decoding need not wait until the programs with trees are compiled.
        buckets = [bucket for bucket in self.buckets if bucket in built] or self.buckets[:1]
        for bucket in buckets:  # plain decoding first: what the others cost is told by it
            if self._time(bucket, count) is None:
                self._probing = bucket > 0
                return Choice(bucket=bucket, nodes=(bucket,) * count)
        rates = {
            bucket: sum(self._tokens(bucket, sequence) for sequence in sequences)
            / self._seconds(bucket, count)
            for bucket in buckets
        }
        best = max(buckets, key=lambda bucket: rates[bucket])
        if best == 0 and len(buckets) > 1:
            rest = max(buckets[1:], key=lambda bucket: rates[bucket])
            extra = self._steps * (self._seconds(rest, count) - self._seconds(0, count))
            if self._spent_probing + max(extra, 0.0) <= PROBE_SHARE * self._elapsed:
                self._probing = True
                return Choice(bucket=rest, nodes=(rest,) * count)
        return self._choice(best, sequences)

    def observe(
        self, choice: Choice, emitted: Mapping[int, Sequence[int]], seconds: float | None
    ) -> None:
        for (sequence, counts), nodes in zip(emitted.items(), choice.nodes, strict=True):
            if nodes:
                self._overall[choice.bucket].add(counts)
                own = self._by_sequence.setdefault(sequence, {})
                own.setdefault(choice.bucket, Mean()).add(counts)
        if seconds is None:
            return
        key = choice.bucket, len(emitted)
        known = self._measured.get(key, seconds)
        # A call may be slow for reasons of the machine's, never fast: trust the faster one more.
        weight = 0.5 if seconds < known else 0.1
        self._measured[key] = known + weight * (seconds - known)
        self._steps = max(map(len, emitted.values()), default=0)
        self._elapsed += self._steps * seconds
        if self._probing:
            plain = self._seconds(0, len(emitted))
            self._spent_probing += self._steps * max(seconds - plain, 0.0)

    def forget(self, sequence: int) -> None:
        self._by_sequence.pop(sequence, None)

    def _choice(self, bucket: int, sequences: Sequence[int]) -> Choice:
        nodes = (
            bucket if self._tokens(bucket, sequence) >= 1 + HOPELESS else 0
            for sequence in sequences
        )
        return Choice(bucket=bucket, nodes=tuple(nodes))

    def _tokens(self, bucket: int, sequence: int) -> float:
        """Tokens a step that a sequence is expected to get."""
        if bucket == 0:
            return 1.0
        own = self._by_sequence.get(sequence, {}).get(bucket)
        overall = self._overall[bucket].blended(self._carried_over(bucket))
        return own.blended(overall) if own else overall

    def _carried_over(self, bucket: int) -> float:
        """What the other buckets have shown, in this one's terms; or the prior alone."""
        seen = {other: mean for other, mean in self._overall.items() if other and mean.weight > 0}
        seen.pop(bucket, None)
        if not seen:
            return PRIOR[bucket]
        other = max(seen, key=lambda candidate: seen[candidate].weight)
        accepted = seen[other].blended(PRIOR[other]) - 1
        return 1 + accepted * (PRIOR[bucket] - 1) / (PRIOR[other] - 1)

    def _time(self, bucket: int, count: int) -> float | None:
        """Seconds of a step: measured here, else from the table; else of a near batch size."""
        for known in (self._measured, self._table):
            if (bucket, count) in known:
                return known[bucket, count]
        known = self._table | self._measured
        near = [other for each, other in known if each == bucket]
        if not near:
            return None
        return known[bucket, min(near, key=lambda other: abs(other - count))]

    def _seconds(self, bucket: int, count: int) -> float:
        seconds = self._time(bucket, count)
        assert seconds is not None
        return seconds
