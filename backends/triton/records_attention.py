"""Records of the forms of paged attention; the cost of each says which sizes it is for."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Query,
    Registry,
    attr_is,
    device_kind,
    dtype,
    feature,
)
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.constraints import state_like
from metainfer.backends.triton.attention import (
    PAGED_TILE,
    PER_SM,
    SMALLEST_PAGE,
    WIDEST_HEAD,
    of_call,
    prefill,
    split,
    split_pieces,
    split_rows,
)
from metainfer.backends.triton.attention_warpgroups import ROWS, STAGES, warpgroups
from metainfer.backends.triton.fits import fits
from metainfer.backends.triton.launch import Launch, TritonBinder
from metainfer.backends.triton.scratch import scratch_bytes
from metainfer.hardware.device import Device
from metainfer.ir.entries import is_rounded
from metainfer.ir.graph import Op
from metainfer.ir.types import StateType

BF16_STEP = 2.0**-8
_MOST_ROWS = 64  # of a tile of the split form
_PREFILL_ROWS = 128
_WIDEST_PAGED = 128  # numbers of a head
_NARROW = 518 / 340

# H200, 8 prompts of 2,048 tokens, 32 heads of 128 and 8 key heads, against 686 TFLOP/s of a plain
# product: 296 TFLOP/s over pages of 16, 402 over pages of 64 by smaller tiles. Memory is assumed.
PREFILL = Efficiency(
    0.5, 0.44, source="H200, benchmarks/gpu/attention.py, 2026-11-30; memory assumed"
)  # fmt: skip
PAGED = Efficiency(
    0.5, 0.59, source="H200, benchmarks/gpu/attention.py, 2026-11-30; memory assumed"
)  # fmt: skip
# The same by warpgroups: 518 TFLOP/s over pages of 64, 340 of heads of 64. Pages of 16 go, too, at
# 487: asking for larger ones has the plan's pages raised.
WARPGROUPS = Efficiency(
    0.5, 0.75, source="H200, benchmarks/gpu/attention.py, torch 2.11, triton 3.6, 2026-11-30; "
    "memory assumed",
)  # fmt: skip
# H200, 64 sequences of 1,024 tokens: 68.0 us in two launches, 62.0 by the bandwidth.
SPLIT = Efficiency(
    0.91, 0.25, source="H200, kernels of a decode step, 2026-11-30; compute assumed"
)  # fmt: skip


def register_attention(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Add the forms: three for many new tokens, by what cards and pages allow, one for few."""
    kernels.add(_kernel("prefill", PREFILL, _prefill, layouts, launches=1, effort=_prefill_effort))
    kernels.add(
        _kernel(
            "prefill_paged", PAGED, _prefill_paged, layouts, launches=1, effort=_paged_effort,
            requires=(
                feature("wgmma"),
                head_widths(1, _WIDEST_PAGED),
                page_is_power(1, PAGED_TILE.keys),
                state_is_plain(1),
            ),
        )
    )  # fmt: skip
    kernels.add(
        _kernel(
            "warpgroups", WARPGROUPS, _warpgroups, layouts, launches=1, effort=_warpgroups_effort,
            requires=(
                feature("wgmma"),
                widths_are(1),
                page_is_power(1, PAGED_TILE.keys),
                state_is_plain(1),
                attr_is("window", 0),
                attr_is("softcap", 0.0),
            ),
        )
    )  # fmt: skip
    kernels.add(
        replace(
            _kernel("split", SPLIT, _split, layouts, launches=2, effort=_split_effort),
            workspace=_split_workspace,
        )
    )


def _prefill(call: TorchCall) -> list[Launch]:
    return prefill(of_call(call))


def _prefill_paged(call: TorchCall) -> list[Launch]:
    return prefill(of_call(call), PAGED_TILE)


def _warpgroups(call: TorchCall) -> list[Launch]:
    return warpgroups(of_call(call))


def _split(call: TorchCall) -> list[Launch]:
    return split(of_call(call))


def _kernel(
    form: str,
    efficiency: Efficiency,
    launches_of: Callable[[TorchCall], list[Launch]],
    layouts: LayoutRegistry,
    launches: int,
    effort: Callable[[Op, Device, Mapping[str, int]], float],
    requires: tuple[Constraint, ...] = (),
) -> Kernel:
    return Kernel(
        f"triton.attention_{form}",
        "attention",
        "triton",
        requires=(
            device_kind("gpu"),
            feature("triton"),
            dtype(0, "bf16", "f16"),
            state_like(1, 0),
            head_widths(1),
            page_is_power(1),
            attr_not_negative("scale"),
            *requires,
        ),
        efficiency=efficiency,
        launches=launches,
        error=BF16_STEP,
        effort=effort,
        fits=once_paged(fits(launches_of, {}, layouts)),
        binder=TritonBinder(launches_of),
    )


