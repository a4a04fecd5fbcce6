"""One run of main.py: set up, load, generate while text streams out, report."""

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import numpy as np
from absl import logging
from tqdm import tqdm

from kimi_jax import profiling
from kimi_jax.cli import prompts, report
from kimi_jax.cli import speculation as speculating
from kimi_jax.cli.prompts import Job
from kimi_jax.engine import tuning
from kimi_jax.engine.outputs import Output
from kimi_jax.engine.programs import COMPILE_THREAD
from kimi_jax.engine.request import Request
from kimi_jax.llm import LLM, Message, Result, Setup, gather, set_up
from kimi_jax.sharding import balance
from kimi_jax.sharding.processes import Processes, join

INTERRUPTED = 130  # exit code: 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE
LONG_READ = 1 << 28  # bytes; a progress bar for less would only flash up
BUNDLED_MAX_TOKENS = 512  # the small model rarely has more to say


class ReaderGone(Exception):
    """Nobody reads stdout any more."""


class Interrupt:
    """Ctrl-C asks a generation to end; before one, and the second time, it ends the process.

    It does so without an exception: one that is raised inside a callback of JAX's can get lost.
    """

    def __init__(self) -> None:
        self.generating = False
        self.requested = False

    @contextlib.contextmanager
    def watch(self) -> Iterator["Interrupt"]:
        previous = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.generating:
            os.write(2, b"main.py: error: interrupted before anything was generated\n")
        if self.requested or not self.generating:
            os._exit(INTERRUPTED)
        self.requested = True


class Printer:
    """Streams texts to stdout, one request after the other in their order."""

    def __init__(self, stream: TextIO | None, count: int):
        self._stream = stream
        self._held: list[list[Output]] = [[] for _ in range(count)]
        self._current = 0
        self._in_reasoning = False
        self._at_line_start = True

    def take(self, number: int, output: Output) -> None:
        """Prints what belongs to the request that is being shown, and keeps the rest for later."""
        if self._stream is None:
            return
        self._held[number].append(output)
        while self._current < len(self._held):
            waiting, finished = self._held[self._current], False
            while waiting:
                shown = waiting.pop(0)
                self._show(shown)
                finished = shown.finished
            if not finished:
                return
            self._close()
            self._current += 1

    def _show(self, output: Output) -> None:
        if output.reasoning:
            if not self._in_reasoning:
                self._write("<think>")
                self._in_reasoning = True
            self._write(output.reasoning)
        if output.text:
            if self._in_reasoning:
                self._write("</think>\n\n")
                self._in_reasoning = False
            self._write(output.text)

    def _close(self) -> None:
        self._in_reasoning = False
        if not self._at_line_start:
            self._write("\n")
        if self._current + 1 < len(self._held):
            self._write("\n")  # an empty line between two texts

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError as error:
            raise ReaderGone from error
        self._at_line_start = text.endswith("\n")


