"""Pages of the cache, counted by reference."""

from collections.abc import Iterable, Sequence

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
