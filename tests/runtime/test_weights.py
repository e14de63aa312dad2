"""Making weights: nothing is converted on the way, each is made once, threads share the work."""

import threading

import ml_dtypes
import numpy as np
import pytest
import torch

from metainfer.backends.registry import installed
from metainfer.ir.errors import CheckpointError
from metainfer.ir.flatten import flatten
from metainfer.ir.parser import parse_module
from metainfer.runtime.storage import Storage
from metainfer.runtime.weights import WeightStore

JOINED = """\
module f {
  dim T in [1, 8]
  load main {
    weights {
      @a : bf16[2,4]
      @b : bf16[4,4]
      @order : i32[6]
    }
    %0 = concat_rows(@a, @b) : bf16[6,4]
    %1 = take_rows(%0, @order) : bf16[6,4]
    %2 = repeat_rows(@b) {groups = 2, times = 2} : bf16[8,4]
    %3 = transpose(@b) {perm = (1, 0)} : bf16[4,4]
    return %1, %2, %3
  }
  main(%x: bf16[T,4]) {
    weights {
      @w : bf16[6,4]
      @v : bf16[8,4]
      @t : bf16[4,4]
    }
    return @w, @v, @t
  }
}
"""
ORDER = np.array([5, 0, 3, 3, 1, 2], np.int32)


def bits(first: int, rows: int) -> np.ndarray:
    """bf16 numbers of every kind, not-a-numbers with different payloads among them."""
    return (np.arange(rows * 4, dtype=np.uint16) * 4099 + first).reshape(rows, 4)


def test_rows_are_moved_bit_by_bit() -> None:
    module = parse_module(JOINED)
    a, b = bits(0x7F81, 2), bits(0x0001, 4)
    held = {"a": a.view(ml_dtypes.bfloat16), "b": b.view(ml_dtypes.bfloat16), "order": ORDER}
    store = WeightStore(held.__getitem__, installed())
    w, v, t = store.get_all([(module, weight) for weight in flatten(module).weights.values()])
    assert w.dtype == v.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(w.view(np.uint16), np.concatenate([a, b])[ORDER])
    np.testing.assert_array_equal(v.view(np.uint16), b[[0, 1, 0, 1, 2, 3, 2, 3]])
    np.testing.assert_array_equal(np.ascontiguousarray(t).view(np.uint16), b.T)


PLAIN = """\
module f {
  dim T in [1, 8]
  main(%x: f32[T,4]) {
    weights {
      @w : f32[4,4]
      @v : f32[4,4]
    }
    return @w, @v
  }
}
"""


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_two_phases_read_is_read_and_placed_once(device: str) -> None:
    storage = Storage(64, {}, torch.device("cpu"), 16, has_step=False)
    storage.device = torch.device(device)
    modules = [parse_module(PLAIN), parse_module(PLAIN)]
    read = list[str]()

    def provider(name: str) -> np.ndarray:
        read.append(name)
        return np.ones((4, 4), np.float32)

    store = WeightStore(provider, installed(), place=storage.place)
    wanted = [(m, w) for m in modules for w in flatten(m).weights.values()]
    first, second, again, other = store.get_all(wanted)
    assert first is again
    assert second is other
    assert first is not second
    assert sorted(read) == ["v", "w"]
    assert first.device.type == device


def test_weights_are_made_side_by_side() -> None:
    """Each waits for the other: one after the other they would wait in vain."""
    module = parse_module(PLAIN)
    both = threading.Barrier(2, timeout=20)

    def provider(name: str) -> np.ndarray:
        both.wait()
        return np.full((4, 4), ord(name), np.float32)

    store = WeightStore(provider, installed(), makers=2)
    made = store.get_all([(module, w) for w in flatten(module).weights.values()])
    assert [int(one[0, 0]) for one in made] == [ord("w"), ord("v")]


def test_a_missing_weight_stops_the_others() -> None:
    module = parse_module(PLAIN)
    asked = list[str]()

    def provider(name: str) -> np.ndarray:
        asked.append(name)
        raise CheckpointError(f"there is no {name}")

    wanted = [(module, w) for w in flatten(module).weights.values()]
    store = WeightStore(provider, installed(), makers=1)
    with pytest.raises(CheckpointError, match="there is no w"):
        store.get_all(wanted * 50)
    # At most what had been begun when the first one failed.
    assert len(asked) <= 2
