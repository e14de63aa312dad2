"""The oracle of shardings: what ranks compute on their parts, put together, beside the whole.

It runs the reference of an op on the parts that simulated ranks hold, joins the results as the
propagated sharding says, and compares. Imported by tests of sharding; holds no tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from op_samples import SAMPLES, Sample

from metainfer.ir.dtypes import BOOL
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.interpret import as_reference_input, concrete_attr
from metainfer.ir.ops import OPS, infer_types, op_def
from metainfer.ir.ops.record import COLLECTIVE, RAW
from metainfer.ir.shard_rule import parse_rule
from metainfer.ir.sharding import local_attrs, propagate
from metainfer.ir.types import PARTIAL, Mesh, Sharding, StateType, Type

ENV = {"T": 8, "B": 4, "P": 2}
# Values are spread over ranks in numpy, which block formats do not allow.
PLAIN = [
    s.at(ENV)
    for s in SAMPLES
    if s.operands
    and COLLECTIVE not in OPS[s.name].traits
    and all(isinstance(t, StateType) or not hasattr(t.dtype, "block") for t in s.types)
    and s.name not in ("quantize", "pack")
]
Placements = Mapping[str, int | str]


def placed(type_: Type, placements: Placements) -> Type:
    """A type with a sharding; of a state, that of every field."""
    sharding = Sharding.of(dict(placements))
    if isinstance(type_, StateType):
        fields = tuple((n, replace(t, sharding=sharding)) for n, t in type_.fields)
        return replace(type_, fields=fields)
    return replace(type_, sharding=sharding)


def parts_of(value: Any, placements: Placements, mesh: Mesh, rng: np.random.Generator) -> list[Any]:
    """What each rank holds, ranks in the mesh's order, the innermost axis last."""
    if isinstance(value, dict):
        # Fields of a state lie behind pages and slots.
        moved = {a: p + 2 if isinstance(p, int) else p for a, p in placements.items()}
        fields = {n: parts_of(v, moved, mesh, rng) for n, v in value.items()}
        return [{n: f[rank] for n, f in fields.items()} for rank in range(mesh.num_ranks)]
    parts = [np.asarray(value)]
    for axis, size in mesh.axes:
        place = placements.get(axis)
        parts = [p for part in parts for p in _split(part, place, size, rng)]
    return parts


def _split(part: Any, place: int | str | None, size: int, rng: np.random.Generator) -> list[Any]:
    if place is None:
        return [part] * size
    if isinstance(place, int):
        return list(np.split(part, size, axis=place))
    noise = [np.round(rng.standard_normal(part.shape) * 4).astype(part.dtype) for _ in range(size)]
    return [part - sum(noise[1:]), *noise[1:]]


def together(parts: Sequence[Any], placements: Placements, mesh: Mesh) -> Any:
    """The whole that ranks hold parts of; replicas must agree."""
    if isinstance(parts[0], dict):
        moved = {a: p + 2 if isinstance(p, int) else p for a, p in placements.items()}
        return {n: together([p[n] for p in parts], moved, mesh) for n in parts[0]}
    for axis, size in reversed(mesh.axes):
        place = placements.get(axis)
        groups = [parts[i : i + size] for i in range(0, len(parts), size)]
        parts = [_join(group, place) for group in groups]
    return parts[0]


def _join(group: Sequence[Any], place: int | str | None) -> Any:
    if isinstance(place, int):
        return np.concatenate(group, axis=place)
    if place == PARTIAL:
        return np.sum(group, axis=0, dtype=group[0].dtype)
    for other in group[1:]:
        # Partial sums were cut differently on each replica, so that they round differently.
        np.testing.assert_allclose(other, group[0], rtol=1e-5, atol=1e-4)
    return group[0]


def run(sample: Sample, data: Sequence[Any], attrs: Mapping[str, Any]) -> list[Any]:
    record = op_def(sample.name)
    inputs = [as_reference_input(d, raw=record.has(RAW)) for d in data]
    complete = {k: concrete_attr(v, {}) for k, v in record.complete(attrs).items()}
    with np.errstate(all="ignore"):
        made = record.reference(*inputs, **complete)
    return list(made) if isinstance(made, tuple) else [made]


