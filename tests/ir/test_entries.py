"""Rounded keys and values: a power of two for each token and head, codes that never clip."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metainfer.backends.torch.plain_attention import read_pages, write_entries
from metainfer.backends.torch.tensors import to_numpy, to_torch
from metainfer.ir.dtypes import F8E4M3, F8E8M0, F32, parse_dtype
from metainfer.ir.entries import KV_FP8, check_entries, entry_fields, entry_values, stored_entry
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.format_error import relative_rms
from metainfer.ir.types import StateType, tensor

NUMBERS = hnp.arrays(np.float32, (3, 2, 8), elements=st.floats(-(2.0**99), 2.0**99, width=32))


def empty(pages: int = 2, page_size: int = 4) -> dict[str, np.ndarray]:
    made = {}
    for name in ("k", "v"):
        made[name] = np.zeros((pages, page_size, 2, 8), ml_dtypes.float8_e4m3fn)
        made[f"{name}_scale"] = np.zeros((pages, page_size, 2, 1), ml_dtypes.float8_e8m0fnu)
    return made


def test_fields_and_bytes() -> None:
    entry = tensor(F32, 3, 64)
    assert entry_fields("k", entry, F32) == [("k", entry)]
    codes, scales = entry_fields("k", entry, KV_FP8)
    assert codes == ("k", tensor(F8E4M3, 3, 64))
    assert scales == ("k_scale", tensor(F8E8M0, 3, 1))
    state = StateType("pages", (codes, scales, *entry_fields("v", entry, KV_FP8)))
    check_entries(state)
    assert state.entry_bytes() == 2 * 3 * (64 + 1)
    with pytest.raises(TypeMismatch, match="keys and values as i8/32:f16"):
        entry_fields("k", entry, parse_dtype("i8/32:f16"))
    for fields in ((codes, scales, ("v", entry)), (scales, ("v", entry), ("k", entry))):
        with pytest.raises(TypeMismatch, match="scales do not fit their codes"):
            check_entries(StateType("pages", fields))


def test_the_budget() -> None:
    """A power of two loses next to nothing beside a scale of 32 bits."""
    assert relative_rms(KV_FP8) == pytest.approx(0.0265, abs=1e-4)
    assert relative_rms(parse_dtype("f8e4m3/row:f32")) == pytest.approx(0.0264, abs=1e-4)


@given(NUMBERS)
def test_each_head_of_a_token_is_rounded_by_itself(values: np.ndarray) -> None:
    made = stored_entry(empty(), "k", values)
    found = entry_values({"k": made["k"], "k_scale": made["k_scale"]}, "k")
    scale = made["k_scale"].astype(np.float64)
    most = np.abs(values).max(axis=-1, keepdims=True)
    assert np.all(most <= 448 * scale)
    assert np.all((most > 224 * scale) | (most == 0) | (scale == 2.0**-127))
    # Half a step of the code: a sixteenth of the number, or half the least code.
    bound = np.maximum(np.abs(values) / 16, scale * 2.0**-10)
    assert np.all(np.abs(found - values) <= bound)
    # As its kernels read it: exact in 16 bits.
    fits = (np.abs(found) >= 2.0**-126) | (found == 0)
    wide = found.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(wide[fits], found[fits])
    alone = stored_entry(empty(), "k", values[1:2])
    assert np.array_equal(alone["k"].view(np.uint8), made["k"][1:2].view(np.uint8))


@given(NUMBERS)
def test_torch_writes_and_reads_the_same(values: np.ndarray) -> None:
    state = {name: to_torch(pages) for name, pages in empty().items()}
    write_entries(state, to_torch(values), to_torch(-values), torch.tensor([1, 6, 2]))
    for name, entries in (("k", values), ("v", -values)):
        for field, wanted in stored_entry(empty(), name, entries).items():
            pages = to_numpy(state[field], F8E4M3 if field == name else F8E8M0)
            flat = pages.reshape(-1, *pages.shape[2:])
            assert flat[[1, 6, 2]].tobytes() == wanted.tobytes()
    read = read_pages(state, "k", torch.tensor([1, 0]), torch.float32)
    made = stored_entry(empty(), "k", values)
    assert np.array_equal(read[[5, 2, 6]].numpy(), entry_values(made, "k"))


def test_what_is_not_finite_has_no_scale() -> None:
    with pytest.raises(TypeMismatch, match="not finite"):
        stored_entry(empty(), "k", np.full((1, 2, 8), np.nan, np.float32))
