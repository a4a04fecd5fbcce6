"""The compiled programs of one engine, built ahead from shapes alone, in threads of their own."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from kimi_jax import cache, step
from kimi_jax.config import DrafterConfig, ModelConfig
from kimi_jax.engine.compiling import compile_counter
from kimi_jax.engine.slots import SlotTable, abstract_array, pages_for, to_device
from kimi_jax.model import param
from kimi_jax.model import weights as target_weights
from kimi_jax.model.kernels import REFERENCE, Kernels, as_read
from kimi_jax.sharding.layout import SINGLE, Layout
from kimi_jax.speculation import weights as drafter_weights
from kimi_jax.step import State, StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes of an engine; each decides shapes of the compiled programs, except the seed."""

    max_num_seqs: int  # B, slots
    max_model_len: int  # longest context, prompt and answer, in tokens
    num_pages: int  # of the cache, the scratch page of each group along data included
    page_size: int = 64  # P, tokens a page
    prefill_chunk: int = 64  # C, tokens that one prefill call takes
    prefill_tokens: int = 512  # most prompt tokens between two decoding calls
    steps_per_call: int = 4  # decoding steps between two looks of the host
    max_stop_ids: int = 16  # stop ids of a request, the model's own included
    max_logit_bias: int = 64  # biased ids of a request
    max_logprobs: int = 20  # likeliest tokens reported to a request that asks for any
    seed: int = 0  # for requests without one

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0 if field.name in ("seed", "max_logprobs") else 1
            if getattr(self, field.name) < least:
                raise ValueError(
                    f"{field.name}={getattr(self, field.name)} must be at least {least}"
                )

    @property
    def pages_per_sequence(self) -> int:
        """MP, width of the page table."""
        return pages_for(self.max_model_len, self.page_size)


Program = Callable[..., Any]
COMPILE_THREAD = "compile"
"""Name of the threads that compile."""


