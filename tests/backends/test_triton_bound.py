"""Launches that are run again: by the compiled form and addresses, without Triton's lookup."""

from types import SimpleNamespace
from typing import Any

import torch

from metainfer.backends.triton.launch import Bound, Launch


class Compiled:
    """What Triton returns: launched by a grid of three and all parameters."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launched.append((grid, *arguments))


def function(compiled: Compiled | None) -> tuple[Any, list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []

    class Function(SimpleNamespace):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **given: (found.append({"grid": grid, **given}), compiled)[1]

    return Function(arg_names=["x", "parts", "rows", "STEP", "EARLY"], __name__="f"), found


def test_the_compiled_form_is_launched_from_the_second_time_on() -> None:
    compiled, x, parts = Compiled(), torch.zeros(4), (torch.ones(2), torch.ones(3))
    f, looked_up = function(compiled)
    launch = Launch(f, (7, 2), {"rows": 5, "x": x, "parts": parts}, {"STEP": "s"}, num_warps=8)
    bound = Bound(launch)
    for _ in range(3):
        bound()
    (first,) = looked_up
    assert (first["grid"], first["num_warps"], first["EARLY"]) == ((7, 2), 8, False)
    again = ((7, 2, 1), x.data_ptr(), tuple(p.data_ptr() for p in parts), 5, "s", False)
    assert compiled.launched == [again, again]


def test_what_is_not_compiled_is_interpreted_every_time() -> None:
    f, looked_up = function(None)
    bound = Bound(Launch(f, (1,), {"x": torch.zeros(1), "parts": (), "rows": 1}, {"STEP": "s"}))
    bound()
    bound()
    assert len(looked_up) == 2
