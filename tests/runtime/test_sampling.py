"""Sampling against a plain reference, and stop texts in streams."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.ir.errors import MetainferError
from metainfer.runtime.sampling import SamplingParams, StopMatcher, sample


def reference(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the probabilities of all tokens, by the definitions, one token at a time."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if params.top_k:
        order = order[: params.top_k]
    top = float(logits[order[0]])
    weights = {i: math.exp((float(logits[i]) - top) / params.temperature) for i in order}
    total, before = sum(weights.values()), 0.0
    kept: dict[int, float] = {}
    for i in order:
        if params.top_p < 1 and before >= params.top_p * total:
            break
        kept[i] = weights[i]
        before += weights[i]
    kept = {i: w for i, w in kept.items() if w >= params.min_p}
    out = np.zeros(len(logits))
    for i, w in kept.items():
        out[i] = w / sum(kept.values())
    return out


LOGITS = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.just(-math.inf), st.floats(-6, 6, width=32)),
    min_size=1,
    max_size=12,
).filter(lambda row: max(row) > -math.inf)
DRAWING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    # Sums of a few weights never come near these limits by chance.
    top_p=st.sampled_from([0.1234567, 0.5432101, 0.8765432, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123457, 0.3217654]),
    seed=st.integers(0, 2**32),
)


class Fixed(np.random.Generator):
    """A generator that gives the numbers it was made with."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.numbers = iter(numbers)

    def random(self, *_: object, **__: object) -> float:  # type: ignore[override]
        return next(self.numbers)


@settings(deadline=None)
@given(row=LOGITS, params=DRAWING)
def test_a_sweep_of_random_numbers_gives_the_reference_distribution(
    row: list[float], params: SamplingParams
) -> None:
    """Inverting a distribution at evenly spread numbers counts each token by its probability."""
    logits, steps = np.array(row, dtype=np.float32), 400
    # One generator for all rows, which are asked in order.
    sweep = Fixed(*((i + 0.5) / steps for i in range(steps)))
    ids = sample(np.tile(logits, (steps, 1)), [params] * steps, [sweep] * steps)
    counts = np.bincount(ids, minlength=len(row))
    wanted = reference(logits, params)
    assert np.abs(counts / steps - wanted).max() <= 1.01 / steps
    # The support is exact: no token that the filters rule out, every likely one that they keep.
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(wanted))
    assert set(np.flatnonzero(wanted > 1 / steps)) <= set(np.flatnonzero(counts))


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
@settings(deadline=None)
@given(row=LOGITS, params=DRAWING)
def test_the_ends_of_the_range_stay_in_the_support(
    number: float, row: list[float], params: SamplingParams
) -> None:
    logits = np.array([row], dtype=np.float32)
    chosen = sample(logits, [params], [Fixed(number)])[0]
    assert reference(logits[0], params)[chosen] > 0


@settings(deadline=None)
@given(data=st.data(), width=st.integers(2, 40))
def test_a_row_does_not_depend_on_the_batch(data: st.DataObject, width: int) -> None:
    greedy = st.builds(SamplingParams, seed=st.integers(0, 99))
    params = data.draw(st.lists(st.one_of(DRAWING, greedy), min_size=1, max_size=6))
    logits = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(len(params), width))
    logits = logits.round(1).astype(np.float32)
    together = [p.generator() for p in params]
    alone = [p.generator() for p in params]
    for _ in range(3):
        ids = sample(logits, params, together)
        for r, p in enumerate(params):
            assert sample(logits[r : r + 1], [p], [alone[r]])[0] == ids[r]


@settings(deadline=None)
@given(row=st.lists(st.sampled_from([-1.0, -0.0, 0.0, 2.0]), min_size=1, max_size=30))
def test_greedy_takes_the_first_of_equals(row: list[float]) -> None:
    params = SamplingParams()
    ids = sample(torch.tensor([row]), [params], [params.generator()])
    assert ids.tolist() == [row.index(max(row))]
    assert ids.dtype == np.int64
    one = SamplingParams(temperature=1.0, top_k=1)
    assert sample(torch.tensor([row]), [one], [one.generator()]).tolist() == ids.tolist()


