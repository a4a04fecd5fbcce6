"""A program: converts a folder and prints its peak memory before and after, and the bytes read.

python peak_memory.py TESTS SOURCE OUTPUT
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from conversion import converted
from orbax.checkpoint import v1  # noqa: F401, part of the program, not of the conversion


def peak() -> int:
    """Bytes; not getrusage, whose high-water mark is inherited from the parent."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert match
    return 1024 * int(match[1])


if __name__ == "__main__":
    before = peak()
    report = converted(Path(sys.argv[2]), Path(sys.argv[3]))
    print(before, peak(), report.bytes_read)
