"""Rings of shared memory that copies fill and warps drain."""

import dataclasses

from kimi_jax.pallas.stream.machine import WARP, Machine, Value

MBARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rings:
    """`rings` rings of `slots` slots each; round q of a ring lives in slot q % slots.

    A slot has two mbarriers: `full` (one arrival, by the warp that issues the copies, and their
    bytes) and `empty` (one arrival of each of the `consumers` warps). Their phases follow from q,
    so nothing is carried but the number of the round.
    """

    base: int  # address of the first slot
    slot_bytes: int
    slots: int
    rings: int
    consumers: int
    barriers: int  # address of the mbarriers

    @property
    def barrier_bytes(self) -> int:
        return self.rings * self.slots * 2 * MBARRIER_BYTES

    def init(self, m: Machine) -> None:
        """By one warp, before a barrier of the block; a lane makes the barriers of a slot."""
        count = self.rings * self.slots
        for start in range(0, count, WARP):
            index = start + m.lane
            address = self.barriers + 2 * MBARRIER_BYTES * index
            m.mbarrier_init(address, 1, index < count)
            m.mbarrier_init(address + MBARRIER_BYTES, self.consumers, index < count)
        m.fence_mbarrier_init()

    def slot(self, ring: Value, q: Value) -> Value:
        return self.base + (ring * self.slots + q % self.slots) * self.slot_bytes

    def full(self, ring: Value, q: Value) -> Value:
        return self.barriers + (ring * self.slots + q % self.slots) * (2 * MBARRIER_BYTES)

    def wait_empty(self, m: Machine, ring: Value, q: Value) -> None:
        """Until round q - slots has been drained (at once in the first rounds)."""
        parity = 1 - (q // self.slots) % 2
        m.mbarrier_wait(self.full(ring, q) + MBARRIER_BYTES, parity)

    def wait_full(self, m: Machine, ring: Value, q: Value) -> None:
        m.mbarrier_wait(self.full(ring, q), (q // self.slots) % 2)

    def release(self, m: Machine, ring: Value, q: Value) -> None:
        """By each consumer, when it has read what it needs."""
        m.sync_warp()
        m.mbarrier_arrive(self.full(ring, q) + MBARRIER_BYTES, m.lane == 0)
