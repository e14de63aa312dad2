"""What is known of a kernel: its contract in words, who could run it, its source, its figures."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
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
_LAUNCHING = tuple(
    f"metainfer.backends.triton.{name}"
    for name in ("attention", "attention_warpgroups", "experts", "gated")
)


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
        found += _templates(inspect.getmodule(function))
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


def _templates(module: Any) -> Iterator[Source]:
    """The functions of templates that a module of launches, or the one it leans on, imports."""
    names = set(_imported(module))
    for place in sorted({place for place, _ in names if place in _LAUNCHING}):
        names |= set(_imported(import_module(place)))
    for place, name in sorted(names):
        if place.startswith(_TEMPLATES):
            function = _named(place, name)
            if hasattr(function, "fn"):
                yield _source("Triton function", function)
    if any(place.startswith(_EMITTED) for place, _ in names):
        text = "made for each group: metainfer kernels sources PLAN writes them"
        yield Source("emitted functions", "", text)


def _imported(module: Any) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.module, alias.name


def _named(place: str, name: str) -> Any:
    return getattr(import_module(place), name, None)


# --- figures -------------------------------------------------------------------------------------


def figures_of(kernel: Kernel, device: Device) -> Sequence[Checked]:
    """A product's code compiled for a device, one entry for each format; () for other kernels."""
    if not isinstance(kernel.binder, TritonBinder):
        return ()
    return check_products(device, only=kernel.name)
