"""What a kernel has to know of the GPU it is compiled for."""

import dataclasses
from typing import Any

SHARED_GRANULE = 1024  # Pallas rounds a scratch buffer up to this

# Shared memory of a block, by compute capability (CUDA programming guide, table 30), less one:
# a launch with the last one in use is refused on an H200 ("invalid argument").
SHARED_BYTES = {
    capability: limit - SHARED_GRANULE
    for capability, limit in {
        (9, 0): 232_448,
        (10, 0): 232_448,
        (10, 3): 232_448,
        (12, 0): 101_376,
    }.items()
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU: compute capability, multiprocessors, shared memory of a block in bytes."""

    capability: tuple[int, int]
    num_cores: int
    shared_bytes: int

    @property
    def name(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


def _known(capability: tuple[int, int], num_cores: int) -> Target:
    return Target(capability=capability, num_cores=num_cores, shared_bytes=SHARED_BYTES[capability])


KNOWN = {
    "sm_90": _known((9, 0), 132),  # H200
    "sm_103": _known((10, 3), 148),  # B300
    "sm_120": _known((12, 0), 188),  # RTX PRO 6000
}


def of(device: Any) -> Target:
    """The target of a CUDA device (a `jax.Device`).

    Raises NotImplementedError for a capability that is not in `SHARED_BYTES`.
    """
    major, minor = (int(part) for part in device.compute_capability.split("."))
    if (major, minor) not in SHARED_BYTES:
        known = ", ".join(f"{a}.{b}" for a, b in sorted(SHARED_BYTES))
        raise NotImplementedError(
            f"{device}: compute capability {major}.{minor} is not supported; the kernels serve"
            f" {known}"
        )
    return Target(
        capability=(major, minor),
        num_cores=device.core_count,
        shared_bytes=SHARED_BYTES[major, minor],
    )
