"""Hands out the pages of the paged states: physical pages, shared by all states of a plan."""

from dataclasses import dataclass

import numpy as np

from metainfer.ir.errors import CapacityError
from metainfer.ir.step import NULL_PAGE


@dataclass
class _Lease:
    """Pages of one sequence.

    Attributes:
        table: page numbers; as long as the reservation, null where no page was taken yet.
        taken: how many were taken.
    """

    table: np.ndarray
    taken: int = 0


class PageAllocator:
    """Pages by sequence.

    A sequence reserves pages for its whole life when it is admitted and takes them as it grows: so
    none that runs can be left without a page, and no sequence ever has to give one up.

    Args:
        num_pages: physical pages, the null page included, which nobody gets.
        page_size: tokens per page.

    Raises: CapacityError if there is no page beside the null page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise CapacityError(
                f"{num_pages} pages of {page_size} tokens hold nothing: page {NULL_PAGE} is the "
                "null page",
                advice="raise memory_fraction, or compile for a machine with more memory",
            )
        self.page_size = page_size
        self.num_pages = num_pages
        # Popped from the end: low pages come first, and those last used are used again.
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._leases: dict[int, _Lease] = {}
        self._reserved = 0

    @property
    def capacity(self) -> int:
        """Tokens that all pages hold together."""
        return (self.num_pages - 1) * self.page_size

    @property
    def num_free(self) -> int:
        """Pages that nobody has reserved."""
        return self.num_pages - 1 - self._reserved

    @property
    def num_taken(self) -> int:
        """Pages that hold tokens now."""
        return self.num_pages - 1 - len(self._free)

    def pages_for(self, length: int) -> int:
        """Pages that a sequence of so many tokens takes."""
        return -(-length // self.page_size)

    def fits(self, length: int) -> bool:
        """Whether a sequence that grows to so many tokens can be admitted now."""
        return self.pages_for(length) <= self.num_free

    def allocate(self, sequence: int, length: int) -> None:
        """Reserve pages for a sequence that grows to so many tokens.

        Raises: CapacityError if they are not free, or the sequence has pages already.
        """
        wanted = self.pages_for(length)
        if sequence in self._leases:
            raise CapacityError(f"sequence {sequence} has pages already")
        if wanted > self.num_free:
            raise CapacityError(
                f"sequence {sequence} of {length} tokens needs {wanted} pages of "
                f"{self.page_size} tokens, {self.num_free} of {self.num_pages - 1} are free",
                advice="wait until others end, or raise memory_fraction",
            )
        self._reserved += wanted
        self._leases[sequence] = _Lease(np.full(wanted, NULL_PAGE, np.int32))

    def ensure(self, sequence: int, length: int) -> np.ndarray:
        """Take pages so that the sequence holds so many tokens, and return its page table.

        Shapes: -> int32 [pages taken].
        Raises: CapacityError if the sequence reserved fewer.
        """
        lease = self._lease(sequence)
        wanted = self.pages_for(length)
        if wanted > len(lease.table):
            raise CapacityError(
                f"sequence {sequence} grows to {length} tokens, {wanted} pages, "
                f"but reserved {len(lease.table)}"
            )
        while lease.taken < wanted:
            lease.table[lease.taken] = self._free.pop()
            lease.taken += 1
        return lease.table[: lease.taken]

    def free(self, sequence: int) -> None:
        """Take back the pages and the reservation of a sequence.

        Raises: CapacityError if it has none.
        """
        lease = self._lease(sequence)
        del self._leases[sequence]
        self._reserved -= len(lease.table)
        self._free.extend(lease.table[: lease.taken][::-1].tolist())

    def _lease(self, sequence: int) -> _Lease:
        if sequence not in self._leases:
            raise CapacityError(f"sequence {sequence} has no pages")
        return self._leases[sequence]