# --- what they require -------------------------------------------------------------------------


def head_widths(state_operand: int, widest: int = WIDEST_HEAD) -> Constraint:
    """Keys and values are multiples of 8 wide, up to a limit."""

    def check(query: Query) -> str | None:
        state = query.op.operands[state_operand].state
        widths = [state.field_type(name).shape[-1].static for name in ("k", "v")]
        fits_all = all(w <= widest and w % 8 == 0 for w in widths)
        return None if fits_all else " and ".join(map(str, widths))

    return Constraint(f"key and value width <= {widest}, % 8 == 0", check)


def page_is_power(state_operand: int, smallest: int = SMALLEST_PAGE) -> Constraint:
    """The state's page size is a power of two that is large enough; 0 is still open."""

    def check(query: Query) -> str | None:
        size = query.op.operands[state_operand].state.page_size
        fine = size == 0 or (size >= smallest and size & (size - 1) == 0)
        return None if fine else f"{size}"

    return Constraint(f"page size is a power of two >= {smallest}", check)


def state_is_plain(state_operand: int) -> Constraint:
    """Keys and values are plain numbers, no codes that are widened first."""

    def check(query: Query) -> str | None:
        state = query.op.operands[state_operand].state
        return "codes" if is_rounded(state) else None

    return Constraint("keys and values are plain numbers", check)


def widths_are(state_operand: int) -> Constraint:
    """Keys and values are of one width, one of those that warpgroups take."""

    def check(query: Query) -> str | None:
        state = query.op.operands[state_operand].state
        widths = [state.field_type(name).shape[-1].static for name in ("k", "v")]
        fine = widths[0] == widths[1] and widths[0] in STAGES
        return None if fine else " and ".join(map(str, widths))

    return Constraint(f"keys and values both {' or '.join(map(str, STAGES))} wide", check)


def attr_not_negative(name: str) -> Constraint:
    """An attribute is no negative number."""

    def check(query: Query) -> str | None:
        found = query.op.attr.get(name, 0.0)
        return None if isinstance(found, int | float) and found >= 0 else f"{found}"

    return Constraint(f"{name} >= 0", check)


def once_paged(constraint: Constraint) -> Constraint:
    """Ask only when the page size is known: the code depends on it."""

    def check(query: Query) -> str | None:
        states = [v.type for v in query.op.operands if isinstance(v.type, StateType)]
        return constraint.check(query) if all(s.page_size for s in states) else None

    return Constraint(constraint.text, check)


# --- what they cost beyond the op's own work -----------------------------------------------------


def _heads(op: Op) -> tuple[int, int]:
    """Query heads, and how many of them share a key head."""
    heads = op.operands[0].tensor.shape[1].static
    return heads, heads // op.operands[1].state.field_type("k").shape[0].static


def _prefill_effort(op: Op, device: Device, env: Mapping[str, int]) -> float:
    return _effort_of(op, device, env, _PREFILL_ROWS, 1)


def _paged_effort(op: Op, device: Device, env: Mapping[str, int]) -> float:
    return _effort_of(op, device, env, PAGED_TILE.rows, PAGED_TILE.per_sm)


def _warpgroups_effort(op: Op, device: Device, env: Mapping[str, int]) -> float:
    # Narrow heads wait for exponents: 340 TFLOP/s for 518.
    width = op.operands[0].tensor.shape[2].static
    return _effort_of(op, device, env, ROWS, 1) * (_NARROW if width < _WIDEST_PAGED else 1.0)


def _effort_of(
    op: Op, device: Device, env: Mapping[str, int], rows: int, per_sm: int
) -> float:  # fmt: skip
    """Rows of tiles over real rows, and what runs at once over tiles where there are too few."""
    heads, group = _heads(op)
    tokens = op.operands[0].tensor.shape[0].evaluate(env)
    tiles = tokens * group // rows + env.get("B", 1)
    programs = tiles * (heads // group)
    return tiles * rows / (tokens * group) * max(1.0, per_sm * device.num_sms / programs)


def _split_effort(op: Op, device: Device, env: Mapping[str, int]) -> float:
    """Rows of tiles over real rows; all tiles of a sequence read all of its keys."""
    _, group = _heads(op)
    tokens, sequences = op.operands[0].tensor.shape[0].evaluate(env), env.get("B", 1)
    rows = split_rows(group, tokens, sequences)
    tiles = tokens * group // rows + sequences
    return tiles * rows / (tokens * group)


def _split_workspace(query: Query) -> int:
    width = query.op.operands[1].state.field_type("v").shape[-1].static
    return scratch_bytes(split_pieces(PER_SM * query.device.num_sms, _MOST_ROWS, width))