class Trace:
    """Profiles decoding calls of a run: the second one and those after it, `steps` steps in all."""

    def __init__(self, folder: str | None, steps: int, steps_per_call: int):
        self._folder = folder
        self._steps_per_call = steps_per_call
        self._first, self._last = 2, 1 + max(1, -(-steps // steps_per_call))
        self._calls = 0
        self._running = False
        self.steps = 0  # that the trace holds, when it is complete

    def before_call(self) -> None:
        self._calls += 1
        if self._folder and self._calls == self._first:
            import jax

            jax.profiler.start_trace(self._folder)
            self._running = True

    def after_call(self) -> None:
        if self._calls == self._last:
            self.stop()

    def stop(self) -> None:
        if self._running:
            import jax

            jax.profiler.stop_trace()
            self._running = False
            self.steps = (min(self._calls, self._last) - self._first + 1) * self._steps_per_call
            logging.info("profile of %d steps written to %s", self.steps, self._folder)


def run(flags: Any) -> int:
    """Does what the flags say, with the other processes if there are any; returns the exit code.

    Raises ValueError, NotImplementedError or OSError with a message for the user, before any long
    work where that is possible.
    """
    processes = join(flags.coordinator_address, flags.num_processes, flags.process_id)
    if processes.count > 1:
        keep_stdout()
    if not processes.first:
        logging.set_verbosity(logging.WARNING)
    try:
        code = run_in(processes, flags)
    except Exception as error:
        if processes.count == 1:
            raise
        if isinstance(error, RuntimeError):
            traceback.print_exception(error)
        processes.fail(error)
    processes.leave()
    return code


def keep_stdout() -> None:
    """For texts alone: the library through which CPUs talk prints there, and now does on stderr."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)
    sys.stdout = stream


def run_in(processes: Processes, flags: Any) -> int:
    """`run`, as one of these processes; process 0 reads the prompts, prints and writes."""
    if processes.count > 1 and (flags.interactive or flags.tune):
        name = "--interactive" if flags.interactive else "--tune"
        raise NotImplementedError(f"{name} runs in one process; there are {processes.count} here")
    if flags.output_json and flags.output_json != "-" and processes.first:
        report.check_writable(flags.output_json)
    if flags.expert_histogram and processes.first:
        report.check_writable(flags.expert_histogram, "expert_histogram")
    if flags.profile_dir:
        prepare_folder(flags.profile_dir)
    speculation = speculating.options(flags)
    jobs = []
    if not (flags.dry_run or flags.interactive or flags.tune):
        read = processes.decide(lambda: [dataclasses.asdict(job) for job in read_jobs(flags)])
        jobs = [Job.of(job) for job in read]
    setup = set_up(
        flags.model,
        dtype=flags.dtype,
        load_format=flags.load_format,
        max_model_len=flags.max_model_len,
        max_num_seqs=min(len(jobs), 8) or None
        if flags.max_num_seqs is None
        else flags.max_num_seqs,
        page_size=flags.page_size,
        gpu_memory_utilization=flags.gpu_memory_utilization,
        seed=flags.seed,
        sharding=flags.sharding,
        tensor_parallel_size=flags.tensor_parallel_size,
        ep_size=expert_parallel_size(flags),
        data_parallel_size=flags.data_parallel_size,
        kernels=flags.kernels,
        expert_placement=flags.expert_placement,
        processes=processes,
        **speculation,
    )
    if flags.dry_run:
        if processes.first:
            print(describe(setup))
        return 0
    if flags.tune:
        tune(setup)
        return 0
    sampling = sampling_of(flags, setup)
    if flags.interactive:
        return converse(flags, setup, sampling)
    requests = [job.request(setup, sampling, flags.thinking) for job in jobs]
    with Interrupt().watch() as interrupt:
        llm = load(setup, requests)
        interrupt.generating = True
        code = batch(flags, llm, requests, interrupt)
    if code == 0 and processes.first:
        finish_compiling()
    return code


def prepare_folder(path: str) -> None:
    """Makes the folder of a trace; ValueError, before long work, if nothing can be kept there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"--profile_dir={path}: cannot be written to ({error.strerror})"
        ) from error


def expert_parallel_size(flags: Any) -> int | None:
    """--ep_size, or vLLM's switch, which means all devices."""
    if flags.ep_size is None and flags.enable_expert_parallel:
        return (flags.tensor_parallel_size or 1) * (flags.data_parallel_size or 1)
    return flags.ep_size


def read_jobs(flags: Any) -> list[Job]:
    """The prompts, from the one place that was given."""
    options = {"chat": flags.chat, "system": flags.system}
    if flags.prompt is not None:
        return [prompts.job(flags.prompt, where="--prompt", **options)]
    if flags.prompt_file is not None:
        return prompts.read_file(flags.prompt_file, **options)
    text = prompts.as_text(sys.stdin.buffer.read(), "standard input")
    if not text.strip():
        raise ValueError("standard input is empty: give --prompt, --prompt_file or a text")
    return [prompts.job(text, where="standard input", **options)]


def sampling_of(flags: Any, setup: Setup) -> dict[str, Any]:
    """Fields of SamplingParams that the command line gives."""
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "logprobs")
    sampling = {name: flags[name].value for name in names if flags[name].value is not None}
    if setup.is_bundled:
        least = BUNDLED_MAX_TOKENS
        sampling.setdefault("max_tokens", max(least, sampling.get("min_tokens", 0)))
    return {**sampling, "ignore_eos": flags.ignore_eos, "stop": tuple(flags.stop or ())}


