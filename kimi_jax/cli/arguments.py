"""Command line arguments for absl flags: dashes for underscores, clear errors, a short help."""

import itertools
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from absl import flags


class UsageError(ValueError):
    """The command line is wrong; the message says how."""


def parse(arguments: Sequence[str], values: flags.FlagValues) -> None:
    """Parses everything behind the program's name into `values`.

    Raises UsageError for an unknown flag (with suggestions), a bad value, or an argument that
    belongs to no flag.
    """
    try:
        rest = values(["main.py", *_with_underscores(arguments, values)])[1:]
    except flags.Error as error:
        raise UsageError(str(error)) from error
    if rest:
        raise UsageError(
            f"unexpected argument {rest[0]!r}; a prompt is given as --prompt {rest[0]!r}"
        )


def _with_underscores(arguments: Sequence[str], values: flags.FlagValues) -> Iterator[str]:
    """`--max-tokens` becomes `--max_tokens`, if that is a flag; values stay as they are."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            yield argument
            yield from rest
            return
        if not argument.startswith("-"):
            yield argument
            continue
        dashes = "--" if argument.startswith("--") else "-"
        name, equals, value = argument[len(dashes) :].partition("=")
        known = name.replace("-", "_")
        if known in values:
            yield dashes + known + equals + value
            if not values[known].boolean and not equals:
                yield from itertools.islice(rest, 1)  # the flag's value
        elif known.startswith("no") and known[2:].lstrip("_") in values:
            yield f"{dashes}no{known[2:].lstrip('_')}{equals}{value}"
        else:
            yield argument


def help_text(
    summary: str, groups: Mapping[str, Mapping[str, str]], values: flags.FlagValues
) -> str:
    """The help page: `summary`, then each group's flags; a text of "" stands for the flag's own."""
    lines = [summary.strip()]
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        for name, text in names.items():
            flag = values[name]
            left = f"--[no]{name}" if flag.boolean else f"--{name}"
            text = text or flag.help or ""
            if flag.default not in (None, True, False):
                text += f" (default {flag.default})"
            lines += textwrap.wrap(
                text, 100, initial_indent=f"  {left:<26}", subsequent_indent=" " * 28
            )
    return "\n".join(lines)


def wants_help(arguments: Sequence[str]) -> bool:
    return any(argument in ("--help", "-h", "-help", "--helpfull") for argument in arguments)


def complain(message: str) -> None:
    """One line on stderr."""
    print(f"main.py: error: {message}", file=sys.stderr)
