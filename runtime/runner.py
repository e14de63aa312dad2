"""What the engine needs of whatever executes a plan."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from metainfer.backends.triton.sampling import Draw


class StepRunner(Protocol):
    """Executes steps of a language model and keeps its paged states.

    Attributes:
        max_tokens: largest step of the prefill phase.
        max_sequences: largest number of sequences in a step.
        max_context: longest sequence, in tokens of its state.
        page_size: tokens per page.
        num_pages: physical pages; page 0 is the null page, where padded rows write.
        vocab_size: columns of the logits.
        plan_hash: of the plan that is executed.
    """

    max_tokens: int
    max_sequences: int
    max_context: int
    page_size: int
    num_pages: int
    vocab_size: int
    plan_hash: str

    def run(self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        """Execute one step; the logits are valid until the next one.

        Args:
            phase: "prefill" or "decode".
            tokens: ids of the step's tokens.
            step: fields of `metainfer.ir.step`, int32.

        Shapes: tokens int32 [T] -> logits float32 [R, V].
        """
        ...


class Chosen(Protocol):
    """Tokens that a step chooses, on their way to the host."""

    def wait(self) -> None:
        """Wait until the step is done."""
        ...

    def ids(self) -> np.ndarray:
        """The tokens of the sampled rows; waits for them. Shapes: int64 [R].

        Raises: MetainferError if a row's logits are not finite.
        """
        ...


@runtime_checkable
class SamplingRunner(StepRunner, Protocol):
    """A step runner that can choose tokens where the logits lie, a step ahead of who reads them.

    Attributes:
        samples_on_device: whether it does.
    """

    samples_on_device: bool

    def start_sampled(
        self,
        phase: str,
        tokens: np.ndarray,
        step: Mapping[str, np.ndarray],
        draws: Sequence[Draw],
        names: Sequence[str],
        sources: np.ndarray | None = None,
    ) -> Chosen:
        """Start one step that chooses a token for each sampled row; at most two are on their way.

        Args:
            phase: as `run`.
            tokens: as `run`; not read where sources are given.
            step: as `run`.
            draws: how each row's token is drawn.
            names: of the sequences, for messages; may be fewer than the rows.
            sources: rows of the step in front: what each of them chooses is a token of this one.

        Shapes: tokens and sources int32 [T].
        """
        ...


@runtime_checkable
class ReplicaRunner(StepRunner, Protocol):
    """A step runner of several replicas, each with states of its own.

    Attributes:
        num_replicas: how many; limits and pages are those of one.
    """

    num_replicas: int

    def run_together(
        self, phase: str, steps: Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]] | None]
    ) -> list[np.ndarray]:
        """Execute one step on every replica; None lets one idle. Shapes: as `run` for each."""
        ...
