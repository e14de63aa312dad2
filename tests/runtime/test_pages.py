import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.ir.errors import CapacityError
from metainfer.runtime.pages import PageAllocator


def test_pages_are_taken_as_a_sequence_grows() -> None:
    pages = PageAllocator(num_pages=6, page_size=4)
    assert (pages.capacity, pages.num_free, pages.num_taken) == (20, 5, 0)
    pages.allocate(1, 9)
    assert (pages.num_free, pages.num_taken) == (2, 0)
    assert pages.ensure(1, 4).tolist() == [1]
    assert pages.ensure(1, 5).tolist() == [1, 2]
    assert pages.ensure(1, 2).tolist() == [1, 2]
    assert pages.num_taken == 2
    pages.free(1)
    assert (pages.num_free, pages.num_taken) == (5, 0)


def test_a_reservation_holds_against_others() -> None:
    pages = PageAllocator(num_pages=6, page_size=4)
    pages.allocate(1, 16)
    assert pages.fits(4)
    assert not pages.fits(5)
    with pytest.raises(CapacityError, match="of 5 tokens needs 2 pages of 4 tokens, 1 of 5 are"):
        pages.allocate(2, 5)
    pages.allocate(2, 4)
    assert set(pages.ensure(2, 4).tolist()) | set(pages.ensure(1, 16).tolist()) == {1, 2, 3, 4, 5}


def test_misuse_is_refused() -> None:
    pages = PageAllocator(num_pages=6, page_size=4)
    pages.allocate(1, 4)
    with pytest.raises(CapacityError, match="has pages already"):
        pages.allocate(1, 4)
    with pytest.raises(CapacityError, match="grows to 5 tokens, 2 pages, but reserved 1"):
        pages.ensure(1, 5)
    pages.free(1)
    with pytest.raises(CapacityError, match="sequence 1 has no pages"):
        pages.free(1)
    with pytest.raises(CapacityError, match="sequence 1 has no pages"):
        pages.ensure(1, 1)


def test_a_pool_of_the_null_page_alone_is_refused() -> None:
    with pytest.raises(CapacityError, match="1 pages of 4 tokens hold nothing"):
        PageAllocator(num_pages=1, page_size=4)


@given(
    num_pages=st.integers(2, 20),
    page_size=st.integers(1, 5),
    moves=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30), st.booleans()), max_size=60),
)
def test_no_page_leaks_or_has_two_owners(
    num_pages: int, page_size: int, moves: list[tuple[int, int, bool]]
) -> None:
    pages = PageAllocator(num_pages, page_size)
    tables: dict[int, list[int]] = {}
    limits: dict[int, int] = {}
    for sequence, length, ends in moves:
        if sequence in tables and ends:
            pages.free(sequence)
            del tables[sequence], limits[sequence]
        elif sequence in tables:
            table = pages.ensure(sequence, min(length, limits[sequence])).tolist()
            assert table[: len(tables[sequence])] == tables[sequence]
            tables[sequence] = table
        elif pages.fits(length):
            pages.allocate(sequence, length)
            tables[sequence], limits[sequence] = [], length
        owned = [p for table in tables.values() for p in table]
        assert len(set(owned)) == len(owned) == pages.num_taken
        assert all(0 < p < num_pages for p in owned)
        assert pages.num_free == num_pages - 1 - sum(map(pages.pages_for, limits.values()))
    for sequence in tables:
        pages.free(sequence)
    assert (pages.num_free, pages.num_taken) == (num_pages - 1, 0)
