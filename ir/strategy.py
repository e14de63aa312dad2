"""A strategy: what the search decided for one phase before the passes run."""

from dataclasses import asdict, dataclass, field
from typing import Any

from metainfer.ir.types import Mesh

# In the order in which a model goes through them; "call" is that of a module of another kind.
PHASES = ("prefill", "decode", "call")


@dataclass(frozen=True)
class Strategy:
    """Decisions for one phase.

    Attributes:
        phase: "prefill", "decode", or "call" for a module that is no language model.
        mesh: axes over ranks, of pp, dp and tp, outermost first; empty for one.
        experts: axes over which whole experts are spread; each one's inner dim is cut over tp
            where tp is not among them.
        activations: element type between ops.
        weights: rule for the formats of weights, as in `Options.weights`.
        exact: whether kernels may add no rounding of their own.
        kv: element type of cached keys and values.
        max_tokens: largest step in tokens.
        max_sequences: largest number of sequences.
        max_context: longest sequence in tokens.
        page_size: tokens per page, 0 until chosen.
        typical: values of the size symbols that costs are compared at.
    """

    phase: str
    mesh: Mesh = field(default_factory=Mesh)
    experts: tuple[str, ...] = ()
    activations: str = "f32"
    weights: str = "auto"
    exact: bool = False
    kv: str = "f32"
    max_tokens: int = 512
    max_sequences: int = 8
    max_context: int = 2048
    page_size: int = 0
    typical: tuple[tuple[str, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a plan."""
        return asdict(self)
