"""A launch of a Triton function as a value: run by the executor, interpreted, or cross-compiled.

A kernel is written once, as a function from a `TorchCall` to its launches. With tensors of a GPU
the launches run; with CPU tensors they are interpreted; with tensors of torch's ``meta`` device,
which hold types and shapes only, they are compiled for a card that need not be there (`cross`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.interpreter import is_interpreting, prepare
from metainfer.hardware.detect_gpu import features_of
from metainfer.ir.errors import CompileFailure

EARLY = "early_launch"  # the feature of a device
_EARLY = "EARLY"  # the constant of a function

# A run-time argument: a tensor (its address is passed), a number, or a tuple of such.
Argument = Any


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        function: a ``@triton.jit`` function.
        grid: programs along up to three axes.
        arguments: run-time arguments by name.
        constants: ``tl.constexpr`` arguments by name: numbers, text, other ``@triton.jit``
            functions.
        num_warps: warps of a program.
        num_stages: buffers of a pipelined loop.
        matrix: operand type ("bf16", "f8e4m3", or scaled blocks: "mxf8", "mxf4", "nvf4") of the
            matrix instructions that the code must use, all of them; "" if it uses none.
        most_registers: of a thread, where launches start early; 0 for as many as the compiler
            likes. Programs that take all registers of a processor keep the next launch out until
            they end.
        most_spilled: bytes of registers that a thread of it spills where it was timed, and is
            quicker than forms that spill none; 0 for what any may spill.
    """

    function: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    num_warps: int = 4
    num_stages: int = 2
    matrix: str = ""
    most_registers: int = 0
    most_spilled: int = 0

    @property
    def is_early(self) -> bool:
        """Whether the function has a constant EARLY: it may start before the launch in front of it
        has ended, and waits for it by itself (`templates.early`).
        """
        return _EARLY in self.function.arg_names

    def run(self) -> Any:
        """Launch on the current stream, or interpret; returns what Triton compiled, if it did.

        Raises: CompileFailure if Triton cannot compile the function here.
        """
        early = self.is_early and starts_early()
        try:
            return self.function[self.grid](
                **self.arguments, **self.constants_on(early=early), **self.options_on(early=early)
            )
        except Exception as error:
            if not _COMPILERS & {kind.__name__ for kind in type(error).__mro__}:
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CompileFailure(
                f"Triton cannot compile {self.function.__name__} here: {lines[-1].strip()}",
                advice="choose another kernel: --forbid NAME, see metainfer explain",
            ) from error

    def constants_on(self, *, early: bool) -> dict[str, Any]:
        """Constants on a device.

        Args:
            early: whether launches start early on it.
        """
        return {**self.constants, _EARLY: early} if self.is_early else dict(self.constants)

    def options_on(self, *, early: bool) -> dict[str, Any]:
        """What Triton is told beside arguments and constants, on the same terms."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.is_early and early:
            options["launch_pdl"] = True
            if self.most_registers:
                options["maxnreg"] = self.most_registers
        return options


class Bound:
    """A launch that is run many times, always on the same arguments.

    The first time Triton finds the compiled form by the arguments' types and values, which takes
    more of the host's time than most launches take of the device's; from then on that form is
    launched as it is, tensors as their addresses.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._again: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Launch on the current stream, or interpret. Raises: CompileFailure as `Launch.run`."""
        if self._again is not None:
            self._again()
            return
        compiled = self._launch.run()
        self._again = self._launch.run if compiled is None else self._ready(compiled)

    def _ready(self, compiled: Any) -> Callable[[], object]:
        launch = self._launch
        given = {
            **launch.arguments,
            **launch.constants_on(early=launch.is_early and starts_early()),
        }
        grid = (*launch.grid, 1, 1)[:3]
        # All parameters in order, as Triton hands them on itself.
        return partial(compiled[grid], *(_address(given[n]) for n in launch.function.arg_names))


def _address(argument: Argument) -> Argument:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return tuple(map(_address, argument)) if isinstance(argument, tuple) else argument


@cache
def starts_early() -> bool:
    """Whether the devices of this process start launches early."""
    if is_interpreting() or not torch.cuda.is_available():
        return False
    platform = "hip" if torch.version.hip else "cuda"
    return EARLY in features_of(platform, torch.cuda.get_device_capability())


# What Triton raises while it compiles; by name, since it may not be installed.
_COMPILERS = {"CompilationError", "OutOfResources", "PTXASError"}
Launches = Callable[[TorchCall], Sequence[Launch]]


@dataclass(frozen=True)
class TritonBinder:
    """What a Triton kernel's record carries.

    Attributes:
        launches: what one call launches, in order; it touches no tensor's contents.
    """

    launches: Launches

    def bind(self, call: TorchCall) -> Callable[[], None]:
        """A function without arguments that runs the call.

        Raises: Unsupported if Triton cannot run here.
        """
        prepare(_device_of(call))
        made = tuple(map(Bound, self.launches(call)))

        def run() -> None:
            for launch in made:
                launch()

        return run

    def run(self, call: TorchCall) -> None:
        """Bind and run once."""
        self.bind(call)()


def _device_of(call: TorchCall) -> str:
    """Type of the device that a call's results, or its states, lie on."""
    for output in call.outputs:
        return output.device.type
    for data in call.inputs:
        if isinstance(data, torch.Tensor):
            return data.device.type
    return "cpu"
