"""Generates text with Kimi K2.6, or with the small model that comes with this package.

  python3 main.py --prompt "Write a Python function that reverses a string."
  python3 main.py --model FOLDER --prompt_file prompts.jsonl --output_json answers.json
  echo "def add(a, b):" | python3 main.py --nochat --temperature 0

The text streams to stdout, everything else goes to stderr. Dashes do for underscores.
"""

import logging as std_logging
import os
import signal
import sys
from collections.abc import Callable

from absl import flags, logging

from kimi_jax.cli import arguments

Define = Callable[..., object]
GROUPS: dict[str, dict[str, str]] = {}
"""Title -> flags -> help, in the order of the help page."""


def group(title: str, *entries: tuple[Define, str, object, str]) -> None:
    """Defines flags that --help shows under one title."""
    for define, name, default, text in entries:
        define(name, default, text)
        GROUPS.setdefault(title, {})[name] = text


def choice(*values: str) -> Define:
    return lambda name, default, text: flags.DEFINE_enum(name, default, list(values), text)


text, texts, number, real, switch = (
    flags.DEFINE_string,
    flags.DEFINE_multi_string,
    flags.DEFINE_integer,
    flags.DEFINE_float,
    flags.DEFINE_bool,
)
group(
    "What to continue (none of the first three: standard input)",
    (text, "prompt", None, "Text to answer, or with --nochat to continue."),
    (
        text,
        "prompt_file",
        None,
        'JSON Lines: {"prompt": ...} or {"messages": [...]}, with sampling fields if need be.',
    ),
    (switch, "interactive", False, "A conversation, line by line."),
    (text, "system", None, "System message before the conversation."),
    (switch, "chat", True, "Put prompts into the chat template; this is the default."),
    (switch, "thinking", None, "Think before the answer; K2.6 does by default, tiny-k2 does not."),
)
group(
    "How to continue it",
    (
        number,
        "max_tokens",
        None,
        "Most tokens to generate; else what the context holds, or 512 with tiny-k2.",
    ),
    (number, "min_tokens", None, "No end before this many tokens."),
    (
        real,
        "temperature",
        None,
        "0 is greedy. By default 1.0 thinking, 0.6 otherwise, tiny-k2 0.7.",
    ),
    (real, "top_p", None, "Keep the likeliest tokens of this total probability; by default 0.95."),
    (number, "top_k", None, "Keep this many likeliest tokens; 0 keeps all."),
    (real, "min_p", None, "Keep tokens at least this likely, relative to the likeliest."),
    (number, "seed", 0, "Prompt i draws by this seed and i; a line of a file may have its own."),
    (texts, "stop", None, "String that ends the text; may be repeated."),
    (switch, "ignore_eos", False, "Do not stop at the model's end tokens."),
    (
        number,
        "logprobs",
        None,
        "Report log-probabilities in the JSON, and this many likeliest tokens.",
    ),
)
group(
    "Model and machine",
    (text, "model", None, "Checkpoint folder; by default the bundled tiny-k2."),
    (choice("auto", "dummy"), "load_format", "auto", "dummy: random weights, from config.json."),
    (
        choice("bfloat16", "float32"),
        "dtype",
        None,
        "bfloat16 or float32; by default bfloat16 on a GPU, float32 on a CPU.",
    ),
    (
        choice("auto", "reference", "mosaic"),
        "kernels",
        "auto",
        "What experts and attention run on. mosaic: the Pallas kernels for NVIDIA GPUs; reference: "
        "plain JAX; auto: mosaic where it serves the GPU, the sizes and the dtype.",
    ),
    (number, "max_model_len", None, "Longest context; by default the model's, or what fits."),
    (number, "max_num_seqs", None, "Sequences that run at a time; by default up to 8."),
    (number, "page_size", 64, "Tokens in a cache page."),
    (real, "gpu_memory_utilization", 0.9, "Share of the memory that may be used."),
    (switch, "dry_run", False, "Print the memory plan and the ops, and load nothing."),
)
group(
    "Several devices",
    (
        choice("auto", "single", "tp", "ep", "mixed", "data", "context"),
        "sharding",
        "auto",
        "tp: heads and expert widths over the devices; ep: experts by number; mixed: both; data: "
        "sequences; context: tp, the cache by position. auto: the sizes below, else one device.",
    ),
    (number, "tensor_parallel_size", None, "Devices that share a copy of the model (--tp_size)."),
    (number, "ep_size", None, "How many of them split the experts by number, not by width."),
    (number, "data_parallel_size", None, "Copies, each for its own sequences (--dp_size)."),
    (switch, "enable_expert_parallel", False, "vLLM's way to say --ep_size of all devices."),
    (text, "expert_placement", None, "Spread experts by this histogram of --expert_histogram."),
    (text, "expert_histogram", None, "File for how often each expert was chosen in this run."),
    (text, "coordinator_address", None, "HOST:PORT of process 0, where several processes meet."),
    (number, "num_processes", None, "How many they are; all get the same flags but the next."),
    (number, "process_id", None, "This one's number; 0 reads the prompts and prints."),
)
for alias, name in (
    ("tp_size", "tensor_parallel_size"),
    ("dp_size", "data_parallel_size"),
    ("expert_parallel_size", "ep_size"),
):
    flags.DEFINE_alias(alias, name)
