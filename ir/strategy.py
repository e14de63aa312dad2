"""A strategy: what the search decided for one phase before the passes run."""

from dataclasses import asdict, dataclass, field
from typing import Any

from metainfer.ir.types import Mesh

# In the order in which a model goes through them; "call" is that of a module of another kind.
PHASES = ("prefill", "decode", "call")


@dataclass(frozen=True)
class Layout:
    """How ranks share a model: pipeline stages of replicas of tensor-parallel groups.

    Attributes:
        pp: stages; each holds a run of layers.
        dp: replicas; each has its own sequences.
        tp: ranks that share every layer of a replica.
        ep: ranks over which whole experts are spread: 1 (each expert is cut over tp), tp, dp, or
            dp * tp.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        """Print ``pp=2 tp=4``; axes of one rank are left out."""
        parts = [f"{n}={v}" for n, v in (*self._sizes, ("ep", self.ep)) if v > 1]
        return " ".join(parts) or "one rank"

    @property
    def _sizes(self) -> tuple[tuple[str, int], ...]:
        return (("pp", self.pp), ("dp", self.dp), ("tp", self.tp))

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.tp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one stage."""
        return self.dp * self.tp

    @property
    def mesh(self) -> Mesh:
        """Axes over the ranks of one stage: dp, then tp, those of one rank left out."""
        return Mesh(tuple((n, v) for n, v in self._sizes[1:] if v > 1))

    @property
    def experts(self) -> tuple[str, ...]:
        """Axes over which whole experts are spread."""
        if self.ep == 1:
            return ()
        if self.ep == self.dp * self.tp:
            return tuple(n for n, v in self._sizes[1:] if v > 1)
        return ("tp",) if self.ep == self.tp else ("dp",)


@dataclass(frozen=True)
class Strategy:
    """Decisions for one phase.

    Attributes:
        phase: "prefill", "decode", or "call" for a module that is no language model.
        mesh: axes over ranks, of pp, dp and tp, outermost first; empty for one.
        first_rank: rank of the machine where the stage's ranks begin.
        experts: axes over which whole experts are spread; each one's inner dim is cut over tp
            where tp is not among them.
        activations: element type between ops.
        fp8_activations: whether products of fp8 weights read them rounded to fp8 codes.
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
    first_rank: int = 0
    activations: str = "f32"
    fp8_activations: bool = False
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
