"""Records of attention over latents: the forms of paged attention, by tiles of their own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from metainfer.backends.kernel import (
    Constraint,
    Efficiency,
    Kernel,
    Query,
    Registry,
    device_kind,
    dtype,
    feature,
)
from metainfer.backends.layout import LayoutRegistry
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.torch.constraints import state_like
from metainfer.backends.triton.attention import (
    LATENT,
    LATENT_LONG,
    LATENT_TILE,
    LATENT_WIDE,
    LATENT_WIDE_PREFILL,
    SMALLEST_LATENT,
    Tile,
    heads_of_tile,
    of_latent_call,
    prefill,
    split,
    split_pieces,
)
from metainfer.backends.triton.fits import fits
from metainfer.backends.triton.launch import Launch, TritonBinder
from metainfer.backends.triton.records_attention import (
    BF16_STEP,
    attr_not_negative,
    once_paged,
    page_is_power,
    state_is_plain,
)
from metainfer.backends.triton.scratch import scratch_bytes
from metainfer.hardware.device import Device
from metainfer.ir.entries import LATENT as FIELD
from metainfer.ir.entries import ROTARY
from metainfer.ir.graph import Op

_STATE = 2  # operand
# H200, 16 sequences of 8,192 tokens, 128 heads, against 695 TFLOP/s of a plain product: 78 and 84
# TFLOP/s by tiles of 16 and 32 rows, 238 and 250 by tiles of 64 in two runs (1.0 TB/s of latents,
# each read by several tiles); prefill of 4 prompts of 2,048 tokens 247. One sequence of 8,192 by
# tiles of 32 rows took 41.6 us as scores are shared out now, 38.0 before.
_SOURCE = "H200, benchmarks/gpu/latents.py, 2026-11-30"
SMALL = Efficiency(0.5, 0.12, source=f"{_SOURCE}, commit 3b4473c; memory, prefill assumed")
WIDE = Efficiency(0.5, 0.35, source=f"{_SOURCE}; memory assumed")


def _shared_out(memory: float, compute: float, us: float, flops: int) -> Efficiency:
    """Of a split form: 16 heads show what it reaches of memory's speed, 128 of the arithmetic's."""
    heads = f"16 heads {us} us; 128 heads {flops} TFLOP/s"
    return Efficiency(memory, compute, source=f"{_SOURCE}, 16 sequences of 8,192 tokens, {heads}")


# Of a block of codes by the small tile of 32 rows: of 32 keys its threads spill 592 to 1,080 bytes
# where they are widened (sm_90 and sm_120, Triton 3.7), of 16 none.
_CODED_KEYS = 16


@dataclass(frozen=True)
class _Form:
    """One way to launch it.

    Attributes:
        name: of the kernel, behind "triton.latent_attention_".
        tile: rows at most, keys and warps.
        is_split: whether keys are shared out over programs, for few new tokens.
        efficiency: as measured.
        requires: what it wants beside what all forms do.
    """

    name: str
    tile: Tile
    is_split: bool
    efficiency: Efficiency
    requires: tuple[Constraint, ...] = ()

    def launches(self, call: TorchCall) -> list[Launch]:
        """What one call launches."""
        made, tile = of_latent_call(call), self.tile
        if made.k_scales is not None and tile == LATENT_TILE:
            tile = replace(tile, keys=_CODED_KEYS)
        return split(made, tile) if self.is_split else prefill(made, tile)


def register_latent_attention(kernels: Registry, layouts: LayoutRegistry) -> None:
    """Add the forms: for many new tokens and for few, each by small tiles and by those of wgmma."""
    narrow, wgmma = replace(LATENT_TILE, rows=16, per_sm=2), (feature("wgmma"),)
    # Codes of long blocks were not timed, and spill.
    plain = (state_is_plain(_STATE),)
    for form in (
        _Form("prefill", LATENT_TILE, False, SMALL),
        _Form("prefill_wide", LATENT_WIDE_PREFILL, False, WIDE, wgmma),
        _Form("split16", narrow, True, _shared_out(0.33, 0.12, 107.4, 75)),
        _Form("split32", LATENT_TILE, True, _shared_out(0.26, 0.12, 134.3, 79)),
        # Of the arithmetic no more than those beside it, which 128 heads take on other cards.
        _Form("split16_long", LATENT_LONG, True, _shared_out(0.49, 0.12, 70.9, 100), plain),
        _Form("split_wide", LATENT_WIDE, True, _shared_out(0.41, 0.35, 84.6, 258), wgmma),
    ):
        kernels.add(_kernel(form, layouts))


def _kernel(form: _Form, layouts: LayoutRegistry) -> Kernel:
    made = Kernel(
        f"triton.latent_attention_{form.name}",
        "latent_attention",
        "triton",
        requires=(
            device_kind("gpu"),
            feature("triton"),
            dtype(0, "bf16", "f16"),
            state_like(_STATE, 0),
            latent_widths(),
            page_is_power(_STATE),
            attr_not_negative("scale"),
            *form.requires,
        ),
        efficiency=form.efficiency,
        launches=2 if form.is_split else 1,
        error=BF16_STEP,
        effort=_effort_of(form),
        fits=once_paged(fits(form.launches, {}, layouts)),
        binder=TritonBinder(form.launches),
    )
    return replace(made, workspace=_workspace_of(form.tile)) if form.is_split else made


def latent_widths() -> Constraint:
    """Latents are a power of two wide, rotary keys a multiple of 8."""

    def check(query: Query) -> str | None:
        state = query.op.operands[_STATE].state
        rank, rope = (state.field_type(name).shape[-1].static for name in (FIELD, ROTARY))
        fine = SMALLEST_LATENT <= rank <= LATENT and rank & (rank - 1) == 0 and rope % 8 == 0
        return None if fine and rope <= LATENT else f"{rank} and {rope}"

    text = f"latents of a power of two from {SMALLEST_LATENT} to {LATENT}, rotary keys % 8 == 0"
    return Constraint(text, check)


def _effort_of(form: _Form) -> Callable[[Op, Device, Mapping[str, int]], float]:
    def effort(op: Op, device: Device, env: Mapping[str, int]) -> float:
        """Rows of tiles over real rows, and idle multiprocessors where tiles are few."""
        heads = op.operands[0].tensor.shape[1].static
        tokens, sequences = op.operands[0].tensor.shape[0].evaluate(env), env.get("B", 1)
        held = heads_of_tile(heads, form.tile.rows)
        new = -(-tokens // max(sequences, 1))
        tiles = sequences * -(-new // (form.tile.rows // held)) * (heads // held)
        padded = max(tiles * form.tile.rows / (tokens * heads), 1.0)
        if form.is_split:
            return padded
        return padded * max(1.0, form.tile.per_sm * device.num_sms / tiles)

    return effort


def _workspace_of(tile: Tile) -> Callable[[Query], int]:
    def workspace(query: Query) -> int:
        width = query.op.operands[0].tensor.shape[-1].static
        programs = tile.per_sm * query.device.num_sms
        return scratch_bytes(split_pieces(programs, tile.rows, width))

    return workspace