def test_greedy_rows_draw_nothing() -> None:
    params = SamplingParams(seed=3)
    generator = params.generator()
    sample(np.zeros((1, 4), np.float32), [params], [generator])
    assert generator.random() == params.generator().random()


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_wide_rows_keep_few_and_many_tokens(scale: float) -> None:
    """Flat rows keep more tokens than are ordered at first, peaked rows fewer."""
    rng = np.random.default_rng(5)
    logits = (scale * rng.normal(size=3000)).round(2).astype(np.float32)
    for params in (
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=0.7, top_p=0.6, min_p=0.001),
    ):
        steps = 500
        sweep = Fixed(*((i + 0.5) / steps for i in range(steps)))
        rows = np.tile(logits, (steps, 1))
        ids = sample(rows, [params] * steps, [sweep] * steps)
        wanted = reference(logits, params)
        assert wanted[ids].min() > 0
        counts = np.bincount(ids, minlength=3000)
        order = np.argsort(-logits, kind="stable")
        # Compare cumulative sums, for each token alone has less than one step of probability.
        gap = np.abs(np.cumsum(counts[order]) / steps - np.cumsum(wanted[order]))
        assert gap.max() <= 1.01 / steps


def test_seeds_repeat_and_differ() -> None:
    logits = np.zeros((1, 1000), np.float32)

    def run(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        generator = params.generator()
        return [int(sample(logits, [params], [generator])[0]) for _ in range(8)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(None) != run(None)


def test_half_precision_logits_and_large_vocabularies() -> None:
    logits = torch.randn((2, 150_000), generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=0.7, top_k=40, seed=1), SamplingParams(0.7, 0.9, seed=2)]
    ids = sample(logits.to(torch.bfloat16), params, [p.generator() for p in params])
    top = torch.topk(logits[0].to(torch.bfloat16).float(), 40).values[-1]
    assert float(logits[0, ids[0]].to(torch.bfloat16)) >= float(top)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers(bad: float) -> None:
    logits = np.array([[0.0, 1.0], [bad, 0.0]], dtype=np.float32)
    params = [SamplingParams()] * 2
    with pytest.raises(MetainferError, match="row 1 are not finite"):
        sample(logits, params, [p.generator() for p in params])


def test_counts_that_differ() -> None:
    with pytest.raises(MetainferError, match=r"shape \[2, 3\] for 1 params"):
        sample(np.zeros((2, 3), np.float32), [SamplingParams()], [SamplingParams().generator()])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 1.01),
        ("seed", -1),
        ("seed", True),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("stop", "END"),
    ],
)
def test_values_outside_their_range(name: str, value: object) -> None:
    with pytest.raises(MetainferError, match=f"{name} is") as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert f"{name} must be" in caught.value.advice


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Search the whole text for the stop that ends first, then begins first."""
    found = [
        (end, end - len(s), s)
        for end in range(len(text) + 1)
        for s in stops
        if text[:end].endswith(s)
    ]
    if not found:
        return text, None
    _, at, stop = min(found)
    return text[:at], stop


@settings(deadline=None)
@given(data=st.data(), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_streamed_stops_equal_a_search_of_the_whole(data: st.DataObject, stops: list[str]) -> None:
    pieces = data.draw(st.lists(st.text("abc", max_size=4), max_size=8))
    text = "".join(pieces)
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        assert first_stop(text, stops)[0].startswith(out)
    out += matcher.flush()
    assert (out, matcher.matched) == first_stop(text, stops)


def test_only_what_could_be_a_stop_is_held() -> None:
    matcher = StopMatcher(["\nUser:", "<end>"])
    assert matcher.push("Hi <") == "Hi "
    assert matcher.push("b>\nUs") == "<b>"
    assert matcher.push("er") == ""
    assert matcher.push(": more") == ""
    assert matcher.matched == "\nUser:"
    assert matcher.push("ignored") == ""
    assert matcher.flush() == ""
