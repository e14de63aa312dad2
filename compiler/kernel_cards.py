"""What is known of a kernel: its contract in words, who could run it, its source, its figures."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from metainfer.backends.cpu.emit import CpuBinder
from metainfer.backends.kernel import Constraint, Kernel, Query
from metainfer.backends.registry import installed
from metainfer.backends.triton.launch import TritonBinder
from metainfer.compiler.kernels import Checked, check_products
from metainfer.hardware.device import Device
from metainfer.ir.graph import Op

# Constraints that a device alone answers begin so; others need a group.
_OF_DEVICE = ("feature ", "device is ", "library ")
_OF_FORMAT = ("operand ",)
_TEMPLATES = "metainfer.backends.triton.templates"
_EMITTED = "metainfer.backends.triton.emit"
_BACKENDS = "metainfer.backends"


@dataclass(frozen=True)
class Card:
    """One kernel, in words.

    Attributes:
        kernel: the record.
        needs: what a device must have.
        formats: what operands must be.
        others: further constraints.
    """

    kernel: Kernel
    needs: tuple[str, ...]
    formats: tuple[str, ...]
    others: tuple[str, ...]

    def lacks(self, device: Device) -> tuple[str, ...]:
        """What a device lacks to run the kernel at all."""
        query = Query(Op(self.kernel.op, (), ()), device, {})
        asked = [c for c in self.kernel.requires if c.text.startswith(_OF_DEVICE)]
        return tuple(c.text for c in asked if c.check(query) is not None)


def card_of(kernel: Kernel) -> Card:
    """A kernel's contract, sorted by what its parts are about."""
    texts = [c.text for c in constraints_of(kernel)]
    needs = tuple(t for t in texts if t.startswith(_OF_DEVICE))
    formats = tuple(t for t in texts if t.startswith(_OF_FORMAT))
    others = tuple(t for t in texts if t not in (*needs, *formats))
    return Card(kernel, needs, formats, others)


def constraints_of(kernel: Kernel) -> tuple[Constraint, ...]:
    """All constraints, the one that takes a compile last."""
    return (*kernel.requires, *((kernel.fits,) if kernel.fits is not None else ()))


def cards(op: str = "", backend: str = "") -> tuple[Card, ...]:
    """Cards of all kernels, or of those of an op and a backend."""
    found = installed().kernels.all()
    return tuple(card_of(k) for k in found if op in ("", k.op) and backend in ("", k.backend))


# --- sources -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A piece of source text: what it is, where it stands, the text."""

    what: str
    place: str
    text: str


def sources_of_kernel(kernel: Kernel) -> tuple[Source, ...]:
    """What a kernel runs: its binding, and the Triton functions that it launches."""
    function = _bound(kernel.binder)
    if function is None:
        return ()
    found = [_source("binding", function)]
    if isinstance(kernel.binder, TritonBinder):
        found += _launched(function)
    return tuple(found)


def _bound(binder: Any) -> Callable[..., Any] | None:
    if isinstance(binder, TritonBinder):
        function: Any = binder.launches
    elif isinstance(binder, CpuBinder):
        function = binder.emit
    else:
        function = getattr(binder, "run", None)
    while isinstance(function, partial):
        function = function.func
    return function if callable(function) else None


def _source(what: str, function: Any) -> Source:
    plain = getattr(function, "fn", function)
    plain = getattr(plain, "__func__", plain)
    try:
        lines, first = inspect.getsourcelines(plain)
        file = Path(inspect.getsourcefile(plain) or "").name
    except (OSError, TypeError):
        return Source(what, "", "its source is not here")
    return Source(f"{what} {plain.__name__}", f"{file}:{first}", textwrap.dedent("".join(lines)))


def _launched(function: Callable[..., Any]) -> Iterator[Source]:
    """The functions of templates that a binding launches, itself or through what it calls."""
    found: set[tuple[str, str]] = set()
    _follow(function, found, set())
    for place, name in sorted(found):
        if place.startswith(_TEMPLATES):
            yield _source("Triton function", getattr(import_module(place), name))
    if any(place.startswith(_EMITTED) for place, _ in found):
        text = "made for each group: metainfer kernels sources PLAN writes them"
        yield Source("emitted functions", "", text)


def _follow(
    function: Callable[..., Any], found: set[tuple[str, str]], seen: set[Callable[..., Any]]
) -> None:
    """Add (module, name) of what a function of ours names, and what those functions name."""
    plain = getattr(function, "__func__", function)
    if plain in seen or not inspect.isfunction(plain):
        return
    seen.add(plain)
    for value in _named(plain):
        place = str(getattr(value, "__module__", ""))
        if hasattr(value, "fn") and place.startswith(_TEMPLATES):
            found.add((place, value.fn.__name__))
        elif inspect.isfunction(value) and place.startswith(_EMITTED):
            found.add((place, value.__name__))
        elif inspect.isfunction(value) and place.startswith(_BACKENDS):
            _follow(value, found, seen)


def _named(function: FunctionType) -> Iterator[Any]:
    """Values of the names in a function's text: global ones, enclosed ones, those it imports."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    values: list[Any] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            values += [_imported(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Name) and node.id in known:
            values.append(known[node.id])
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for value in values:
        if inspect.ismodule(value):
            yield from (vars(value)[name] for name in attributes & vars(value).keys())
        else:
            yield value.func if isinstance(value, partial) else value


def _imported(place: str, name: str) -> Any:
    module = import_module(place)
    return getattr(module, name) if hasattr(module, name) else import_module(f"{place}.{name}")


# --- figures -------------------------------------------------------------------------------------


def figures_of(kernel: Kernel, device: Device) -> Sequence[Checked]:
    """A product's code compiled for a device, one entry for each format; () for other kernels."""
    if not isinstance(kernel.binder, TritonBinder):
        return ()
    return check_products(device, only=kernel.name)
