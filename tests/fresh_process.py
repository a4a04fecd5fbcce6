"""Running a program in a fresh Python process: for device counts, memory, and exit codes."""

import subprocess
import sys


def run(program: str, *arguments: object) -> str:
    """What `program` prints; fails with its stderr unless it exits with 0."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
