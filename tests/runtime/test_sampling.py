"""Sampling against a plain reference, and stop texts in streams."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from metainfer.ir.errors import MetainferError
from metainfer.runtime.noise import all_exponentials, exponentials, philox
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


def drawn(logits: np.ndarray, params: SamplingParams, count: int) -> np.ndarray:
    """How often each token comes in so many draws of one request."""
    noise = params.noise()
    ids = sample(np.tile(logits, (count, 1)), [params] * count, [noise] * count)
    return np.bincount(ids, minlength=len(logits))


def surprise(counts: np.ndarray, wanted: np.ndarray) -> float:
    """Probability of counts no likelier than these: chi-square, rare tokens taken together."""
    total = counts.sum()
    order = np.argsort(wanted)
    bins, expected, seen = [], 0.0, 0
    for i in order:
        expected, seen = expected + wanted[i] * total, seen + int(counts[i])
        if expected >= 5:
            bins.append((expected, seen))
            expected, seen = 0.0, 0
    if expected > 0 and bins:
        bins[-1] = (bins[-1][0] + expected, bins[-1][1] + seen)
    if len(bins) < 2:
        return 1.0
    statistic = sum((n - e) ** 2 / e for e, n in bins)
    return float(chi2.sf(statistic, len(bins) - 1))


@settings(deadline=None)
@given(row=LOGITS, params=DRAWING)
def test_draws_follow_the_exact_distribution(row: list[float], params: SamplingParams) -> None:
    logits = np.array(row, dtype=np.float32)
    counts, wanted = drawn(logits, params, 400), reference(logits, params)
    # The support is exact: no token that the filters rule out, every likely one that they keep.
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(wanted))
    assert set(np.flatnonzero(wanted > 0.05)) <= set(np.flatnonzero(counts))
    assert surprise(counts, wanted) > 1e-5


def test_words_are_those_of_philox() -> None:
    """Known answers of Random123."""

    def words(*given: int) -> list[int]:
        arrays = [np.array([n], np.uint64) for n in given]
        made = philox(tuple(arrays[:4]), (arrays[4], arrays[5]))
        return [int(n) for n in made[:, 0]]

    full = 0xFFFFFFFF
    assert words(0, 0, 0, 0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(*[full] * 6) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    assert words(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_noise_of_a_token_depends_on_no_other() -> None:
    keys, positions = np.array([[5], [2**64 - 1]], np.uint64), np.array([[0], [7]])
    whole = all_exponentials(keys, positions, 10)
    tokens = np.array([[9, 0, 3], [4, 4, 8]])
    assert np.array_equal(
        exponentials(keys, positions, tokens), np.take_along_axis(whole, tokens, axis=1)
    )
    assert whole.min() > 0
    assert np.isfinite(whole).all()


@settings(deadline=None)
@given(data=st.data(), width=st.integers(2, 40))
def test_a_row_does_not_depend_on_the_batch(data: st.DataObject, width: int) -> None:
    greedy = st.builds(SamplingParams, seed=st.integers(0, 99))
    params = data.draw(st.lists(st.one_of(DRAWING, greedy), min_size=1, max_size=6))
    logits = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(len(params), width))
    logits = logits.round(1).astype(np.float32)
    together = [p.noise() for p in params]
    alone = [p.noise() for p in params]
    for _ in range(3):
        ids = sample(logits, params, together)
        for r, p in enumerate(params):
            assert sample(logits[r : r + 1], [p], [alone[r]])[0] == ids[r]


@settings(deadline=None)
@given(row=st.lists(st.sampled_from([-1.0, -0.0, 0.0, 2.0]), min_size=1, max_size=30))
def test_greedy_takes_the_first_of_equals(row: list[float]) -> None:
    params = SamplingParams()
    ids = sample(torch.tensor([row]), [params], [params.noise()])
    assert ids.tolist() == [row.index(max(row))]
    assert ids.dtype == np.int64
    one = SamplingParams(temperature=1.0, top_k=1)
    assert sample(torch.tensor([row]), [one], [one.noise()]).tolist() == ids.tolist()


def test_greedy_rows_draw_nothing() -> None:
    params = SamplingParams(seed=3)
    noise = params.noise()
    sample(np.zeros((1, 4), np.float32), [params], [noise])
    assert noise.position == 0
    sample(np.zeros((1, 4), np.float32), [SamplingParams(1.0)], [noise])
    assert noise.position == 1


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_wide_rows_keep_few_and_many_tokens(scale: float) -> None:
    """Flat rows keep more tokens than are ordered at first, peaked rows fewer."""
    rng = np.random.default_rng(5)
    logits = (scale * rng.normal(size=1000)).round(2).astype(np.float32)
    for params in (
        SamplingParams(temperature=1.0, top_p=0.9, seed=1),
        SamplingParams(temperature=1.0, min_p=0.05, seed=2),
        SamplingParams(temperature=0.7, top_p=0.6, min_p=0.001, seed=3),
    ):
        counts, wanted = drawn(logits, params, 300), reference(logits, params)
        assert wanted[counts > 0].min() > 0
        assert surprise(counts, wanted) > 1e-4


def test_seeds_repeat_and_differ() -> None:
    logits = np.zeros((1, 1000), np.float32)

    def run(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        noise = params.noise()
        return [int(sample(logits, [params], [noise])[0]) for _ in range(8)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(None) != run(None)


def test_half_precision_logits_and_large_vocabularies() -> None:
    logits = torch.randn((2, 150_000), generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=0.7, top_k=40, seed=1), SamplingParams(0.7, 0.9, seed=2)]
    ids = sample(logits.to(torch.bfloat16), params, [p.noise() for p in params])
    top = torch.topk(logits[0].to(torch.bfloat16).float(), 40).values[-1]
    assert float(logits[0, ids[0]].to(torch.bfloat16)) >= float(top)


@pytest.mark.parametrize("row", [[math.nan, 0.0], [0.0, math.inf], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers(row: list[float], temperature: float) -> None:
    logits = np.array([[0.0, 1.0], row], dtype=np.float32)
    params = [SamplingParams(temperature)] * 2
    noises, names = [p.noise() for p in params], ["request 4", "request 9"]
    with pytest.raises(MetainferError, match=r"row 1 \(request 9\) are not finite"):
        sample(logits, params, noises, names)


def test_counts_that_differ() -> None:
    with pytest.raises(MetainferError, match=r"shape \[2, 3\] for 1 params"):
        sample(np.zeros((2, 3), np.float32), [SamplingParams()], [SamplingParams().noise()])


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
