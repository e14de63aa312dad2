"""Chooses the next token of each sequence, and finds where a text must stop.

A token is drawn by a race (`runtime.noise`): of those that the filters keep, the one with the least
exponential number over its weight wins. The noise depends on the request's seed, on how many tokens
were drawn before and on the token: so the same seed gives the same text on the host and on a GPU
(`backends.triton.sampling`), up to tokens whose race is closer than float32 tells.
"""

# R rows to sample, V tokens of the vocabulary, C candidates of a row (best first)

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from metainfer.ir.errors import MetainferError
from metainfer.runtime.noise import Noise, all_exponentials, exponentials

# More than top_p = 0.9 keeps of a language model's distribution as a rule.
_FIRST_CANDIDATES = 256


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    The filters apply in this order: temperature, top_k, top_p, min_p.

    Attributes:
        temperature: 0 takes the most likely token, 1 the model's own distribution.
        top_p: keep the fewest most likely tokens whose probabilities reach this sum.
        top_k: keep that many most likely tokens; 0 keeps all.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        seed: of the request's own noise; None takes one from the system.
        max_tokens: most tokens to generate.
        stop: texts that end the answer and are not part of it.

    Raises: MetainferError if a value is outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check every value."""
        temperature, top_p, min_p = self.temperature, self.top_p, self.min_p
        _require(0 <= temperature < math.inf, "temperature", temperature, "0 or more")
        _require(0 < top_p <= 1, "top_p", top_p, "more than 0, at most 1")
        _require(_is_count(self.top_k, 0), "top_k", self.top_k, "a whole number, 0 for all tokens")
        _require(0 <= min_p <= 1, "min_p", min_p, "0 to 1")
        seed_fits = self.seed is None or _is_count(self.seed, 0)
        _require(seed_fits, "seed", self.seed, "a whole number, 0 or more, or None")
        _require(_is_count(self.max_tokens, 1), "max_tokens", self.max_tokens, "1 or more")
        stop_fits = isinstance(self.stop, tuple) and all(
            isinstance(s, str) and s for s in self.stop
        )
        _require(stop_fits, "stop", self.stop, "a tuple of texts, none of them empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def noise(self) -> Noise:
        """Make the request's own source of noise."""
        return Noise(self.seed)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise MetainferError(f"{name} is {value!r}", advice=f"{name} must be {wanted}")


def sample(
    logits: torch.Tensor | np.ndarray,
    params: Sequence[SamplingParams],
    noises: Sequence[Noise],
    names: Sequence[str] = (),
) -> np.ndarray:
    """Choose one token for each row.

    Equal logits count as ordered by index, lower first. A row that is not greedy takes exactly one
    draw from its noise, and its token does not depend on the other rows.

    Args:
        logits: a row for each sequence.
        params: of each.
        noises: of each.
        names: of each, for messages.

    Shapes: logits [R, V] -> int64 [R].
    Raises: MetainferError if the counts differ, or a row has no finite largest logit.
    """
    x_RV = torch.from_numpy(logits) if isinstance(logits, np.ndarray) else logits
    if not x_RV.ndim == 2 or not len(x_RV) == len(params) == len(noises):
        raise MetainferError(
            f"logits of shape {list(x_RV.shape)} for {len(params)} params "
            f"and {len(noises)} sources of noise",
            advice="give one row, one SamplingParams and one source of noise for each sequence",
        )
    if isinstance(logits, np.ndarray) and all(p.is_greedy for p in params):
        return _greedy(logits, names)
    # Adding 0 turns -0.0 into 0.0, so that equal logits are equal as bits too.
    x_RV = x_RV.to(torch.float32) + 0.0
    best_R = x_RV.argmax(dim=1)
    check_finite(x_RV.gather(1, best_R[:, None])[:, 0], names)
    ids = best_R.cpu().numpy().copy()
    for rows in _groups(params):
        race = _Race([noises[r] for r in rows])
        chosen = _draw(x_RV[rows], [params[r] for r in rows], race)
        ids[rows] = chosen.cpu().numpy()
    return ids


class _Race:
    """One draw of each of some rows."""

    def __init__(self, noises: Sequence[Noise]) -> None:
        self._keys_R1 = np.array([[n.key] for n in noises], np.uint64)
        self._positions_R1 = np.array([[n.take()] for n in noises], np.int64)

    def rows(self, rows: torch.Tensor) -> "_Race":
        """The same draws of some of the rows."""
        part, at = _Race([]), rows.cpu().numpy()
        part._keys_R1, part._positions_R1 = self._keys_R1[at], self._positions_R1[at]
        return part

    def winners(self, weights_RC: torch.Tensor, tokens_RC: torch.Tensor | None) -> torch.Tensor:
        """Place of the token that wins in each row; of all of them in order without ``tokens``.

        Shapes: [R, C] -> int64 [R].
        """
        if tokens_RC is None:
            noise = all_exponentials(self._keys_R1, self._positions_R1, weights_RC.shape[1])
        else:
            noise = exponentials(self._keys_R1, self._positions_R1, tokens_RC.cpu().numpy())
        noise_RC = torch.from_numpy(noise).to(weights_RC.device)
        # The quotient is infinite where the weight is 0.
        return (noise_RC / weights_RC).argmin(dim=1)


