"""Memory of a plan, term by term: weights, activations, scratch space, tables, pages.

The sum of all terms stays within the device; what weights and buffers leave becomes pages.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from metainfer.backends.registry import Backends
from metainfer.hardware.device import Device
from metainfer.ir.arena import plan_arena
from metainfer.ir.entries import is_latent
from metainfer.ir.errors import CapacityError
from metainfer.ir.flatten import FlatModule, Recipe, flatten, parts_of, recipe_of
from metainfer.ir.graph import Module
from metainfer.ir.ops.record import op_def
from metainfer.ir.options import Options
from metainfer.ir.types import StateType, TensorType
from metainfer.runtime.in_place import in_place
from metainfer.runtime.workspace import window_bytes, workspace_bytes


@dataclass(frozen=True)
class Term:
    """One term of the account.

    Units: bytes.
    """

    name: str
    bytes: int
    detail: str


@dataclass(frozen=True)
class Capacity:
    """What a plan holds.

    Attributes:
        terms: the account, in order; their sum is what the plan occupies.
        device_bytes: memory of the device.
        budget_bytes: what the plan may use of it.
        page_size: tokens per page, 0 without paged states.
        page_bytes: bytes of one page over all states.
        num_pages: physical pages, the null page included.
        max_context: longest sequence in tokens.
        max_sequences: sequences in a step.
        max_tokens: tokens in a step.
        full_sequences: sequences of max_context that fit at once.
    """

    terms: tuple[Term, ...]
    device_bytes: int
    budget_bytes: int
    page_size: int
    page_bytes: int
    num_pages: int
    max_context: int
    max_sequences: int
    max_tokens: int
    full_sequences: int

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return sum(t.bytes for t in self.terms)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a plan."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def plan_capacity(
    modules: Mapping[str, Module], device: Device, backends: Backends, options: Options,
    *, max_context: int, most_pages: int = 0,
) -> Capacity:  # fmt: skip
    """Account for every term and give the rest to pages.

    Args:
        modules: compiled module of each phase.
        device: the device of every rank.
        backends: for layouts and scratch space.
        options: fractions and limits.
        max_context: longest sequence that the model allows, in tokens.
        most_pages: pages that other stages can hold; 0 if that is no limit.

    Raises: CapacityError naming the bytes missing and the devices over which it would fit.
    """
    flats = {phase: flatten(m) for phase, m in modules.items()}
    terms = [
        _weights(modules, flats, backends),
        *_buffers(modules, flats, device, backends, max_context),
    ]
    budget = int(device.usable_bytes * options.memory_fraction)
    fixed = sum(t.bytes for t in terms)
    page_size, page_bytes = _pages(next(iter(flats.values())))
    context = options.max_context or 1
    # One sequence must fit, and the null page.
    needed = fixed + (-(-context // page_size) + 1) * page_bytes if page_size else fixed
    if needed > budget:
        raise _does_not_fit(terms, needed, budget, device, context=context if page_size else 0)
    if not page_size:
        return Capacity(
            tuple(terms), device.memory_bytes, budget, 0, 0, 0, 0, 0, options.max_tokens, 0
        )
    affordable = min((budget - fixed) // page_bytes, most_pages or sys.maxsize)
    wanted = -(-max_context // page_size)
    per_sequence = min(wanted, affordable - 1)
    num_pages = min(affordable, per_sequence * options.max_sequences + 1)
    context = min(max_context, per_sequence * page_size)
    detail = f"{num_pages} pages of {page_size} tokens, {page_bytes / page_size:,.0f} bytes a token"
    detail += _held_by_all(next(iter(modules.values())))
    if context < max_context:
        detail += f"; longest sequence cut from {max_context:,} to {context:,} tokens"
    terms.append(Term("kv pages", num_pages * page_bytes, detail))
    return Capacity(
        tuple(terms), device.memory_bytes, budget, page_size, page_bytes, num_pages, context,
        options.max_sequences, options.max_tokens, (num_pages - 1) // per_sequence,
    )  # fmt: skip


def _weights(
    modules: Mapping[str, Module], flats: Mapping[str, FlatModule], backends: Backends
) -> Term:
    sizes: dict[Recipe, int] = {}
    for phase, module in modules.items():
        sizes |= _resident(module, flats[phase], backends)
    detail = f"{len(sizes)} tensors, packed"
    if len(modules) > 1:
        detail += "; phases share equal ones"
    copies = _copies(sizes)
    if copies:
        detail += f"; {copies:,} bytes of it second copies, packed otherwise"
    return Term("weights", sum(sizes.values()), detail)


def _resident(module: Module, flat: FlatModule, backends: Backends) -> dict[Recipe, int]:
    """Bytes of each resident weight, by how it is made."""
    types = {v.name: v.tensor for item in flat.ops for v in item.op.operands if v.is_weight}
    return {
        recipe_of(module, weight): resident_bytes(types[name], backends)
        for name, weight in flat.weights.items()
        if name in types
    }


def _copies(sizes: Mapping[Recipe, int]) -> int:
    """Bytes of weights all of whose parts are held in another packing already."""
    held: set[Recipe] = set()
    copies = 0
    for recipe, size in sorted(sizes.items(), key=lambda item: -item[1]):
        parts = parts_of(recipe)
        copies += size if parts <= held else 0
        held |= parts
    return copies


def resident_bytes(type_: TensorType, backends: Backends) -> int:
    """Bytes of a weight as it lies in memory."""
    if type_.layout:
        return backends.layouts.get(type_.layout).num_bytes(type_)
    return type_.bytes_at({})


def _buffers(
    modules: Mapping[str, Module], flats: Mapping[str, FlatModule], device: Device,
    backends: Backends, max_context: int,
) -> list[Term]:  # fmt: skip
    sizes, scratch, placed = {}, {}, {}
    for phase, module in modules.items():
        space = workspace_bytes(module, flats[phase], device, backends)
        over = in_place(flats[phase], backends)
        arena = plan_arena(flats[phase], module.limits(), space, over)
        sizes[phase], placed[phase] = arena.workspace_offset, len(over)
        scratch[phase] = arena.size - arena.workspace_offset
    largest = max(sizes, key=lambda p: sizes[p])
    tables = max(rope_table_bytes(flats[p], max_context, backends) for p in modules)
    detail = f"largest step of {largest}, packed by lifetime"
    if placed[largest]:
        detail += f"; {placed[largest]} results in the place of an operand"
    terms = [
        Term("activations", max(sizes.values()), detail),
        Term("scratch", max(scratch.values()), "workspace of kernels"),
    ]
    shared = window_bytes(modules.values(), device, backends)
    if shared:
        terms.append(
            Term("windows", shared, "memory that peers write to or read, by axis and size")
        )
    if tables:
        terms.append(Term("rope tables", tables, "cosines and sines of every position"))
    return terms


def rope_table_bytes(flat: FlatModule, positions: int, backends: Backends) -> int:
    """Bytes of the cosine and sine tables that the CPU and Triton kernels read."""
    seen: dict[tuple[Any, ...], int] = {}
    for item in flat.ops:
        backend = {backends.kernels.get(c.kernel).backend for c in item.op.choices}
        if not backend & {"cpu", "triton"}:
            continue
        bodies = item.op.body.ops if item.op.body is not None else (item.op,)
        for op in bodies:
            if op.name == "rope":
                attrs = op_def("rope").complete(op.attr)
                width = int(attrs["width"]) or op.operands[0].tensor.shape[-1].static  # type: ignore[arg-type]
                seen[tuple(sorted(attrs.items())), width] = 4 * width * positions
    return sum(seen.values())


def _pages(flat: FlatModule) -> tuple[int, int]:
    """(tokens per page, bytes of a page over all states)."""
    states = [v.type for v in flat.states.values()]
    paged = [s for s in states if isinstance(s, StateType) and s.kind == "pages"]
    if not paged:
        return 0, 0
    page = paged[0].page_size
    return page, sum(s.entry_bytes() for s in paged) * page


def _held_by_all(module: Module) -> str:
    """How many ranks hold the same entries, if more than one does so by design."""
    ranks = dict(module.mesh.axes).get("tp", 1)
    latent = any(is_latent(s.state) for g in module.graphs for s in g.states)
    return f", the same on {ranks} ranks" if latent and ranks > 1 else ""


def _does_not_fit(
    terms: Sequence[Term], needed: int, budget: int, device: Device, context: int = 0
) -> CapacityError:
    lines = [f"{t.name:<12} {t.bytes / 2**30:9.2f} GiB  {t.detail}" for t in terms]
    if context:
        lines.append(f"{'kv pages':<12} for one sequence of {context} tokens")
    missing = needed - budget
    devices = -(-needed // budget)
    return CapacityError(
        f"the model does not fit on {device.name}: {missing:,} bytes missing "
        f"({needed / 2**30:.2f} GiB needed, {budget / 2**30:.2f} GiB there)",
        text="\n".join(lines),
        advice=f"it would fit over {devices} such devices, or with narrower weights "
        "(--weights int4), a smaller step (--max-tokens) or a shorter --max-context",
    )
