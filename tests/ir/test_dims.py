"""Sizes behave as the numbers that they stand for."""

import math

import pytest
import strategies
from hypothesis import assume, given
from hypothesis import strategies as st

from metainfer.ir.dims import Dim, dim, product, same_product
from metainfer.ir.errors import TypeMismatch

SIZES = strategies.dims()
ENVS = st.fixed_dictionaries({name: st.integers(1, 10_000) for name in strategies.SYMBOLS})
NUMBERS = st.integers(-50, 50)
DIVISORS = st.integers(1, 12)


@given(SIZES, SIZES, NUMBERS, DIVISORS, ENVS)
def test_arithmetic_is_that_of_the_numbers(
    a: Dim, b: Dim, k: int, d: int, env: dict[str, int]
) -> None:
    x, y = a.evaluate(env), b.evaluate(env)
    assert (a + b).evaluate(env) == x + y
    assert (a - b).evaluate(env) == x - y
    assert (a + k).evaluate(env) == (k + a).evaluate(env) == x + k
    assert (a * k).evaluate(env) == (k * a).evaluate(env) == x * k
    assert (a // d).evaluate(env) == x // d
    assert a.ceildiv(d).evaluate(env) == -(-x // d)


@given(SIZES, SIZES, SIZES, NUMBERS)
def test_equal_sums_have_one_form(a: Dim, b: Dim, c: Dim, k: int) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert (a + b) * k == a * k + b * k
    assert a - a == dim(0)
    assert str(a - b + b) == str(a)


@given(NUMBERS, NUMBERS, DIVISORS, DIVISORS)
def test_divisions_have_one_form(k: int, c: int, d: int, e: int) -> None:
    # Of one symbol: quotients of several are not brought to one form.
    a = dim("T") * k + c
    assert (a // d) // e == a // (d * e)
    assert a.ceildiv(d).ceildiv(e) == a.ceildiv(d * e)
    assert (a * d) // (d * e) == a // e
    assert (a * d + d * e) // d == a + e


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (dim("T") * 2 + 1, "2*T+1"),
        (dim("T") // 4, "T//4"),
        (dim("T").ceildiv(4), "ceildiv(T,4)"),
        ((dim("T") * 2) // 4, "T//2"),
        ((dim("T") * 6 + 3) // 4, "(3*T+1)//2"),
        ((dim("T") * 4 + 10) // 4, "T+2"),
        (((dim("T") - 1) // 2) // 2, "(T+3)//4-1"),
        ((dim("T") + dim("B") * 8) // 4, "2*B+T//4"),
        (dim("B") - dim("B"), "0"),
        (dim("T") * -1 + 3, "-T+3"),
    ],
)
def test_sizes_print_in_lowest_terms(size: Dim, text: str) -> None:
    assert str(size) == text


@given(SIZES, st.dictionaries(st.sampled_from(strategies.SYMBOLS), SIZES, max_size=3), ENVS)
def test_substitution_is_evaluation_in_two_steps(
    size: Dim, replaced: dict[str, Dim], env: dict[str, int]
) -> None:
    inner = {**env, **{name: by.evaluate(env) for name, by in replaced.items()}}
    assert size.substitute(replaced).evaluate(env) == size.evaluate(inner)
    assert size.substitute({}) == size


@given(SIZES, ENVS, ENVS, st.data())
def test_bounds_hold_all_values(
    size: Dim, one: dict[str, int], other: dict[str, int], data: st.DataObject
) -> None:
    limits = {s: (min(one[s], other[s]), max(one[s], other[s])) for s in one}
    inside = {s: data.draw(st.integers(*limits[s])) for s in limits}
    low, high = size.bounds(limits)
    assert low <= size.evaluate(inside) <= high


@given(SIZES)
def test_a_size_without_symbols_is_a_number(size: Dim) -> None:
    assert size.is_static == (not size.symbols())
    if size.is_static:
        assert size.static == size.evaluate({}) == size.constant
    else:
        with pytest.raises(TypeMismatch, match="symbolic where a number is needed"):
            _ = size.static


@given(SIZES, SIZES)
def test_only_affine_products_are_formed(a: Dim, b: Dim) -> None:
    if a.is_static or b.is_static:
        assert (a * b).symbols() <= a.symbols() | b.symbols()
    else:
        with pytest.raises(TypeMismatch, match="not affine"):
            _ = a * b


@given(SIZES, st.integers(-3, 0))
def test_divisors_are_positive(size: Dim, divisor: int) -> None:
    with pytest.raises(TypeMismatch, match="divisor must be positive"):
        _ = size // divisor


def test_a_symbol_without_value_is_named() -> None:
    with pytest.raises(TypeMismatch, match="size symbol T has no value") as refused:
        (dim("T") + 1).evaluate({"B": 3})
    assert refused.value.advice == "known: B"


@given(st.lists(SIZES, max_size=3), st.lists(SIZES, max_size=3), ENVS)
def test_same_product_never_lies(left: list[Dim], right: list[Dim], env: dict[str, int]) -> None:
    if same_product(left, right):
        assert math.prod(s.evaluate(env) for s in left) == math.prod(s.evaluate(env) for s in right)


@given(st.lists(SIZES, max_size=4), st.integers(1, 9))
def test_same_product_sees_moved_factors(sizes: list[Dim], k: int) -> None:
    assert same_product([*sizes, dim(k)], [dim(1), *reversed(sizes), dim(k)])
    if sizes:
        assert same_product([*sizes, dim(k)], [sizes[0] * k, *sizes[1:]])


def test_same_product_of_several_symbols() -> None:
    b, t = dim("B"), dim("T")
    assert same_product([b, t, dim(768)], [t, b * 12, dim(64)])
    assert not same_product([b, t], [b, t * 2])
    assert not same_product([b], [t])


@given(st.lists(SIZES.filter(lambda s: s.is_static), max_size=3), SIZES, ENVS)
def test_product_with_one_symbolic_size(numbers: list[Dim], size: Dim, env: dict[str, int]) -> None:
    assume(all(abs(n.static) < 10**6 for n in numbers))
    wanted = math.prod(n.static for n in numbers) * size.evaluate(env)
    assert product([*numbers, size]).evaluate(env) == wanted
