"""Two plans on one text: how far their distributions differ, and how well each predicts the text.

Both models are given the same tokens whatever they would have answered themselves. Three walks go
through different kernels: prefill in the largest steps, prefill in steps whose every row is
sampled, and decode of several sequences at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from metainfer.runtime.runner import StepRunner

# A short text of our own, for models that bring no better one.
DEFAULT_TEXT = """\
The lighthouse stood at the end of a long spit of sand, and in winter the sea came over the road
twice a day. Whoever kept the lamp had to plan around the tides: bread on Monday, oil on Thursday,
letters when the weather allowed. Anna had kept it for eleven years. She liked the work because it
was exact. The lamp turned once in thirty seconds, no more and no less, and ships forty miles out
set their course by it.

One evening in March a boat came in without lights. She counted three people on deck, and a dog.
"You are late," she called down. "We are early," the oldest of them answered, "but for tomorrow."
That was how she learned that the harbour had changed its clocks, and that nobody had told her.

She made tea, wrote the new time on the wall beside the old one, and drew a line between the two.
Then she checked her sums: 24 hours make 2,880 turns of the lamp; an hour lost is 120 turns. The
question was who would count them. In the end she decided that the sea would, as it always had.
"""

_REPEATS = 2  # of a large step, each for other rows


@dataclass(frozen=True)
class Step:
    """One step of a walk, for any page size.

    Attributes:
        phase: "prefill" or "decode".
        sequences: (number of the sequence, first position, tokens).
        rows: rows of the step to sample.
        targets: the token that really follows each row, -1 where none does.
    """

    phase: str
    sequences: tuple[tuple[int, int, tuple[int, ...]], ...]
    rows: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def tokens(self) -> np.ndarray:
        """Shapes: -> int32 [T]."""
        return np.array([t for _, _, tokens in self.sequences for t in tokens], np.int32)

    def record(self, page_size: int, most_pages: int) -> dict[str, np.ndarray]:
        """The step's record, as `ir.step`; each sequence owns ``most_pages`` pages in a row."""
        counts = [len(tokens) for _, _, tokens in self.sequences]
        ends = [first + len(tokens) for _, first, tokens in self.sequences]
        starts = np.cumsum([0, *counts])
        pages = np.zeros((len(counts), -(-max(ends) // page_size)), np.int32)
        positions, slots = [], []
        for row, (number, first, tokens) in enumerate(self.sequences):
            begin = 1 + number * most_pages  # page 0 is the null page
            used = -(-ends[row] // page_size)
            pages[row, :used] = np.arange(begin, begin + used)
            at = np.arange(first, first + len(tokens))
            positions.append(at)
            slots.append((begin + at // page_size) * page_size + at % page_size)
        found = {
            "positions": np.concatenate(positions), "slots": np.concatenate(slots),
            "starts": starts, "lengths": ends, "sample_rows": self.rows,
            "num_valid": (starts[-1], len(counts)),
        }  # fmt: skip
        return {**{k: np.asarray(v, np.int32) for k, v in found.items()}, "pages": pages}


def prefill_walk(
    tokens: Sequence[int], chunk: int, most_rows: int, repeats: int = 1
) -> Iterator[Step]:
    """One sequence in steps of ``chunk`` tokens.

    Rows are spread evenly, the last one among them. A step is repeated for further rows, which
    writes the same state again.
    """
    for first in range(0, len(tokens), chunk):
        part = tuple(tokens[first : first + chunk])
        count = min(len(part), most_rows * repeats)
        spread = sorted(
            {round(at) for at in np.linspace(0, len(part) - 1, count)} | {len(part) - 1}
        )
        groups = -(-len(spread) // most_rows)
        for group in range(groups):
            rows = tuple(spread[group::groups])
            targets = tuple(_at(tokens, first + row + 1) for row in rows)
            yield Step("prefill", ((0, first, part),), rows, targets)


def decode_walk(sequences: Sequence[Sequence[int]]) -> Iterator[Step]:
    """Sequences of one length, a token of each in every step."""
    for position in range(len(sequences[0])):
        parts = tuple((n, position, (tokens[position],)) for n, tokens in enumerate(sequences))
        targets = tuple(_at(tokens, position + 1) for tokens in sequences)
        yield Step("decode", parts, tuple(range(len(parts))), targets)


def _at(tokens: Sequence[int], position: int) -> int:
    return tokens[position] if position < len(tokens) else -1


@dataclass(frozen=True)
class Walk:
    """A named list of steps over sequences of at most ``longest`` tokens."""

    name: str
    steps: tuple[Step, ...]
    longest: int


def walks(
    tokens: Sequence[int], max_tokens: int, max_sequences: int, window: int
) -> tuple[Walk, ...]:
    """The three walks over a text.

    Args:
        tokens: of the text.
        max_tokens: largest step.
        max_sequences: most sequences, and most sampled rows.
        window: longest sequence; a longer text begins anew after so many tokens.
    """
    parts = [tokens[i : i + window] for i in range(0, len(tokens), window)]
    small = min(max_sequences, max_tokens)
    large = [s for p in parts for s in prefill_walk(p, max_tokens, max_sequences, _REPEATS)]
    every = [s for p in parts for s in prefill_walk(p, small, max_sequences)]
    count = max(1, min(max_sequences, len(tokens) // 16))
    length = min(len(tokens) // count, window)
    rows = [tokens[i * length : (i + 1) * length] for i in range(count)]
    longest = min(len(tokens), window)
    return (
        Walk(f"prefill, T={min(max_tokens, longest)}", tuple(large), longest),
        Walk(f"prefill, T={min(small, longest)}", tuple(every), longest),
        Walk(f"decode, B={count}", tuple(decode_walk(rows)), length),
    )


@dataclass(frozen=True)
class Comparison:
    """How a plan's distributions differ from the reference's over a walk.

    Units: divergence in nats.

    Attributes:
        name: of the walk.
        rows: positions compared.
        mean_kl: mean divergence of the plan's distribution from the reference's.
        max_kl: greatest one.
        agreement: part of the rows with one and the same likeliest token.
        max_difference: greatest difference of two logits.
        perplexity: of the plan on the text; None where rows were left out.
        reference_perplexity: of the reference.
    """

    name: str
    rows: int
    mean_kl: float
    max_kl: float
    agreement: float
    max_difference: float
    perplexity: float | None
    reference_perplexity: float | None


# Phase, tokens and step record of a step whose logits are not finite.
Refuse = Callable[[str, np.ndarray, Mapping[str, np.ndarray]], None]


def compare(
    walk: Walk, plan: StepRunner, reference: StepRunner, refuse: Refuse | None = None
) -> Comparison:
    """Run both models over a walk, step by step beside each other.

    Args:
        walk: the steps.
        plan: what is measured.
        reference: what it is held against.
        refuse: called with a step of the plan whose logits are not finite, to raise.
    """
    divergences: list[np.ndarray] = []
    agreed, difference = 0, 0.0
    losses: list[tuple[float, float]] = []
    for step in walk.steps:
        found = _logits(plan, step, walk)
        if refuse is not None and not np.isfinite(found).all():
            refuse(step.phase, step.tokens, _record(plan, step, walk))
        wanted = _logits(reference, step, walk)
        log_p, log_q = log_softmax(found), log_softmax(wanted)
        divergences.append(divergence(log_q, log_p))
        agreed += int(np.sum(found.argmax(axis=1) == wanted.argmax(axis=1)))
        difference = max(difference, float(np.abs(found - wanted).max()))
        losses += [
            (-float(log_p[row, target]), -float(log_q[row, target]))
            for row, target in enumerate(step.targets)
            if target >= 0
        ]
    kl = np.concatenate(divergences)
    is_whole = losses and all(len(step.rows) == len(step.tokens) for step in walk.steps)
    means = np.exp(np.mean(losses, axis=0)).tolist() if is_whole else (None, None)
    return Comparison(
        name=walk.name,
        rows=len(kl),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        agreement=agreed / len(kl),
        max_difference=difference,
        perplexity=means[0],
        reference_perplexity=means[1],
    )


def _logits(model: StepRunner, step: Step, walk: Walk) -> np.ndarray:
    record = _record(model, step, walk)
    return model.run(step.phase, step.tokens, record).astype(np.float64)


def _record(model: StepRunner, step: Step, walk: Walk) -> Mapping[str, np.ndarray]:
    return step.record(model.page_size, -(-walk.longest // model.page_size))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithms of probabilities. Shapes: [R, V] -> [R, V]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def divergence(log_q: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence of p from q, row by row. Shapes: [R, V], [R, V] -> [R].

    Units: nats.
    """
    return np.maximum(np.sum(np.exp(log_q) * (log_q - log_p), axis=1), 0.0)
