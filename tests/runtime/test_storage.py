"""Storage of a loaded plan: shared weights, the step record in one buffer, buckets of sizes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metainfer.ir.errors import CapacityError
from metainfer.ir.step import STEP_FIELDS
from metainfer.runtime.device_sampling import Chosen, DeviceSampler, _Room
from metainfer.runtime.graphs import bucket
from metainfer.runtime.step_record import StepRecord
from metainfer.runtime.storage import Storage

CPU = torch.device("cpu")
SIZES = {"T": 8, "B": 4, "P": 3, "R": 4}


def storage(device: str) -> Storage:
    return Storage(64, SIZES, torch.device(device), 16, has_step=True)


def test_fields_of_the_step_do_not_overlap_and_keep_what_is_not_written() -> None:
    sizes = {name: 5 + 7 * i for i, name in enumerate(STEP_FIELDS)}
    record = StepRecord(sizes, CPU)
    for number, (name, size) in enumerate(sizes.items()):
        record.write({name: np.full(size, number + 1)})
    record.write({"positions": np.array([9, 9])})
    for number, (name, size) in enumerate(sizes.items()):
        wanted = np.full(size, number + 1)
        if name == "positions":
            wanted[:2] = 9
        np.testing.assert_array_equal(record.field(name).numpy(), wanted)
        assert record.field(name).data_ptr() % 4 == 0


@given(size=st.integers(1, 300), most=st.integers(1, 300))
def test_a_bucket_holds_the_size_and_is_not_twice_as_large(size: int, most: int) -> None:
    if size > most:
        with pytest.raises(CapacityError, match=f"{size} does not fit"):
            bucket(size, most)
        return
    found = bucket(size, most)
    assert size <= found <= min(2 * size, most) or found == 1


def test_choices_become_tokens_where_they_lie() -> None:
    """A row that had no choice gives a token that exists."""
    sampler = object.__new__(DeviceSampler)
    room = _Room(*(torch.tensor([7, -1, 3, 99], dtype=torch.int32) for _ in range(4)))
    sampler._last = Chosen(room, 3, ())
    tokens = torch.full((2,), 55, dtype=torch.int32)
    sampler.feed(torch.tensor([2, 1], dtype=torch.int32), tokens)
    assert tokens.tolist() == [3, 0]
