"""The order of the passes, and the driver that verifies, dumps and diffs after each one."""

import difflib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from metainfer.ir.errors import MetainferError
from metainfer.ir.graph import Module
from metainfer.ir.printer import print_module
from metainfer.ir.verify import verify_module
from metainfer.passes.absorb_latents import absorb_latents
from metainfer.passes.canonicalize import canonicalize
from metainfer.passes.collectives import collectives
from metainfer.passes.fuse import fuse
from metainfer.passes.layout import layout
from metainfer.passes.localize import localize
from metainfer.passes.merge_linears import merge_linears
from metainfer.passes.overlap import overlap
from metainfer.passes.place_experts import place_experts
from metainfer.passes.quantize import quantize
from metainfer.passes.quantize_activations import quantize_activations
from metainfer.passes.raise_experts import raise_experts
from metainfer.passes.raise_ops import raise_ops
from metainfer.passes.seam import seam
from metainfer.passes.select import select
from metainfer.passes.shard import shard
from metainfer.passes.target import Target


@dataclass(frozen=True)
class Pass:
    """A pass by its text name."""

    name: str
    run: Callable[[Module, Target], Module]


PIPELINE: tuple[Pass, ...] = (
    Pass("raise", raise_ops),
    Pass("raise_experts", raise_experts),
    Pass("canonicalize", canonicalize),
    Pass("absorb_latents", absorb_latents),
    Pass("quantize", quantize),
    Pass("place_experts", place_experts),
    Pass("shard", shard),
    Pass("localize", localize),
    Pass("merge_linears", merge_linears),
    Pass("quantize_activations", quantize_activations),
    Pass("seam", seam),
    Pass("fuse", fuse),
    Pass("layout", layout),
    Pass("select", select),
    Pass("collectives", collectives),
    Pass("overlap", overlap),
)


@dataclass(frozen=True)
class Timing:
    """How long one pass took.

    Units: seconds.
    """

    name: str
    seconds: float
    verify_seconds: float


def pass_named(name: str) -> Pass:
    """A pass by name.

    Raises: MetainferError naming the known ones.
    """
    for candidate in PIPELINE:
        if candidate.name == name:
            return candidate
    known = ", ".join(p.name for p in PIPELINE)
    raise MetainferError(f"unknown pass {name!r}", advice=f"known, in order: {known}")


def run_passes(
    module: Module,
    target: Target,
    passes: Iterable[Pass] = PIPELINE,
    *,
    check: Callable[[str, Module, Module], None] | None = None,
) -> tuple[Module, tuple[Timing, ...]]:
    """Run passes in order; the result of each is verified, and dumped to METAINFER_DUMP.

    Args:
        module: where to begin; verified first.
        target: what passes see of the outside.
        passes: which passes.
        check: called with (pass, before, after), for METAINFER_VERIFY=2.

    Raises: MetainferError naming the pass whose result does not verify.
    """
    verify_module(module)
    dump = _Dump.from_environment(target.strategy.phase)
    dump.write(0, "captured", module)
    timings: list[Timing] = []
    for number, step in enumerate(passes, start=1):
        if step.name in target.options.skip_passes:
            continue
        before, start = module, time.perf_counter()
        module = step.run(module, target)
        middle = time.perf_counter()
        _verify(step.name, module)
        if check is not None:
            check(step.name, before, module)
        dump.write(number, step.name, module)
        timings.append(Timing(step.name, middle - start, time.perf_counter() - middle))
    return module, tuple(timings)


def _verify(name: str, module: Module) -> None:
    if os.environ.get("METAINFER_VERIFY", "1") == "0":
        return
    try:
        verify_module(module)
    except MetainferError as error:
        raise type(error)(
            f"after pass {name}: {error.what}",
            text=error.text,
            origin=error.origin,
            advice=error.advice or "this is a fault of the compiler: please report it",
        ) from error


class _Dump:
    """Writes NN-pass.mir and the difference to the one before."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._last = ""

    @staticmethod
    def from_environment(phase: str) -> "_Dump":
        root = os.environ.get("METAINFER_DUMP", "")
        if not root:
            return _Dump(None)
        folder = Path(root) / phase
        folder.mkdir(parents=True, exist_ok=True)
        return _Dump(folder)

    def write(self, number: int, name: str, module: Module) -> None:
        if self.folder is None:
            return
        text = print_module(module)
        stem = f"{number:02d}-{name}"
        (self.folder / f"{stem}.mir").write_text(text)
        if self._last:
            lines = difflib.unified_diff(
                self._last.splitlines(), text.splitlines(), "before", f"after {name}", lineterm=""
            )
            (self.folder / f"{stem}.diff").write_text("\n".join(lines) + "\n")
        self._last = text
