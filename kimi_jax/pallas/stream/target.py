"""What a kernel has to know of the GPU it is compiled for."""

import dataclasses
from typing import Any

SHARED_BYTES = {(9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448, (12, 0): 101_376}
"""Shared memory of a block, by compute capability (CUDA programming guide, table 30)."""

SHARED_GRANULE = 1024  # Pallas rounds a scratch buffer up to this


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU: compute capability, multiprocessors, shared memory of a block in bytes."""

    capability: tuple[int, int]
    num_cores: int
    shared_bytes: int

    @property
    def name(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


KNOWN = {
    "sm_90": Target(capability=(9, 0), num_cores=132, shared_bytes=232_448),  # H200
    "sm_103": Target(capability=(10, 3), num_cores=148, shared_bytes=232_448),  # B300
    "sm_120": Target(capability=(12, 0), num_cores=188, shared_bytes=101_376),  # RTX PRO 6000
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
