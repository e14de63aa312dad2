"""Command lists: a fixed sequence of kernel calls that one C++ call runs on all threads.

The caller keeps the memory behind the pointers alive (and in place) as long as the program is used.
"""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from metainfer.backends.cpu.build import Library, library
from metainfer.backends.cpu.kernels import KERNELS
from metainfer.ir.errors import TypeMismatch

_MAX_ARGS, _MAX_FLOATS = 16, 4


class _Command(ctypes.Structure):
    """Laid out as runtime.cpp's Command."""

    _fields_ = (
        ("kernel", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("pointers", ctypes.c_void_p * _MAX_ARGS),
        ("offsets", ctypes.c_int64 * _MAX_ARGS),
        ("scales", ctypes.c_int64 * _MAX_ARGS),
        ("dims", ctypes.c_int32 * _MAX_ARGS),
        ("floats", ctypes.c_float * _MAX_FLOATS),
    )


@dataclass(frozen=True)
class DimArg:
    """An integer argument ``offset + scale * dims[index]``, evaluated at each run."""

    index: int
    scale: int = 1
    offset: int = 0


class Program:
    """A built command list. Runs of all programs of a process take turns on one thread team."""

    def __init__(
        self, kernels: Library, names: Sequence[str], commands: Sequence[_Command]
    ) -> None:
        self._library = kernels
        self.names = tuple(names)
        self._commands = (_Command * len(commands))(*commands)
        self.num_dims = 1 + max((d for c in commands for d in c.dims), default=-1)
        # Buffers of the C call, reused; the lock is for callers on several threads.
        self._dims = (ctypes.c_int64 * max(1, self.num_dims))()
        self._lock = threading.Lock()

    def run(self, dims: Sequence[int] = ()) -> None:
        """Run all commands in order; the interpreter lock is released meanwhile.

        Raises: TypeMismatch if a command needs a dim that is not given.
        """
        self._run(dims, None)

    def profile(self, dims: Sequence[int] = ()) -> list[tuple[str, float]]:
        """Run, and return (kernel, microseconds) of each command, its barrier included."""
        times = (ctypes.c_double * max(1, len(self.names)))()
        self._run(dims, ctypes.addressof(times))
        return [(name, times[i]) for i, name in enumerate(self.names)]

    def set_pointer(self, command: int, pointer: int, address: int) -> None:
        """Put another address in place of one pointer of one command."""
        _check_pointer(self.names[command], pointer, address)
        with self._lock:
            self._commands[command].pointers[pointer] = address or None

    def _run(self, dims: Sequence[int], times: int | None) -> None:
        if len(dims) < self.num_dims:
            raise TypeMismatch(
                f"the program reads {self.num_dims} dims, {len(dims)} given",
                advice="pass one number for every DimArg index",
            )
        with self._lock:
            for i in range(self.num_dims):
                self._dims[i] = dims[i]
            self._library.handle.mi_run(
                ctypes.addressof(self._commands),
                len(self.names),
                ctypes.addressof(self._dims),
                times,
            )


class ProgramBuilder:
    """Collects commands, each checked against its kernel's signature."""

    def __init__(self, kernels: Library | None = None) -> None:
        self._library = kernels or library()
        self._names: list[str] = []
        self._commands: list[_Command] = []

    def add(
        self,
        kernel: str,
        pointers: Sequence[int],
        ints: Sequence[int | DimArg] = (),
        floats: Sequence[float] = (),
    ) -> int:
        """Append one call and return its index.

        Raises: TypeMismatch if the kernel is unknown, the counts are not those of its signature, a
            needed pointer is 0, or the weight format is not one the kernel has.
        """
        _check_call(kernel, pointers, ints, floats)
        command = _Command(kernel=self._library.kernels[kernel])
        for i, address in enumerate(pointers):
            command.pointers[i] = address or None
        for i in range(_MAX_ARGS):
            command.dims[i] = -1
        for i, value in enumerate(ints):
            if isinstance(value, DimArg):
                command.dims[i] = value.index
                command.scales[i] = value.scale
                command.offsets[i] = value.offset
            else:
                command.offsets[i] = value
        for i, number in enumerate(floats):
            command.floats[i] = number
        self._names.append(kernel)
        self._commands.append(command)
        return len(self._commands) - 1

    def __len__(self) -> int:
        """Number of commands so far."""
        return len(self._commands)

    def build(self) -> Program:
        """Freeze the commands so far into a program."""
        return Program(self._library, self._names, self._commands)


def call(
    kernel: str,
    pointers: Sequence[int],
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
    kernels: Library | None = None,
) -> None:
    """Run one kernel by itself.

    Raises: TypeMismatch as ProgramBuilder.add does.
    """
    builder = ProgramBuilder(kernels)
    builder.add(kernel, pointers, ints, floats)
    builder.build().run()


def set_num_threads(count: int, kernels: Library | None = None) -> None:
    """Set the size of the thread team from the next run on; 0: one per processor given to us."""
    (kernels or library()).handle.mi_set_num_threads(count)


def num_threads(kernels: Library | None = None) -> int:
    """Return the size of the thread team."""
    return int((kernels or library()).handle.mi_num_threads())


def _check_call(
    kernel: str,
    pointers: Sequence[int],
    ints: Sequence[int | DimArg],
    floats: Sequence[float],
) -> None:
    signature = KERNELS.get(kernel)
    if signature is None:
        raise TypeMismatch(
            f"unknown CPU kernel {kernel!r}", advice=f"known: {', '.join(sorted(KERNELS))}"
        )
    for kind, given, names in (
        ("pointers", pointers, signature.pointers),
        ("ints", ints, signature.ints),
        ("floats", floats, signature.floats),
    ):
        if len(given) != len(names):
            raise TypeMismatch(
                f"{kernel} takes {len(names)} {kind}, {len(given)} given",
                advice=f"{kind}: {' '.join(names)}",
            )
    for i, address in enumerate(pointers):
        _check_pointer(kernel, i, address)
    if signature.formats and ints[signature.ints.index("format")] not in signature.formats:
        raise TypeMismatch(
            f"{kernel} has no weight format {ints[signature.ints.index('format')]}",
            advice=f"formats: {signature.formats} of kernels.FORMATS",
        )


def _check_pointer(kernel: str, index: int, address: int) -> None:
    name = KERNELS[kernel].pointers[index]
    if address == 0 and not name.endswith("?"):
        raise TypeMismatch(f"{kernel}: pointer {name!r} is 0", advice="it is not optional")