class Programs:
    """Compiles in the background; asking for a program waits until it is there.

    The programs take arrays of exactly the shapes that they were built for: nothing is compiled
    behind their back. `compilations` counts all programs that the process builds.
    """

    def __init__(
        self,
        model: ModelConfig,
        drafter: DrafterConfig | None,
        options: EngineOptions,
        dtype: DTypeLike,
        layout: Layout = SINGLE,
        kernels: Kernels = REFERENCE,
    ):
        """Raises ValueError by name if sizes do not divide over the layout's devices."""
        self.model = model
        self.drafter = drafter
        self.options = options
        self.dtype = dtype
        self.layout = layout
        self.kernels = kernels
        for name in ("max_num_seqs", "num_pages"):
            if getattr(options, name) % layout.data_size:
                raise ValueError(
                    f"{name}={getattr(options, name)} does not divide over "
                    f"{layout.data_size} groups along data"
                )
        self.specs = step.Specs(self.plan())
        self.counter = compile_counter()
        self._futures: dict[StepPlan | str, concurrent.futures.Future] = {}
        self._lock = threading.Lock()

    def plan(self, *, budget: int = 0, sampled: bool = True, num_logprobs: int = 0) -> StepPlan:
        return StepPlan(
            model=self.model,
            drafter=self.drafter,
            budget=budget,
            sampled=sampled,
            num_logprobs=num_logprobs,
            layout=self.layout,
            kernels=self.kernels,
        )

    def start(self, *plans: StepPlan) -> None:
        """Begins to build prefill and the decoding programs of `plans`, without waiting."""
        self._start("prefill", self._build_prefill)
        for plan in plans:
            self._start(plan, lambda plan=plan: self._build_decode(plan))

    def warm_up(self, *plans: StepPlan) -> None:
        """Builds what `start` does, and waits for it."""
        self.start(*plans)
        for key in ("prefill", *plans):
            self._futures[key].result()

    def built(self, plan: StepPlan) -> bool:
        """Whether a decoding program can be had without waiting."""
        return plan in self._futures and self._futures[plan].done()

    def covering(self, *, budget: int, sampled: bool, num_logprobs: int) -> StepPlan | None:
        """The leanest started plan of this bucket that serves such sequences, or None."""
        fits = [
            plan
            for plan in self._futures
            if isinstance(plan, StepPlan)
            and plan.budget == budget
            and plan.sampled >= sampled
            and plan.num_logprobs >= num_logprobs
        ]
        return min(fits, key=lambda plan: (plan.num_logprobs, plan.sampled), default=None)

    def decode(self, plan: StepPlan) -> Program:
        """(weights, drafter, state, control) -> (state, outputs); state is donated."""
        self.start(plan)
        return self._futures[plan].result()

    @property
    def prefill(self) -> Program:
        """(weights, drafter, state, page_row, tokens, start, count) -> state; state is donated."""
        self.start()
        return self._futures["prefill"].result()

    @property
    def score(self) -> Program:
        """(weights, latent, page_row, tokens, start, count) -> (logits [C, VOCAB], latent).

        latent is donated. Not part of `start`: it is built when first asked for.
        """
        self._start("score", self._build_score)
        return self._futures["score"].result()

    @property
    def routes(self) -> Program:
        """As `score`, with the rows' experts [C, L_moe, K] in place of logits."""
        self._start("routes", lambda: self._build_score(step.routes))
        return self._futures["routes"].result()

    def new_state(self) -> State:
        """An empty cache and idle slots; every device makes its own part."""
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), self._state()
        )

    def chunk(
        self, group: int, row: np.ndarray, tokens: np.ndarray, start: int, count: int
    ) -> tuple[Any, ...]:
        """page_row, tokens, start and count as `prefill` and `score` take them.

        group: along data, whose pages `row` counts; the other groups write nothing.
        """
        own = (row, tokens, np.int32(start), np.int32(count))
        groups = self.layout.data_size
        if groups == 1:
            return own
        sharding = self.layout.sharding(self.specs.slots)
        alone = [np.zeros((groups, *part.shape), np.int32) for part in own]
        for whole, part in zip(alone, own, strict=True):
            whole[group] = part
        return tuple(to_device(whole, sharding) for whole in alone)

    def new_table(self) -> SlotTable:
        """A control block without a request."""
        return SlotTable(
            self.options.max_num_seqs,
            pages=self.options.pages_per_sequence,
            stop_ids=self.options.max_stop_ids,
            biases=self.options.max_logit_bias,
            sharding=self.layout.sharding(self.specs.slots),
        )

    def _start(self, key: StepPlan | str, build: Callable[[], Program]) -> None:
        with self._lock:
            if key not in self._futures:
                self._futures[key] = _in_thread(build)

    def _build_prefill(self) -> Program:
        logging.info("compiling prefill, %d tokens a call", self.options.prefill_chunk)
        return step.prefill.lower(
            *self._weights(), self._state(), *self._chunk(), plan=self.plan()
        ).compile()

    def _build_score(self, function: Any = step.score) -> Program:
        logging.info("compiling scoring, %d tokens a call", self.options.prefill_chunk)
        return function.lower(
            *(self._weights()[0], self._state().cache.latent, *self._chunk()),
            plan=self.plan(),
        ).compile()

    def _chunk(self) -> tuple[Any, ...]:
        """page_row, tokens, start, count."""
        lengths = (self.options.pages_per_sequence,), (self.options.prefill_chunk,), (), ()
        groups = self.layout.data_size
        lead = () if groups == 1 else (groups,)
        arrays = tuple(abstract_array((*lead, *shape), jnp.int32) for shape in lengths)
        return self._placed(arrays, self.specs.slots)

    def _build_decode(self, plan: StepPlan) -> Program:
        logging.info(
            "compiling %d decoding steps of %d sequences, %d tree nodes each%s%s",
            self.options.steps_per_call,
            self.options.max_num_seqs,
            plan.budget,
            "" if plan.sampled else ", greedy",
            f", {plan.num_logprobs} logprobs" if plan.num_logprobs else "",
        )
        return step.decode_steps.lower(
            *self._weights(),
            self._state(),
            self._placed(self.new_table().abstract_control(), self.specs.slots),
            plan=plan,
            steps=self.options.steps_per_call,
        ).compile()

    def _weights(self):
        drafter = drafter_weights.abstract(self.drafter, self.dtype) if self.drafter else None
        canonical = target_weights.describe(self.model, self.dtype)
        target = param.abstract(as_read(canonical, self.kernels, self.layout))
        return (
            self._placed(target, self.specs.weights),
            self._placed(drafter, self.specs.drafter),
        )

    def _placed(self, arrays: Any, specs: Any) -> Any:
        """Abstract arrays with their shardings; specs: a tree like theirs, or one for all."""
        if self.layout.mesh is None or arrays is None:
            return arrays
        if isinstance(specs, PartitionSpec):
            specs = jax.tree.map(lambda _: specs, arrays)
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            arrays,
            self.layout.shardings(specs),
        )

    def _state(self) -> State:
        slots = (self.options.max_num_seqs,)
        state = State(
            cache=cache.abstract(
                self.model,
                self.drafter,
                num_pages=self.options.num_pages,
                page_size=self.options.page_size,
                dtype=self.dtype,
            ),
            length=abstract_array(slots, jnp.int32),
            token=abstract_array(slots, jnp.int32),
            active=abstract_array(slots, jnp.bool_),
        )
        return self._placed(state, self.specs.state)


def _in_thread(build: Callable[[], Program]) -> concurrent.futures.Future:
    """Runs in a thread that the interpreter waits for: XLA does not survive its exit."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(build())
        except BaseException as error:  # handed to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name=COMPILE_THREAD).start()
    return future