def _greedy(logits_RV: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Largest of each row, ties to the lower index; numpy's scan needs no thread team."""
    best_R = logits_RV.argmax(axis=1)
    best = np.take_along_axis(logits_RV, best_R[:, None], axis=1)[:, 0]
    check_finite(torch.from_numpy(best), names)
    return best_R.astype(np.int64)


def check_finite(best_R: torch.Tensor, names: Sequence[str]) -> None:
    """Refuse rows without a finite largest logit.

    Args:
        best_R: the largest logit of each row, NaN where one is NaN.
        names: of the sequences, () for none.

    Raises: MetainferError naming the first such row.
    """
    bad = (~torch.isfinite(best_R)).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        whose = f" ({names[row]})" if row < len(names) else ""
        raise MetainferError(
            f"the logits of row {row}{whose} are not finite: the largest is {float(best_R[row])}",
            advice="the model's weights or its arithmetic overflow: run `metainfer verify`",
        )


def _groups(params: Sequence[SamplingParams]) -> list[list[int]]:
    """Part the rows that draw by what they need: no order, their top k in order, or a whole one."""
    drawing = [r for r, p in enumerate(params) if not p.is_greedy]
    plain = [r for r in drawing if _is_plain(params[r])]
    limited = [r for r in drawing if params[r].top_k > 0]
    ordered = [r for r in drawing if not _is_plain(params[r]) and params[r].top_k == 0]
    return [rows for rows in (plain, limited, ordered) if rows]


def _is_plain(params: SamplingParams) -> bool:
    return params.top_k == 0 and params.top_p == 1 and params.min_p == 0


def _draw(x_RV: torch.Tensor, params: list[SamplingParams], race: _Race) -> torch.Tensor:
    """Choose one token for each row of one group. Shapes: [R, V] -> int64 [R]."""
    if _is_plain(params[0]):
        return race.winners(_weights(x_RV, params), None)
    width, limit = x_RV.shape[1], max(p.top_k for p in params)
    if limit:
        return _draw_ordered(x_RV, None, params, race, min(limit, width))[0]
    # The tokens that top_p and min_p keep are few as a rule: order the first ones, and all only
    # for rows whose last ordered token is still kept. Either way gives the same token.
    totals_R1 = _weights(x_RV, params).cumsum(dim=1)[:, -1:]
    count = min(_FIRST_CANDIDATES, width)
    chosen_R, open_R = _draw_ordered(x_RV, totals_R1, params, race, count)
    rows = open_R.nonzero()[:, 0]
    if count < width and len(rows):
        rest, again = [params[int(r)] for r in rows], race.rows(rows)
        chosen_R[rows] = _draw_ordered(x_RV[rows], totals_R1[rows], rest, again, width)[0]
    return chosen_R


def _weights(x_RV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Return unnormalised probabilities in float64, 1 for the most likely token of each row."""
    x_RV = x_RV.to(torch.float64)
    temperatures_R1 = _column([p.temperature for p in params], x_RV)
    return torch.exp((x_RV - x_RV.max(dim=1, keepdim=True).values) / temperatures_R1)


def _draw_ordered(
    x_RV: torch.Tensor,
    totals_R1: torch.Tensor | None,
    params: list[SamplingParams],
    race: _Race,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose among the ``count`` most likely tokens of each row.

    Returns the tokens, and whether the last candidate of each row was kept by the filters.
    """
    index_RC = _ordered(x_RV, count)
    weights_RC = _filter(_weights(x_RV.gather(1, index_RC), params), totals_R1, params)
    place_R1 = race.winners(weights_RC, index_RC)[:, None]
    return index_RC.gather(1, place_R1)[:, 0], weights_RC[:, -1] > 0


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    """Return one number a row, float64 [R, 1]."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _ordered(x_RV: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indexes of the ``count`` largest logits, equal ones by index.

    Shapes: [R, V] -> int64 [R, C].
    """
    if count == x_RV.shape[1]:
        return torch.sort(x_RV, dim=1, descending=True, stable=True).indices
    # topk breaks ties as it likes, so rank by unique integers: the float's bits, in an order that
    # agrees with the numbers, above the complement of the index.
    bits = x_RV.contiguous().view(torch.int32).to(torch.int64)
    rank = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    tokens = torch.arange(x_RV.shape[1] - 1, -1, -1, device=x_RV.device)
    return torch.topk((rank << 32) + tokens, count, dim=1).indices


def _filter(
    weights_RC: torch.Tensor, totals_R1: torch.Tensor | None, params: list[SamplingParams]
) -> torch.Tensor:
    """Set the weights of ordered candidates that top_k, top_p or min_p rule out to 0.

    ``totals`` are the sums over the whole vocabulary, None where top_k limits every row.
    """
    count = weights_RC.shape[1]
    place_C = torch.arange(count, device=weights_RC.device)
    kept_RC = weights_RC * (place_C < _column([float(p.top_k or count) for p in params], place_C))
    sums_RC = kept_RC.cumsum(dim=1)
    if totals_R1 is None:
        totals_R1 = sums_RC[:, -1:]
    # top_p = 1 keeps all, also where the sums reach the total early by rounding.
    limits_R1 = _column([p.top_p if p.top_p < 1 else math.inf for p in params], place_C)
    kept_RC = kept_RC * (sums_RC - kept_RC < limits_R1 * totals_R1)
    return kept_RC * (kept_RC >= _column([p.min_p for p in params], place_C) * kept_RC[:, :1])


class StopMatcher:
    """Cuts a streamed text at the first stop text, which may come in pieces.

    The first is the one that ends first; of two that end together, the one that begins first. What
    could still become a stop text is held back, so no part of one is ever handed out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Add a piece and return the text that is now certain to be part of the answer."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = len(text) - self._possible(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        rest, self._held = self._held, ""
        return rest

    def _possible(self, text: str) -> int:
        """Length of the longest end of the text with which a stop text begins."""
        longest = max((len(s) for s in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stops):
                return size
        return 0
