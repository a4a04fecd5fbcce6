"""`LLM`: the public face. Opens a checkpoint, plans memory, and hands prompts to the engine.

Names are vLLM's where vLLM has the thing.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from kimi_jax import sampling
from kimi_jax.checkpoint.read import Checkpoint, open_checkpoint, open_drafter
from kimi_jax.config import PRESETS, DrafterConfig, ModelConfig
from kimi_jax.engine import plan as planning
from kimi_jax.engine import tuning
from kimi_jax.engine.budget import (
    UNTUNED,
    AutoBudget,
    Budget,
    FixedBudget,
    StepTimes,
    bucket_for,
)
from kimi_jax.engine.compiling import enable_persistent_cache
from kimi_jax.engine.loop import Engine
from kimi_jax.engine.outputs import Output, Stats, Usage
from kimi_jax.engine.plan import MemoryPlan
from kimi_jax.engine.programs import EngineOptions, Programs
from kimi_jax.engine.request import Request, check_request
from kimi_jax.model import weights as target_weights
from kimi_jax.model.kernels import REFERENCE, Kernels
from kimi_jax.model.kernels import REQUESTS as KERNEL_REQUESTS
from kimi_jax.model.kernels import Request as KernelRequest
from kimi_jax.model.kernels import choose as choose_kernels
from kimi_jax.model.kernels import prepare as prepare_weights
from kimi_jax.sampling import SamplingParams
from kimi_jax.sharding import auto, balance, preflight
from kimi_jax.sharding.layout import SINGLE, Layout
from kimi_jax.sharding.mesh import Shape, make_layout, resolve
from kimi_jax.sharding.processes import ALONE, Processes
from kimi_jax.speculation import weights as drafter_weights
from kimi_jax.step import StepPlan
from kimi_jax.text.template import render
from kimi_jax.text.tokenizer import Tokenizer

BUNDLED_MODEL = Path(__file__).parent / "assets" / "tiny-k2"

type Message = Mapping[str, Any]
type Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the messages of a conversation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A finished request.

    text is the answer; reasoning the thoughts before it (thinking mode only). token_ids are all
    generated ids, a final stop id included, and logprobs belong to them: raw target log-softmax at
    temperature 1. top_logprobs: the likeliest ids at each position, if asked for.
    """

    prompt_token_ids: tuple[int, ...]
    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[int, float], ...] | None
    finish_reason: str  # "stop", "length" or "abort"
    stop_reason: str | int | None
    usage: Usage
    stats: Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that is known before weights are read: made in a second, even for K2.6."""

    folder: Path
    config: ModelConfig
    checkpoint: Checkpoint | None  # None: random weights
    drafter: DrafterConfig | None  # None: plain decoding
    drafter_checkpoint: Checkpoint | None
    tokenizer: Tokenizer | None
    dtype: Any
    plan: MemoryPlan
    options: EngineOptions
    tree_budget: int | None  # None: chosen as it runs
    layout: Layout = SINGLE
    kernels: Kernels = REFERENCE
    processes: Processes = ALONE
    expert_order: np.ndarray | None = None  # [L_moe, E], see `sharding.balance.placement`

    @property
    def is_bundled(self) -> bool:
        return self.config == PRESETS["tiny-k2"]  # also a copy, or a conversion

    @property
    def thinks(self) -> bool:
        """A chat's mode unless told: K2.6 thinks, the bundled model has never learnt to."""
        return not self.is_bundled

    def sampling_params(self, *, thinking: bool | None = None) -> SamplingParams:
        """How this model is meant to be sampled, from its card."""
        if self.is_bundled:
            return sampling.TINY
        thinking = self.thinks if thinking is None else thinking
        return sampling.THINKING if thinking else sampling.INSTANT

    def request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, thinking: bool | None = None
    ) -> Request:
        """The request for a prompt; raises ValueError if the engine could never run it."""
        chat = _is_conversation(prompt)
        thinking = chat and (self.thinks if thinking is None else thinking)
        request = Request(
            prompt=tuple(self._encode(prompt, thinking)),
            params=params or self.sampling_params(thinking=thinking),
            thinking=thinking,
        )
        check_request(request, self.config, self.options, self.tokenizer is not None)
        return request

    def _encode(self, prompt: Prompt, thinking: bool) -> list[int]:
        if _is_token_ids(prompt):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError(
                f"{self.folder} has no tokenizer (tiktoken.model): give prompts as token ids"
            )
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        assert _is_conversation(prompt)
        return self.tokenizer.encode_rendered(render(prompt, thinking=thinking))

    def budget(self) -> Budget:
        """The rule that gives sequences their tree nodes."""
        if self.drafter is None:
            return FixedBudget(0)
        if self.tree_budget is not None:
            return FixedBudget(self.tree_budget)
        return AutoBudget(self._step_times)

    @functools.cached_property
    def _step_times(self) -> StepTimes | None:
        """What process 0 has measured before."""
        times = self.processes.decide(
            lambda: [
                [*where, seconds]
                for where, seconds in (
                    tuning.load(self.tuning_key, self.options.max_num_seqs) or {}
                ).items()
            ]
        )
        return {(bucket, count): seconds for bucket, count, seconds in times} or None

    @property
    def tuning_key(self) -> str:
        """Names this model on this kind of machine, for measured step times."""
        layout = (*self.layout.sizes.items(), self.layout.split_context) if self.layout.mesh else ()
        machine = self.plan.memory.device, self.dtype
        return tuning.key(*machine, self.config, self.drafter, *layout)

    def plans_for(self, programs: Programs, requests: Sequence[Request]) -> list[StepPlan]:
        """The decoding programs that these requests need, as few as do for all of them."""
        params = [request.params for request in requests]
        return [
            programs.plan(
                budget=bucket,
                sampled=not params or any(p.temperature > 0 for p in params),
                num_logprobs=self.options.max_logprobs if any(p.logprobs for p in params) else 0,
            )
            for bucket in self.budget().buckets
        ]


