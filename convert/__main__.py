"""Converts a published Kimi K2 checkpoint once, so that it loads straight onto any mesh.

  python3 -m convert plan    --source=FOLDER --output=FOLDER [--drafter=FOLDER]
  python3 -m convert convert --source=FOLDER --output=FOLDER [--drafter=FOLDER]
  python3 -m convert verify  --output=FOLDER [--source=FOLDER [--drafter=FOLDER]]
  python3 -m convert info    --source=FOLDER | --output=FOLDER

plan reads headers only, and says what converting will take and what the result needs. convert does
it, and goes on where an earlier run was interrupted. verify rebuilds every published tensor from
the result and compares it with the source's sha256. info says what a folder is. All exit with 0
only if all is well.
"""

import errno
import os
import signal
import sys
from pathlib import Path

from absl import flags, logging

COMMANDS = ("plan", "convert", "verify", "info")
FLAGS = ("source", "output", "drafter", "hashes", "progress")
USES = {
    "plan": ("source", "output", "drafter", "progress"),
    "convert": ("source", "output", "drafter", "progress"),
    "verify": FLAGS,
    "info": ("source", "output", "progress"),
}

flags.DEFINE_string("source", None, "The published folder: config.json and safetensors files.")
flags.DEFINE_string("output", None, "The converted folder.")
flags.DEFINE_string(
    "drafter",
    None,
    "The published folder of a DFlash drafter, to travel inside the converted one; by default the"
    " folder `drafter` in the source, if there is one; empty for none.",
)
flags.DEFINE_string(
    "hashes",
    None,
    "verify: a file for every tensor's two sha256, source's and output's; '-': stdout.",
)
flags.DEFINE_bool("progress", True, "Show progress bars on stderr.")


REMEDIES = {
    errno.ENOSPC: "make room and run the same command again: it goes on from here",
    errno.EDQUOT: "make room and run the same command again: it goes on from here",
    errno.EACCES: "choose a folder that you may use",
    errno.EPERM: "choose a folder that you may use",
    errno.EROFS: "choose a folder on a disk that can be written",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENOENT: "was it moved meanwhile, or is its folder not there?",
    errno.ENOTDIR: "a part of the path is a file; correct it",
    errno.EISDIR: "give a file, not a folder",
    errno.EIO: "the disk is failing; choose another",
}


class UsageError(ValueError):
    """The command line is wrong; the message says how."""


def leave(*_: object) -> None:
    """Ctrl-C, at once: an exception could get lost in a library, and nothing needs tidying.

    Whatever is in place is whole, and the lock goes with the process.
    """
    os.write(2, b"\nconvert: interrupted; run the same command again to go on\n")
    os._exit(130)


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, leave)
    logging.use_absl_handler()
    sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: names of files may be odd
    flags.FLAGS.set_default("verbosity", logging.WARNING)
    if any(argument in ("--help", "-h", "-help", "--helpfull") for argument in argv[1:]):
        print(__doc__)
        for name in FLAGS:
            print(f"  --{name:<12}{flags.FLAGS[name].help}")
        return 0
    # Nothing is computed, and a converter must not take a GPU's memory.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        command = parse(argv)
        from convert import commands

        return getattr(commands, command)(flags.FLAGS)
    except UsageError as error:
        complain(f"{error}\nSee --help.")
        return 2
    except ValueError as error:
        complain(str(error))
        return 1
    except OSError as error:
        complain(describe(error))
        return 1


def parse(argv: list[str]) -> str:
    """The command; the flags' values are in FLAGS."""
    try:
        rest = flags.FLAGS(argv)[1:]
    except flags.Error as error:
        raise UsageError(str(error)) from error
    if len(rest) != 1 or rest[0] not in COMMANDS:
        given = f"not {' '.join(rest)!r}" if rest else "none is given"
        raise UsageError(f"expected one command of {', '.join(COMMANDS)}; {given}")
    [command] = rest
    values = flags.FLAGS
    needs = {"plan": ("source", "output"), "convert": ("source", "output"), "verify": ("output",)}
    for name in needs.get(command, ()):
        if not values[name].value:
            raise UsageError(f"{command} needs --{name}=FOLDER")
    for name in FLAGS:
        if values[name].present and name not in USES[command]:
            raise UsageError(f"{command} does not take --{name}")
    if command == "verify" and values.drafter and not values.source:
        raise UsageError("verify compares with --drafter only beside --source; give both")
    if command == "info" and bool(values.source) == bool(values.output):
        raise UsageError("info needs --source=FOLDER or --output=FOLDER, one of them")
    for name in ("source", "output", "drafter"):
        if folder := values[name].value:
            if any("\udc80" <= character <= "\udcff" for character in folder):
                raise UsageError(f"--{name}={folder}: the path is not UTF-8; rename the folder")
            values[name].value = str(Path(folder).expanduser())
    return command


def describe(error: OSError) -> str:
    """What went wrong with which file, and what to do."""
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    remedy = REMEDIES.get(error.errno or 0)
    return f"{what}; {remedy}" if remedy else what


def complain(message: str) -> None:
    """On stderr."""
    print(f"convert: error: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