group(
    "Speculation: drafting trees of tokens, which changes the speed and never the text",
    (text, "drafter", None, "Folder of a DFlash drafter; by default the one inside the model's."),
    (text, "tree_budget", None, "Tree nodes a sequence, 0 to 63, or auto, which is the default."),
    (switch, "speculate", True, "Use a drafter if there is one; this is the default."),
    (
        text,
        "speculative_config",
        None,
        'The same in vLLM\'s form: \'{"method": "ddtree", "tree_budget": 8}\'.',
    ),
    (switch, "tune", False, "Measure step times for auto, keep them for later runs, and end."),
)
group(
    "Results",
    (
        text,
        "output_json",
        None,
        "File for the results as JSON; '-' is stdout, where no text streams then.",
    ),
    (text, "profile_dir", None, "Folder for a profiler trace of some decoding steps."),
    (number, "profile_steps", 16, "Steps to trace."),
)
GROUPS["Results"]["verbosity"] = "-1 silences the log, 1 shows more of it."


def check(values: flags.FlagValues) -> None:
    """What a flag alone cannot know."""
    sources = [name for name in ("prompt", "prompt_file") if values[name].value is not None]
    sources += ["interactive"] if values.interactive else []
    if len(sources) > 1:
        raise arguments.UsageError(f"--{sources[0]} and --{sources[1]} exclude each other")
    for name in (
        "model",
        "drafter",
        "prompt_file",
        "output_json",
        "profile_dir",
        "expert_histogram",
    ):
        if values[name].value == "":
            raise arguments.UsageError(f"--{name} is empty (an unset variable?)")
    if values.profile_steps < 1:
        raise arguments.UsageError(f"--profile_steps={values.profile_steps}: expected at least 1")
    reads = not values.process_id  # only process 0 does, of several
    if reads and not sources and not values.dry_run and not values.tune and sys.stdin.isatty():
        raise arguments.UsageError("no prompt: give --prompt, --prompt_file or --interactive")
    if values.interactive and values.output_json:
        raise arguments.UsageError("--interactive and --output_json exclude each other")


def leave(*_: object) -> None:
    """Ctrl-C while libraries are imported: they do not all survive an exception."""
    os.write(2, b"main.py: error: interrupted before anything was generated\n")
    os._exit(130)


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, leave)
    flags.FLAGS.set_default("verbosity", logging.INFO)
    if arguments.wants_help(argv[1:]):
        print(arguments.help_text(__doc__ or "", GROUPS, flags.FLAGS))
        return 0
    try:
        arguments.parse(argv[1:], flags.FLAGS)
        check(flags.FLAGS)
    except arguments.UsageError as error:
        arguments.complain(f"{error}\nSee --help.")
        return 2
    logging.use_absl_handler()
    std_logging.getLogger("jax").setLevel(std_logging.WARNING)
    # JAX is loaded only for a valid command line.
    from kimi_jax.cli.run import BROKEN_PIPE, INTERRUPTED, run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = run(flags.FLAGS)
    except (ValueError, NotImplementedError, OSError) as error:
        arguments.complain(str(error))
        return 1
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        arguments.complain(
            f"out of memory: {str(error).splitlines()[0]}\nLower --max_num_seqs, --max_model_len "
            "or --gpu_memory_utilization; --dry_run shows the plan."
        )
        return 1
    except KeyboardInterrupt:
        arguments.complain("interrupted before anything was generated")
        code = INTERRUPTED
    if code in (INTERRUPTED, BROKEN_PIPE):
        # At once: compilations may be under way in other threads, which an exit would wait for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
