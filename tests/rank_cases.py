"""Collectives that ranks are tried on. Imported by tests; holds no tests."""

from typing import Any

from metainfer.backends.ranks.algorithms import ALGORITHMS, COMPRESSED

DTYPES = ("f32", "bf16", "f16", "i32")


def cases(world: int) -> list[tuple[str, str, tuple[int, ...], str, dict[str, Any]]]:
    """Every algorithm, with sizes of a dim that ranks divide, beside others that nothing does."""
    found = []
    for name, algorithms in ALGORITHMS.items():
        attrs: dict[str, Any] = {"all_reduce": {}, "all_to_all": {"source": 1, "target": 0}}.get(
            name, {"dim": 0}
        )
        for algorithm in algorithms:
            if algorithm == "islands" and world < 4:
                continue
            for dtype in DTYPES[: 2 if algorithm == COMPRESSED else 4]:
                shapes = ((2 * world, 257), (world, 5, 7))
                found += [(algorithm, name, shape, dtype, attrs) for shape in shapes]
    # Nothing divides these: all-reduces pad their parts.
    for algorithm in ALGORITHMS["all_reduce"]:
        if algorithm != "islands" or world >= 4:
            shapes = ((1,), (3, 5), (1001,))
            found += [(algorithm, "all_reduce", shape, "bf16", {}) for shape in shapes]
    for algorithm in ALGORITHMS["all_gather"]:
        found += [(algorithm, "all_gather", (3, 5), "bf16", {"dim": 1})]
    for algorithm in ALGORITHMS["reduce_scatter"]:
        found += [(algorithm, "reduce_scatter", (3, 2 * world), "bf16", {"dim": 1})]
    for algorithm in ALGORITHMS["all_to_all"]:
        found += [(algorithm, "all_to_all", (3, world), "i32", {"source": 0, "target": 1})]
    return found
