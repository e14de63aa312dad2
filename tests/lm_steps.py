"""Drives a loaded language model by step records of our own, and transformers beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import metainfer
from metainfer.ir.plan import Plan
from metainfer.runtime.load import LoadedModel

EXACT: dict[str, Any] = {"activations": "f32", "weights": "f32", "exact": True}


class Sequences:
    """Sequences in the states of a model; pages are handed out in shuffled order.

    Attributes:
        lengths: tokens in the state, by sequence.
    """

    def __init__(self, model: LoadedModel, seed: int = 0) -> None:
        self._model = model
        # Page 0 is the null page.
        order = np.random.default_rng(seed).permutation(model.num_pages - 1) + 1
        self._free = order.tolist()
        self._tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def run(
        self,
        phase: str,
        chunks: Mapping[int, Sequence[int]],
        rows: Mapping[int, Sequence[int]] | None = None,
    ) -> np.ndarray:
        """Append tokens to sequences in one step.

        Args:
            phase: "prefill" or "decode".
            chunks: sequence -> its next tokens, in the order of the step.
            rows: sequence -> which of its tokens to sample; the last of each if None.

        Shapes: -> logits f32 [R, V], a copy.
        """
        size = self._model.page_size
        tokens, positions, slots, starts, sample_rows = [], [], [], [0], []
        for number, chunk in chunks.items():
            before = self.lengths.get(number, 0)
            table = self._tables.setdefault(number, [])
            while len(table) * size < before + len(chunk):
                table.append(self._free.pop())
            at = range(before, before + len(chunk))
            wanted = [len(chunk) - 1] if rows is None else rows.get(number, ())
            sample_rows += [starts[-1] + row for row in wanted]
            tokens += list(chunk)
            positions += list(at)
            slots += [table[p // size] * size + p % size for p in at]
            starts.append(starts[-1] + len(chunk))
            self.lengths[number] = before + len(chunk)
        most = max(len(self._tables[n]) for n in chunks)
        fields = {
            "positions": positions,
            "slots": slots,
            "starts": starts,
            "lengths": [self.lengths[n] for n in chunks],
            "pages": [self._tables[n] + [0] * (most - len(self._tables[n])) for n in chunks],
            "sample_rows": sample_rows,
            "num_valid": [len(tokens), len(chunks)],
        }
        step = {name: np.array(value, np.int32) for name, value in fields.items()}
        return self._model.run(phase, np.array(tokens, np.int32), step).copy()


def run_chunked(
    model: LoadedModel, tokens: Sequence[int], chunk: int, phase: str = "prefill"
) -> np.ndarray:
    """Logits [T, V] of one sequence, ``chunk`` tokens a step."""
    sequences = Sequences(model, seed=chunk)
    found = []
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        # A step samples at most max_sequences rows; repeat it over the same slots for the others.
        found.append(_all_rows(model, sequences, part, phase))
    return np.concatenate(found)


def _all_rows(
    model: LoadedModel, sequences: Sequences, part: Sequence[int], phase: str
) -> np.ndarray:
    before = sequences.lengths.get(0, 0)
    found = []
    for first in range(0, len(part), model.max_sequences):
        rows = range(first, min(first + model.max_sequences, len(part)))
        sequences.lengths[0] = before
        found.append(sequences.run(phase, {0: part}, {0: rows}))
    return np.concatenate(found)


def compile_and_load(model: Any, **options: Any) -> LoadedModel:
    """Compile for the CPU and load with the plan's own weights."""
    return metainfer.load(metainfer.compile(model, "cpu", **options), allow_machine_mismatch=True)


def load_plan(plan: Plan | Path, **options: Any) -> LoadedModel:
    """Load without asking whether this machine has the memory of the one described."""
    return metainfer.load(plan, allow_machine_mismatch=True, **options)


class Oracle:
    """A checkpoint in transformers, float32, eager attention."""

    def __init__(self, path: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits [T, V] of one sequence."""
        with torch.no_grad():
            return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


def mean_kl(logits: np.ndarray, reference: np.ndarray) -> float:
    """Mean KL divergence of rows of logits from those of a reference, in nats."""
    a = torch.log_softmax(torch.from_numpy(np.asarray(reference, np.float64)), -1)
    b = torch.log_softmax(torch.from_numpy(np.asarray(logits, np.float64)), -1)
    return float((a.exp() * (a - b)).sum(-1).mean())


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference."""
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max())