def describe(setup: Setup) -> str:
    """The memory plan and what runs each op, for --dry_run."""
    layers, experts = setup.config.num_hidden_layers, setup.config.n_routed_experts
    return "\n".join(
        [
            f"{'model':<10} {setup.folder} ({layers} layers, {experts} experts, {setup.dtype})",
            *setup.plan.lines(),
            f"{'ops':<10} {setup.kernels}",
        ]
    )


def tune(setup: Setup) -> None:
    """Measures step times, prints them, and keeps them for later runs of as many slots."""
    if setup.drafter is None:
        raise ValueError("--tune measures trees, and this model has no drafter")
    slots = setup.options.max_num_seqs
    times = tuning.measure(load(setup, ()).engine)
    path = tuning.save(setup.tuning_key, slots, times)
    for (bucket, sequences), seconds in sorted(times.items(), key=lambda item: item[0][::-1]):
        plain = times[0, sequences]
        print(
            f"{sequences:3d} sequences, {bucket:2d} nodes: {1e3 * seconds:8.3f} ms a step, "
            f"{seconds / plain:.2f} x plain; pays from {seconds / plain:.2f} tokens a step"
        )
    print(f"kept in {path}, used by --tree_budget=auto with --max_num_seqs={slots}")


def load(setup: Setup, requests: Sequence[Request]) -> LLM:
    started = time.perf_counter()
    long = setup.checkpoint is not None and setup.checkpoint.bytes_used > LONG_READ
    llm = LLM.from_setup(setup, requests=requests, progress=long, patient=False)
    logging.info(
        "%s in %s, ready after %.1f s; %d programs built, %d of them from the cache; %s",
        setup.folder.name,
        setup.dtype,
        time.perf_counter() - started,
        llm.engine.compilations,
        llm.engine.programs.counter.from_cache,
        setup.kernels,
    )
    return llm


def finish_compiling() -> None:
    """Waits for programs that a short first run had no use for: the next run finds them."""
    threads = [thread for thread in threading.enumerate() if thread.name == COMPILE_THREAD]
    if not threads:
        return
    print("compiling what later runs will use; Ctrl-C skips it", file=sys.stderr)
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(0)


def batch(flags: Any, llm: LLM, requests: Sequence[Request], interrupt: Interrupt) -> int:
    """Generates for all requests, reports, and returns the exit code."""
    first = llm.setup.processes.first
    quiet = flags.output_json == "-" or not first
    folder = flags.profile_dir if first else None
    trace = Trace(folder, flags.profile_steps, llm.setup.options.steps_per_call)
    printer = Printer(None if quiet else sys.stdout, len(requests))
    started = time.perf_counter()
    code = 0
    outputs: list[list[Output]] = []
    try:
        bar = tqdm(
            total=len(requests),
            unit="prompt",
            disable=len(requests) == 1 or not first or (sys.stdout.isatty() and not quiet),
        )
        with bar:
            for number, output in generate(llm, requests, outputs, interrupt, trace):
                bar.update(output.finished)
                if code == 0:
                    try:
                        printer.take(number, output)
                    except ReaderGone:
                        code, interrupt.requested = BROKEN_PIPE, True
    finally:
        trace.stop()
    seconds = time.perf_counter() - started
    if interrupt.requested and code == 0:
        code = INTERRUPTED
    results = [gather(*pair) for pair in zip(requests, outputs, strict=True)]
    if flags.expert_histogram:
        count_experts(flags.expert_histogram, llm, results)
    if not first:
        return code
    stages = stage_ms(flags, llm, requests, trace)
    if flags.output_json:
        wants = [request.params.logprobs is not None for request in requests]
        entries = [
            report.as_json(result, logprobs=want, stage_ms=stages)
            for result, want in zip(results, wants, strict=True)
        ]
        try:
            report.write_json(flags.output_json, entries)
        except BrokenPipeError:
            code = BROKEN_PIPE
    print(report.summary(results, seconds, stages), file=sys.stderr)
    if code == BROKEN_PIPE:
        # What stdout still buffers has no reader: keep the interpreter from flushing it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def count_experts(path: str, llm: LLM, results: Sequence[Result]) -> None:
    """Writes how often each expert was chosen over prompts and answers, and tells the balance."""
    texts = [[*result.prompt_token_ids, *result.token_ids] for result in results]
    longest = llm.setup.options.max_model_len
    counts = np.sum([llm.expert_counts(text[:longest]) for text in texts], axis=0)
    if not llm.setup.processes.first:
        return
    balance.save(path, counts)
    layout = llm.setup.layout
    loads = balance.load(counts, layout.group("expert").size, llm.setup.expert_order)
    logging.info(
        "choices of experts written to %s; by device: %s, the busiest has %.3f of the mean",
        *(path, loads.sum(axis=0).tolist(), balance.unevenness(loads)),
    )


