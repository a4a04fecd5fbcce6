"""Who has which page, and what the device is told about each slot."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from kimi_jax.step import Control, State

SCRATCH_PAGE = 0  # page tables are filled up with it; it belongs to nobody


class OutOfPages(ValueError):
    """More pages were asked for than are free."""


class PagePool:
    """Hands out page ids 1 .. count - 1.

    A page may have several owners (a shared prefix): it is free again when the last one lets go.
    A page with more than one owner must not be written.
    """

    def __init__(self, count: int):
        if count < 2:
            raise ValueError(
                f"a cache of {count} pages has none to give: page {SCRATCH_PAGE} is the scratch "
                "page, so at least 2 are needed"
            )
        self._owners = [0] * count
        self._free = list(range(count - 1, SCRATCH_PAGE, -1))  # the lowest id is given first

    @property
    def capacity(self) -> int:
        """Pages that can be handed out in all."""
        return len(self._owners) - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def owners(self, page: int) -> int:
        return self._owners[page]

    def allocate(self, count: int) -> list[int]:
        """Returns `count` pages with one owner each; raises OutOfPages and takes none."""
        if count > self.free:
            raise OutOfPages(f"{count} pages are needed, {self.free} of {self.capacity} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages that are in use."""
        pages = list(pages)
        self._check_in_use(pages)
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes an owner from each page; those without one are free."""
        self._check_in_use(pages)
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def _check_in_use(self, pages: Sequence[int]) -> None:
        idle = [page for page in pages if self._owners[page] == 0]
        if idle:
            raise ValueError(f"pages {idle} are not in use")


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_size)


def abstract_array(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """A shape and a type, to stand where a class announces an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


class SlotTable:
    """The host's copy of what it tells the device about its slots: `Control`, and the three arrays
    of `State` that a slot starts from.

    An array goes to the device when the host has changed it, and stays there until it changes.
    """

    _STATE = ("length", "token", "active")

    def __init__(
        self,
        num_slots: int,
        *,
        pages: int,
        stop_ids: int,
        biases: int,
        sharding: jax.sharding.Sharding | None = None,
    ):
        """pages: of the longest context; stop_ids, biases: the most that a request may have;
        sharding: where the slots lie, None: on the default device.
        """
        self._sharding = sharding

        def filled(value: float, dtype: type, *shape: int) -> np.ndarray:
            return np.full((num_slots, *shape), value, dtype)

        self._host = {
            "page_table": filled(SCRATCH_PAGE, np.int32, pages),
            "max_length": filled(0, np.int32),
            "min_length": filled(0, np.int32),
            "stop_ids": filled(-1, np.int32, stop_ids),
            "temperature": filled(0, np.float32),
            "top_k": filled(0, np.int32),
            "top_p": filled(1, np.float32),
            "min_p": filled(0, np.float32),
            "seed": filled(0, np.uint32, 2),
            "bias_ids": filled(-1, np.int32, biases),
            "bias_values": filled(0, np.float32, biases),
            "n_live": filled(0, np.int32),
            "length": filled(0, np.int32),
            "token": filled(0, np.int32),
            "active": filled(False, np.bool_),
        }
        self._changed = set(self._host)
        self._control: Control | None = None

    def abstract_control(self) -> Control:
        """Shapes and types of the control block."""
        return Control(
            **{
                name: abstract_array(self._host[name].shape, self._host[name].dtype)
                for name in _CONTROL
            }
        )

    def page_row(self, slot: int) -> np.ndarray:
        """int32 [pages]: a copy, since the caller may hold it while the table changes."""
        return self._host["page_table"][slot].copy()

    def set(self, slot: int, **values) -> None:
        """Writes fields of a slot; the rest of a row that is longer than its list is blank."""
        for name, value in values.items():
            row = np.array(self._host[name][slot])
            if row.ndim:
                row[:] = SCRATCH_PAGE if name == "page_table" else -1 if name in _IDS else 0
                row[: len(value)] = value
            else:
                row[()] = value
            if not np.array_equal(row, self._host[name][slot]):
                self._host[name][slot] = row
                self._changed.add(name)

    def clear(self, slot: int) -> None:
        """The slot is free. Its sequence may have been cut where the device went on."""
        self.set(slot, page_table=(), active=False)
        self._changed.update(self._STATE)

    def advanced(self, slot: int, *, length: int, token: int, active: bool) -> None:
        """Notes what the device has made of a slot by itself."""
        for name, value in zip(self._STATE, (length, token, active), strict=True):
            self._host[name][slot] = value

    def control(self) -> Control:
        """The control block on the device."""
        sent = self._send(_CONTROL)
        self._control = (
            dataclasses.replace(self._control, **sent) if self._control else Control(**sent)
        )
        return self._control

    def place(self, state: State) -> State:
        """`state` with the slots as the host wants them."""
        if self._changed.isdisjoint(self._STATE):
            return state
        self._changed.update(self._STATE)
        return dataclasses.replace(state, **self._send(self._STATE))

    def _send(self, names: Iterable[str]) -> dict[str, jax.Array]:
        sending = {name: self._host[name] for name in names if name in self._changed}
        self._changed.difference_update(sending)
        # A copy: the host goes on writing into its own arrays, and `state` is donated.
        return {name: to_device(array, self._sharding) for name, array in sending.items()}


def to_device(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """A copy of the host's array on its devices; every process has the same and fills its own."""
    if sharding is None or jax.process_count() == 1:
        return jax.device_put(array, sharding, may_alias=False)
    copy = array.copy()
    return jax.make_array_from_callback(copy.shape, sharding, copy.__getitem__)


_CONTROL = tuple(field.name for field in dataclasses.fields(Control))
_IDS = ("stop_ids", "bias_ids")
