import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kimi_jax.engine.slots import OutOfPages, PagePool, pages_for


def test_the_scratch_page_is_never_handed_out():
    pool = PagePool(8)
    assert sorted(pool.allocate(pool.free)) == list(range(1, 8))


def test_a_pool_without_a_page_to_give_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(1)


def test_asking_for_too_many_takes_none():
    pool = PagePool(4)
    with pytest.raises(OutOfPages, match="4 pages are needed, 3 of 3 are free"):
        pool.allocate(4)
    assert pool.free == 3


def test_a_shared_page_is_free_when_its_last_owner_lets_go():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.retain(pages[:1])
    pool.release(pages)
    assert (pool.free, pool.owners(pages[0]), pool.owners(pages[1])) == (2, 1, 0)
    pool.release(pages[:1])
    assert pool.free == 3


def test_a_page_that_is_not_in_use_is_neither_released_nor_shared():
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(ValueError, match="not in use"):
        pool.release([page])
    with pytest.raises(ValueError, match="not in use"):
        pool.retain([page])


@given(tokens=st.integers(0, 10_000), page_size=st.integers(1, 300))
def test_pages_for_is_the_least_number_that_holds_the_tokens(tokens, page_size):
    pages = pages_for(tokens, page_size)
    assert (pages - 1) * page_size < tokens <= pages * page_size


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Allocations, shares and releases in any order against a plain list of owners."""

    COUNT = 9

    def __init__(self):
        super().__init__()
        self.pool = PagePool(self.COUNT)
        self.owned: list[list[int]] = []  # one list of pages per owner

    @rule(count=st.integers(0, 10))
    def allocate(self, count):
        if count > self.pool.free:
            with pytest.raises(OutOfPages):
                self.pool.allocate(count)
        else:
            self.owned.append(self.pool.allocate(count))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from(self.owned))
        self.pool.retain(pages)
        self.owned.append(list(pages))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.owned) - 1))
        self.pool.release(self.owned.pop(index))

    @invariant()
    def owners_are_counted(self):
        held = [page for pages in self.owned for page in pages]
        assert 0 not in held
        for page in range(1, self.COUNT):
            assert self.pool.owners(page) == held.count(page)
        assert self.pool.free == self.pool.capacity - len(set(held))


TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