def set_up(
    model: str | Path | None = None,
    *,
    dtype: str | None = None,
    load_format: str = "auto",
    drafter: str | Path | None = "auto",
    tree_budget: int | Literal["auto"] = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    page_size: int = EngineOptions.page_size,
    gpu_memory_utilization: float = 0.9,
    max_logprobs: int = EngineOptions.max_logprobs,
    seed: int = 0,
    sharding: str = "auto",
    tensor_parallel_size: int | None = None,
    ep_size: int | None = None,
    data_parallel_size: int | None = None,
    kernels: KernelRequest = "auto",
    expert_placement: str | Path | None = None,
    processes: Processes = ALONE,
) -> Setup:
    """Checks a model's folder and this machine against each other, and reads no weights.

    Args:
      model: a Hugging Face folder or a converted one; None: the bundled tiny-k2.
      dtype: "bfloat16" or "float32"; None: bfloat16 on a GPU, float32 on a CPU.
      load_format: "auto" reads the checkpoint; "dummy" needs config.json only and draws weights.
      drafter: folder of a DFlash drafter for the model; "auto": the folder `drafter` inside the
        model's, if it is there; None: plain decoding.
      tree_budget: tree nodes that a sequence may use in a step, 0..63; 0 is plain decoding; "auto":
        chosen as it runs, from measured times and acceptance.
      max_model_len: longest context in tokens; None: the model's, or what fits.
      max_num_seqs: sequences that run at a time; None: see `engine.plan.DEFAULT_SEQS`.
      page_size: tokens a cache page.
      gpu_memory_utilization: share of the memory that may be used.
      max_logprobs: the most that a request may ask for.
      seed: for requests without one, see `engine.request.noise_seed`.
      sharding: "single", "tp", "ep", "mixed", "data" or "context": how several devices share the
        work, see `sharding.mesh.resolve`, also for the sizes. "auto": as the sizes say; without
        any, one device if the weights fit there, else what `sharding.auto` chooses for all GPUs.
      tensor_parallel_size: devices that share a copy of the model.
      ep_size: how many of them split the experts by number; the rest split them by width.
      data_parallel_size: copies of the model, each with sequences of its own.
      kernels: "auto" runs experts and attention on the Pallas kernels where these serve the device,
        the sizes and the dtype; "mosaic" insists on them, "reference" on plain JAX.
      expert_placement: a histogram of the experts that were chosen (`sharding.balance.save`); where
        experts are split by number, they are spread over the devices by it.
      processes: what `sharding.processes.join` gave, if several processes run this together.

    Raises:
      ValueError: an unsupported configuration or a damaged folder, by name; a size that cannot be.
      engine.plan.DoesNotFit: with the numbers.
      NotImplementedError: kernels="mosaic" where they cannot run, with the reason.
    """
    folder = BUNDLED_MODEL if model is None else Path(model).expanduser()
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format={load_format!r}: expected 'auto' or 'dummy'")
    if dtype not in (None, "bfloat16", "float32"):
        raise ValueError(f"dtype={dtype!r}: expected 'bfloat16' or 'float32'")
    top = max(UNTUNED) if tree_budget == "auto" else bucket_for(tree_budget)
    planning.reserve_gpu_memory(gpu_memory_utilization)
    checkpoint = open_checkpoint(folder) if load_format == "auto" else None
    config = checkpoint.config if checkpoint else ModelConfig.from_hf(folder)
    draft_folder = _drafter_folder(folder, drafter) if tree_budget else None
    draft, draft_checkpoint = None, None
    if draft_folder is not None:
        draft_checkpoint = open_drafter(draft_folder, config) if load_format == "auto" else None
        draft = draft_checkpoint.config if draft_checkpoint else DrafterConfig.from_hf(draft_folder)
    memory = planning.local_memory(gpu_memory_utilization)
    kind = jnp.dtype(dtype or ("float32" if memory.platform == "cpu" else "bfloat16"))
    tokenizer = None
    if (folder / "tiktoken.model").exists() or load_format == "auto":
        tokenizer = Tokenizer.from_folder(folder, vocab_size=config.vocab_size)
    sizes = {
        "tensor_parallel_size": tensor_parallel_size,
        "ep_size": ep_size,
        "data_parallel_size": data_parallel_size,
    }
    if sharding == "auto" and not any(sizes.values()):
        sequences = max_num_seqs or planning.DEFAULT_SEQS["gpu"]
        shape = _automatic(
            config, draft, memory, processes, sequences=sequences, nodes=top if draft else 0
        )
    else:
        shape = resolve(sharding, **sizes, num_devices=jax.device_count())
        _check_links(shape, memory, processes)
    layout = _fit(make_layout(shape), config, draft)
    _check_processes(layout, processes)
    memory = dataclasses.replace(memory, usable=processes.decide(lambda: memory.usable))
    if memory.platform == "cpu":  # its devices share one memory
        memory = dataclasses.replace(memory, usable=memory.usable // layout.num_devices)
    if kernels not in KERNEL_REQUESTS:
        raise ValueError(f"kernels={kernels!r}: expected one of {', '.join(KERNEL_REQUESTS)}")
    context = layout.group("page_offset").size
    chosen = choose_kernels(
        kernels,
        config,
        dtype=kind,
        page_size=page_size // context,
        max_rows=(top if draft else 0) + 1,
        layout=layout,
    )
    plan = planning.make_plan(
        config,
        draft,
        dtype=kind,
        memory=memory,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        page_size=page_size,
        tree_budget=top if draft else 0,
        layout=layout,
        kernels=chosen,
    )
    options = EngineOptions(
        max_num_seqs=plan.max_num_seqs,
        max_model_len=plan.max_model_len,
        num_pages=plan.num_pages,
        page_size=page_size,
        max_logprobs=max_logprobs,
        seed=seed,
    )
    return Setup(
        folder=folder,
        config=config,
        checkpoint=checkpoint,
        drafter=draft,
        drafter_checkpoint=draft_checkpoint,
        tokenizer=tokenizer,
        dtype=kind,
        plan=plan,
        options=options,
        tree_budget=None if tree_budget == "auto" else tree_budget,
        layout=layout,
        kernels=chosen,
        processes=processes,
        expert_order=_expert_order(expert_placement, config, layout),
    )


def _expert_order(path: str | Path | None, config: ModelConfig, layout: Layout):
    if path is None:
        return None
    devices = layout.group("expert").size
    if devices == 1:
        raise ValueError(
            f"expert_placement={path}: no experts are split by number here; use it with ep_size > 1"
        )
    counts = balance.read(path, config.num_moe_layers, config.n_routed_experts)
    order = balance.placement(counts, devices)
    before, after = (
        balance.unevenness(balance.load(counts, devices, how)) for how in (None, order)
    )
    logging.info(
        "experts by %s: the busiest of %d devices has %.3f of the mean load, %.3f in order of id",
        *(path, devices, after, before),
    )
    return order


def _automatic(
    config: ModelConfig,
    drafter: DrafterConfig | None,
    memory: planning.Memory,
    processes: Processes,
    *,
    sequences: int,
    nodes: int,
) -> Shape:
    """One device if the weights fit there, else all GPUs, by their links."""
    weights = target_weights.num_bytes(target_weights.abstract(config, jnp.bfloat16))
    count = jax.device_count()
    several = memory.platform == "gpu" and count > 1 and processes.count == 1
    if not several or weights < auto.WEIGHTS_SHARE * memory.usable:
        return Shape()
    name, shape = auto.choose(
        config,
        drafter,
        preflight.ensure(memory.device, count),
        devices=count,
        kind=memory.device,
        usable=memory.usable,
        sequences=sequences,
        nodes=nodes,
    )
    logging.info("sharding=auto takes %s on %d devices", name, count)
    return shape


def _check_links(shape: Shape, memory: planning.Memory, processes: Processes) -> None:
    """GPUs that are to work together must be able to talk to each other."""
    if shape.num_devices == 1 or memory.platform != "gpu":
        return
    if processes.count > 1:
        logging.warning("the links between processes are not measured before they are used")
    else:
        preflight.ensure(memory.device, jax.device_count())


def _check_processes(layout: Layout, processes: Processes) -> None:
    """Every process must have joined, and have devices of the mesh."""
    if jax.process_count() != processes.count:
        raise ValueError(
            f"{jax.process_count()} processes of jax.distributed run here, and {processes.count} "
            "decide together: begin with kimi_jax.sharding.processes.join"
        )
    idle = sorted(set(range(processes.count)) - layout.processes)
    if processes.count > 1 and idle:
        raise ValueError(
            f"a mesh of {layout.num_devices} devices leaves process {idle[0]} without work: ask "
            f"for all {jax.device_count()} devices of the {processes.count} processes (--sharding)"
        )


def _fit(layout: Layout, config: ModelConfig, drafter: DrafterConfig | None) -> Layout:
    """The layout, checked against the model; a drafter that cannot be split is left whole."""
    layout.specs(target_weights.describe(config, jnp.bfloat16))
    if drafter is not None:
        try:
            layout.specs(drafter_weights.describe(drafter, jnp.bfloat16))
        except ValueError as error:
            logging.info("every device runs the whole drafter: %s", error)
            return dataclasses.replace(layout, whole_drafter=True)
    return layout


def _drafter_folder(model: Path, drafter: str | Path | None) -> Path | None:
    if drafter != "auto":
        return None if drafter is None else Path(drafter).expanduser()
    inside = model / "drafter"
    return inside if inside.is_dir() else None  # one without its files is refused, not overlooked


class LLM:
    """A loaded model.

    >>> llm = LLM()
    >>> [result] = llm.generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=16))
    >>> result.text

    Requests of several generators from `stream` share the engine; use one thread.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        progress: bool = False,
        **options,
    ):
        """model and options: see `set_up`. progress: whether to show bars on stderr."""
        self._start(set_up(model, **options), requests=(), progress=progress, patient=True)

    @classmethod
    def from_setup(
        cls,
        setup: Setup,
        *,
        requests: Sequence[Request] = (),
        progress: bool = False,
        patient: bool = True,
    ) -> "LLM":
        """Loads what `set_up` found, with the programs that `requests` need.

        patient False: with an automatic budget, it is ready as soon as it can decode plainly, and
        takes up trees when their programs have been compiled too.
        """
        llm = cls.__new__(cls)
        llm._start(setup, requests=requests, progress=progress, patient=patient)
        return llm

    def _start(
        self, setup: Setup, *, requests: Sequence[Request], progress: bool, patient: bool
    ) -> None:
        self.setup = setup
        enable_persistent_cache()
        if setup.layout.num_devices > 1:
            logging.warning(
                "running on %d devices: compared with one device in simulation only, see the "
                "README's limits",
                setup.layout.num_devices,
            )
        programs = Programs(
            setup.config, setup.drafter, setup.options, setup.dtype, setup.layout, setup.kernels
        )
        plans = setup.plans_for(programs, requests)
        first = plans if patient else plans[:1]
        programs.start(*first)  # compiles while the weights are read
        place, layout = setup.layout.shardings, setup.layout
        canonical = target_weights.describe(setup.config, setup.dtype)
        weights = self._weights(
            *(setup.checkpoint, target_weights, setup.config),
            *(place(layout.specs(canonical)), layout.device_bytes(canonical), progress),
        )
        if setup.expert_order is not None:
            weights = balance.place(weights, setup.expert_order, place(layout.specs(canonical)))
        weights = prepare_weights(weights, canonical, setup.kernels, layout)
        drafter = None
        if setup.drafter is None:
            logging.info("no drafter: plain decoding, one token a step")
        else:
            source = setup.drafter_checkpoint
            drafter = self._weights(
                *(source, drafter_weights, setup.drafter),
                *(place(programs.specs.drafter), setup.plan.drafter_bytes, progress),
            )
        self.engine = Engine(
            programs,
            weights,
            drafter,
            setup.tokenizer,
            budget=setup.budget(),
            processes=setup.processes,
        )
        self.engine.warm_up(*first)
        programs.start(*plans)
        self._outputs: dict[int, collections.deque[Output]] = {}

    def _weights(
        self,
        checkpoint: Checkpoint | None,
        kind: Any,
        config: Any,
        shardings: Any,
        planned: int,
        progress: bool,
    ) -> Any:
        """Read from the checkpoint, or drawn; kind: the module that describes them."""
        if checkpoint:
            return checkpoint.load(
                dtype=self.setup.dtype, shardings=shardings, planned=planned, progress=progress
            )
        logging.info("drawing random weights: the text will mean nothing")
        return kind.random(config, self.setup.dtype, jax.random.key(0), shardings)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.setup.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool | None = None,
    ) -> list[Result]:
        """Continues one prompt or many; results in the order of the prompts.

        Args:
          prompts: text, token ids or messages, or a list of such. Text is continued as it is;
            messages are put into the chat template.
          sampling_params: for all, or one each; None: the model's own.
          thinking: for messages; None: the model's habit.
        """
        prompts = _listed(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: list[SamplingParams | None] = [sampling_params] * len(prompts)
        else:
            params = list(sampling_params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts")
        requests = [
            self.setup.request(prompt, one, thinking=thinking)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        ids = [self._add(request) for request in requests]
        try:
            return [
                gather(request, self._outputs_of(index))
                for request, index in zip(requests, ids, strict=True)
            ]
        finally:
            for index in ids:
                self._drop(index)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        thinking: bool | None = None,
    ) -> Iterator[Output]:
        """Continues one prompt, piece by piece. Closing the generator aborts the request."""
        request = self.setup.request(prompt, sampling_params, thinking=thinking)

        def outputs() -> Iterator[Output]:
            index = self._add(request)
            try:
                yield from self._outputs_of(index)
            finally:
                self._drop(index)

        return outputs()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool | None = None,
    ) -> list[Result]:
        """Answers one conversation or many; a message is {"role": ..., "content": ...}."""
        return self.generate(messages, sampling_params, thinking=thinking)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced logits, float32 [T, VOCAB]: row t is what follows token t."""
        return self.engine.score([int(token) for token in token_ids])

    def expert_counts(self, token_ids: Sequence[int]) -> np.ndarray:
        """How often each expert is chosen over these tokens, teacher-forced: int [L_moe, E]."""
        chosen = self.engine.routes([int(token) for token in token_ids])
        experts = self.setup.config.n_routed_experts
        counts = np.stack([np.bincount(layer.reshape(-1), minlength=experts) for layer in chosen])
        order = self.setup.expert_order
        if order is None:
            return counts
        by_expert = np.empty_like(counts)
        np.put_along_axis(by_expert, order, counts, axis=1)
        return by_expert

    def _add(self, request: Request) -> int:
        index = self.engine.add(request)
        self._outputs[index] = collections.deque()
        return index

    def _outputs_of(self, index: int) -> Iterator[Output]:
        """Steps the engine until the request has ended; the others' outputs wait for them."""
        mine = self._outputs[index]
        while True:
            while not mine:
                for output in self.engine.step():
                    self._outputs[output.request_id].append(output)
            output = mine.popleft()
            yield output
            if output.finished:
                return

    def _drop(self, index: int) -> None:
        self.engine.abort(index)
        del self._outputs[index]


def gather(request: Request, outputs: Iterator[Output] | Sequence[Output]) -> Result:
    """Joins the outputs of a request, the last one included."""
    outputs = list(outputs)
    last = outputs[-1]
    assert last.finish_reason and last.usage and last.stats
    tops = [output.top_logprobs for output in outputs if output.top_logprobs is not None]
    return Result(
        prompt_token_ids=request.prompt,
        text="".join(output.text for output in outputs),
        reasoning="".join(output.reasoning for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(value for output in outputs for value in output.logprobs),
        top_logprobs=tuple(row for top in tops for row in top) if tops else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        stats=last.stats,
    )


def _is_conversation(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _is_token_ids(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    return not isinstance(prompt, str) and not _is_conversation(prompt)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also of one."""
    several: Any = prompts
    one = isinstance(several, str) or (
        len(several) > 0 and isinstance(several[0], int | np.integer | Mapping)
    )
    return [several] if one else list(several)
