"""Sizes and switches of a mixture of experts."""

from dataclasses import dataclass, replace

from metainfer.ir.errors import TypeMismatch, Unsupported

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of a layer's MLP.

    Attributes:
        num: experts of a layer.
        chosen: experts that the router sends each token to.
        intermediate: inner width of one expert.
        renormalise: whether the chosen experts' shares are scaled to sum to 1.
        layers: whether each layer has experts, or an MLP; () means experts in every layer.
        shared: inner width of an expert that every token goes through; 0 if there is none.
        shared_gate: whether that one is behind a gate of its own.
        scores: what the router makes of its logits: shares by one "softmax", or a "sigmoid" of
            each, to which a correction is added while experts are chosen.
        groups: equal groups of experts.
        chosen_groups: groups that a token's experts are taken from, the best ones.
        scaling: multiplies the shares.

    Raises: TypeMismatch if the sizes do not fit together.
    """

    num: int
    chosen: int
    intermediate: int
    renormalise: bool = True
    layers: tuple[bool, ...] = ()
    shared: int = 0
    shared_gate: bool = True
    scores: str = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    scaling: float = 1.0

    def __post_init__(self) -> None:
        """Check that the sizes fit together."""
        if self.shared < 0:
            raise TypeMismatch(f"a shared expert of width {self.shared}")
        if min(self.num, self.chosen, self.intermediate) < 1 or self.chosen > self.num:
            raise TypeMismatch(
                f"{self.chosen} of {self.num} experts of width {self.intermediate} for each token"
            )
        if self.scores not in SCORES:
            raise Unsupported(
                f"a router with scores {self.scores!r}", advice=f"known: {', '.join(SCORES)}"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        if self.num % self.groups or not 1 <= self.chosen_groups <= self.groups:
            raise TypeMismatch(
                f"{self.chosen_groups} of {self.groups} groups of {self.num} experts"
            )
        if self.chosen > self.num // self.groups * self.chosen_groups:
            raise TypeMismatch(
                f"{self.chosen} experts of {self.chosen_groups} groups of {self.num // self.groups}"
            )

    def tiny(self) -> "ExpertsConfig":
        """The form for a two-layer decoder; a dense layer stays if there was one."""
        mixed, grouped = len(set(self.layers)) == 2, self.groups > 1
        return replace(
            self, num=8 if grouped else min(self.num, 8), chosen=min(self.chosen, 2),
            intermediate=32, layers=(False, True) if mixed else self.layers[:2],
            shared=min(self.shared, 48), groups=4 if grouped else 1,
            chosen_groups=min(self.chosen_groups, 2),
        )  # fmt: skip