def stage_ms(
    flags: Any, llm: LLM, requests: Sequence[Request], trace: Trace
) -> dict[str, float] | None:
    """Milliseconds of a step by stage, if steps were profiled."""
    if not trace.steps:
        return None
    programs = llm.engine.programs
    plans = llm.setup.plans_for(programs, requests)
    compiled: list[Any] = [programs.decode(plan) for plan in plans]
    texts = [program.as_text() for program in compiled]
    try:
        times = profiling.stage_seconds(flags.profile_dir, "jit_decode_steps", texts)
    except profiling.NoEvents as error:
        logging.warning("no time by stage: %s", error)
        return None
    return {stage: 1e3 * seconds / trace.steps for stage, seconds in times.items()}


def generate(
    llm: LLM,
    requests: Sequence[Request],
    outputs: list[list[Output]],
    interrupt: Interrupt,
    trace: Trace,
) -> Iterator[tuple[int, Output]]:
    """Yields (number of the request, output) and keeps all outputs in `outputs`, by request.

    When the interrupt is requested, what still runs is aborted: every request gets its last output.
    """
    engine = llm.engine
    numbers = {engine.add(request): number for number, request in enumerate(requests)}
    outputs.extend([] for _ in requests)
    while engine.busy:
        # Ctrl-C may reach process 0 alone, or each of them at another moment.
        if llm.setup.processes.decide(lambda: interrupt.requested):
            interrupt.requested = True
            ended = [engine.abort(index) for index in numbers]
            step = [output for output in ended if output is not None]
        else:
            trace.before_call()
            step = engine.step()
            trace.after_call()
        for output in step:
            number = numbers[output.request_id]
            outputs[number].append(output)
            yield number, output


def converse(flags: Any, setup: Setup, sampling: dict[str, Any]) -> int:
    """A conversation on the terminal: one line a message, Ctrl-C cuts an answer short."""
    with Interrupt().watch():
        llm = load(setup, ())
    messages: list[Message] = []
    if flags.system:
        messages.append({"role": "system", "content": flags.system})
    print("Type a message; Ctrl-C cuts an answer short, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            text = ask()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return INTERRUPTED
        if text is None:
            return 0
        if not text.strip():
            continue
        turn = [*messages, {"role": "user", "content": text}]
        job = Job(prompt=turn if flags.chat else text, where="message", sampling={})
        try:
            request = job.request(setup, sampling, flags.thinking)
        except ValueError as error:
            print(f"{error}", file=sys.stderr)
            continue
        with Interrupt().watch() as interrupt:
            interrupt.generating = True
            result = answer(llm, request, interrupt)
        messages = [*turn, {"role": "assistant", "content": result.text}]


def ask() -> str | None:
    """The user's next line; None at the end of input."""
    print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if line:
        return line.rstrip("\n")
    print(file=sys.stderr)
    return None


def answer(llm: LLM, request: Request, interrupt: Interrupt) -> Result:
    printer = Printer(sys.stdout, 1)
    outputs: list[list[Output]] = []
    started = time.perf_counter()
    for number, output in generate(llm, [request], outputs, interrupt, Trace(None, 0, 1)):
        printer.take(number, output)
    result = gather(request, outputs[0])
    print(report.summary([result], time.perf_counter() - started), file=sys.stderr)
    return result