def sharded_types(
    sample: Sample, choice: Sequence[Placements], mesh: Mesh
) -> tuple[Type, ...] | None:
    """Propagated result types, None where the rule (or divisibility) refuses."""
    operands = [placed(t, p) for t, p in zip(sample.types, choice, strict=True)]
    results = infer_types(sample.name, sample.types, sample.attrs)
    refused = None
    made: tuple[Type, ...] = ()
    try:
        # States come out as they went in.
        results = tuple(operands[0] if isinstance(r, StateType) else r for r in results)
        made = propagate(sample.name, operands, sample.attrs, results, mesh)
    except TypeMismatch as error:
        refused = error.what
    if refused is None:
        return made
    assert sample.name in refused or "divide" in refused or "cut blocks" in refused
    return None


def check_ranks(sample: Sample, choice: Sequence[Placements], mesh: Mesh, seed: int) -> bool:
    """Compare ranks with the whole; False where the sharding is refused."""
    made = sharded_types(sample, choice, mesh)
    if made is None:
        return False
    rng = np.random.default_rng(seed)
    data = sample.data(rng)
    spread = [parts_of(d, p, mesh, rng) for d, p in zip(data, choice, strict=True)]
    spread = with_local_rows(sample, spread, choice, mesh)
    attrs = local_attrs(sample.name, sample.attrs, made, mesh)
    per_rank = [run(sample, [s[rank] for s in spread], attrs) for rank in range(mesh.num_ranks)]
    wanted = run(sample, data, sample.attrs)
    for index, type_ in enumerate(made):
        placements = dict(_sharding_of(type_).axes)
        whole = together([results[index] for results in per_rank], placements, mesh)
        _compare(whole, wanted[index])
    return True


def with_local_rows(
    sample: Sample, spread: list[list[Any]], choice: Sequence[Placements], mesh: Mesh
) -> list[list[Any]]:
    """Row numbers as each rank counts them, where the dim that they count is sharded."""
    text = op_def(sample.name).shard_rule(sample.types, op_def(sample.name).complete(sample.attrs))
    rule = parse_rule(text) if text else None
    for operand, name in rule.index if rule else ():
        owner = next(
            i for i in range(len(spread))
            if i != operand and name in [d.name for d in rule.operand(i).dims]  # type: ignore[union-attr]
        )  # fmt: skip
        labels = rule.operand(owner).labels(np.ndim(spread[owner][0]))  # type: ignore[union-attr]
        place = [d.name for d in labels].index(name)
        count = spread[owner][0].shape[place]
        axes = [a for a, _ in mesh.axes if choice[owner].get(a) == place]
        for rank in range(mesh.num_ranks if axes else 0):
            local = spread[operand][rank] - count * _number_over(axes, mesh, rank)
            inside = (local >= 0) & (local < count)
            spread[operand][rank] = np.where(inside, local, -1).astype(local.dtype)
    return spread


def _number_over(axes: Sequence[str], mesh: Mesh, rank: int) -> int:
    """Number of a rank's part where these axes share a dim, the innermost axis last."""
    places = np.unravel_index(rank, [size for _, size in mesh.axes])
    number = 0
    for (axis, size), at in zip(mesh.axes, places, strict=True):
        number = number * size + int(at) if axis in axes else number
    return number


def _sharding_of(type_: Type) -> Sharding:
    return type_.fields[0][1].sharding if isinstance(type_, StateType) else type_.sharding


def _compare(whole: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            np.testing.assert_array_equal(whole[name], value)
        return
    scale = max(1.0, float(np.max(np.abs(np.asarray(wanted, np.float64)), initial=0.0)))
    np.testing.assert_allclose(whole, wanted, rtol=1e-5, atol=2e-5 * scale)


def options(type_: Type, axis: str) -> list[Placements]:
    """All placements of an operand over one axis."""
    if isinstance(type_, StateType):
        return [{}, *({axis: i} for i in range(type_.fields[0][1].rank))]
    pending: list[Placements] = [] if type_.dtype == BOOL else [{axis: PARTIAL}]
    return [{}, *pending, *({axis: i} for i in range(type_.rank))]
