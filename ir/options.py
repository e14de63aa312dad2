"""What a user may ask for: one frozen record, no other flags."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from metainfer.ir.errors import MetainferError


class OptionError(MetainferError):
    """An option with a value that makes no sense."""


ACTIVATIONS = ("auto", "f32", "bf16", "fp8")
WEIGHTS = ("auto", "keep", "f32", "bf16", "int8", "int4", "fp8", "fp8-32x32", "mxfp4", "nvfp4")
KV = ("auto", "f32", "bf16", "fp8")
COMPRESSIONS = ("none", "fp8")


@dataclass(frozen=True)
class Options:
    """Options of a compilation.

    Attributes:
        activations: element type between ops; "auto" is what the device computes fastest; "fp8" is
            that, and products of fp8 weights read it rounded to fp8 codes (lossy).
        weights: "auto" keeps the checkpoint's format where the device has a kernel for it, and
            weighs fp8 and MXFP4 against conversions that lose nothing; "keep" insists; "f32" and
            "bf16" dequantize; "int8", "int4", "fp8", "fp8-32x32" (blocks of that size), "mxfp4" and
            "nvfp4" quantize linears and experts (lossy).
        exact: whether kernels may add no rounding of their own (int8 activations, say).
        kv: element type of cached keys and values; "fp8" rounds them to e4m3 codes with a scale for
            each token and head (lossy, half the memory of bf16).
        max_tokens: largest step of a prefill, in tokens (the chunk).
        max_sequences: largest number of sequences in a step.
        max_context: longest sequence in tokens; 0 is the model's own, as far as memory allows.
        page_size: tokens per page; 0 lets the layout pass choose.
        memory_fraction: part of the device's memory that a plan may use.
        tp: ranks that share every layer; 0 lets the compiler choose, as for the next three.
        dp: replicas, each with sequences of its own.
        pp: pipeline stages.
        ep: ranks over which whole experts are spread: 1, tp, dp or dp * tp.
        routing: file of a routing histogram by which experts are placed; "" for none.
        replicas: copies of experts beside the first of each, over all ranks of ep.
        overlap: whether communication may run beside computation, on streams of their own.
        micro_batches: parts that the rows of a step are cut into where that hides communication; 0
            lets the cost model choose, for steps that gain by it.
        compress_collectives: what sums over ranks may be sent as: "none" leaves numbers alone,
            "fp8" allows e4m3 codes with a scale for each 128 values (lossy).
        tuned: file of measured times; "" for the one beside the machine's file, "none" for none.
        strict: whether a generic fallback is an error.
        pins: (group, kernel) choices forced by the user; a group is an op name or fused kind.
        forbids: kernels never to be chosen.
        skip_passes: passes left out, for bisecting.
    """

    activations: str = "auto"
    weights: str = "auto"
    exact: bool = False
    kv: str = "auto"
    max_tokens: int = 512
    max_sequences: int = 8
    max_context: int = 0
    page_size: int = 0
    memory_fraction: float = 0.9
    tp: int = 0
    dp: int = 0
    pp: int = 0
    ep: int = 0
    routing: str = ""
    replicas: int = 0
    overlap: bool = True
    micro_batches: int = 0
    compress_collectives: str = "none"
    tuned: str = ""
    strict: bool = False
    pins: tuple[tuple[str, str], ...] = ()
    forbids: tuple[str, ...] = ()
    skip_passes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check every field.

        Raises: OptionError naming the field and its legal values.
        """
        known = (
            ("activations", ACTIVATIONS), ("weights", WEIGHTS), ("kv", KV),
            ("compress_collectives", COMPRESSIONS),
        )  # fmt: skip
        for name, legal in known:
            if getattr(self, name) not in legal:
                raise OptionError(
                    f"{name} = {getattr(self, name)!r} is not known",
                    advice=f"choose one of {', '.join(legal)}",
                )
        for name in ("max_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise OptionError(
                    f"{name} = {getattr(self, name)} must be at least 1", advice="give a larger one"
                )
        if self.max_sequences > self.max_tokens:
            raise OptionError(
                f"max_sequences = {self.max_sequences} is more than max_tokens = {self.max_tokens}",
                advice="a decode step holds one token of each sequence: raise max_tokens",
            )
        for name in (
            "max_context",
            "page_size",
            "tp",
            "dp",
            "pp",
            "ep",
            "replicas",
            "micro_batches",
        ):
            if getattr(self, name) < 0:
                raise OptionError(
                    f"{name} = {getattr(self, name)} is negative",
                    advice="leave it at 0 to let the compiler choose",
                )
        if not 0 < self.memory_fraction <= 1:
            raise OptionError(
                f"memory_fraction = {self.memory_fraction} is not in (0, 1]",
                advice="0.9 leaves a tenth of the device to others",
            )

    def kv_format(self, activations: str) -> str:
        """Format of cached keys and values: what is asked for, else the activations' type."""
        # Here and not above: options are read before anything that needs numpy.
        from metainfer.ir.entries import KV_FP8

        return {"auto": activations, "fp8": str(KV_FP8)}.get(self.kv, self.kv)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a plan."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Options":
        """Read plain data back.

        Raises: OptionError for an unknown field.
        """
        known = {f.name for f in fields(Options)}
        unknown = sorted(set(data) - known)
        if unknown:
            names = ", ".join(sorted(known))
            raise OptionError(f"unknown option {unknown[0]!r}", advice=f"known: {names}")
        frozen = {k: _frozen(v) for k, v in data.items()}
        return Options(**frozen)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value
