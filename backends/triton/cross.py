"""Cross-compiling: what a launch takes on a card that need not be here.

`triton.compile` with a given target touches no driver. It does not hold shared memory against the
card either, and its registers and spills are known only to the assembler: both are read here, and
kept on disk under a hash of all that they depend on.
"""

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from metainfer.backends.triton.interpreter import is_interpreting
from metainfer.backends.triton.launch import EARLY, Argument, Launch
from metainfer.hardware.device import Device
from metainfer.ir.errors import Unsupported
from metainfer.ir.whole_file import write_file

_VERSION = 1  # of what is kept on disk
# Of a thread: a dozen registers, stored and loaded. Fewer cost less than a smaller tile would. A
# launch that was timed may have its own (`Launch.most_spilled`).
MOST_SPILLED_BYTES = 96
_CUDA_WARP, _AMD_WARP = 32, 64
_OLDEST_CUDA = 80  # that Triton's matrix products are made for
_MATRIX = re.compile(r"\b(wgmma\.mma_async\.\S+|mma\.sync\.\S+|tcgen05\.mma\.\S+|v_mfma_\w+)")
_TYPES = {
    torch.bool: "*i1", torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float32: "*fp32", torch.float64: "*fp64", torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5", torch.float8_e8m0fnu: "*u8",
}  # fmt: skip
_DIVISIBLE = [["tt.divisibility", 16]]
# How instructions spell an operand type; those of sm_100 name what they multiply by its width. The
# scaled kinds come first: their instructions name the plain types, too.
_SPELLED = {
    "mxf8": ("kind::mxf8f6f4",), "mxf4": ("scale_vec::2X",), "nvf4": ("scale_vec::4X",),
    "bf16": ("bf16", "kind::f16"), "f16": ("f16", "kind::f16"),
    "f8e4m3": ("e4m3", "kind::f8f6f4"), "tf32": ("tf32", "kind::tf32"),
    "i8": ("s8", "kind::i8"),
}  # fmt: skip
_SCALED = frozenset({"mxf8", "mxf4", "nvf4"})  # multiply blocks with their scales


@dataclass(frozen=True)
class Resources:
    """What one launch takes on a card, read from its code.

    Attributes:
        shared_bytes: shared memory of a program.
        registers: of a thread.
        spilled_bytes: stores and loads of registers that did not fit, per thread.
        matrix: matrix instructions in the code, each once.
    """

    shared_bytes: int
    registers: int
    spilled_bytes: int
    matrix: tuple[str, ...]


def resources_of(launch: Launch, device: Device) -> Resources:
    """Compile a launch for a device, or read from disk what that gave before.

    Raises: Unsupported if Triton refuses the code, knows no such device, or interprets.
    """
    if is_interpreting():
        raise Unsupported(
            "a process that interprets Triton cannot compile",
            advice="unset TRITON_INTERPRET before Python starts",
        )
    signature, constants, attrs = _specialised(launch, device)
    digest = _digest(launch, device, signature, constants, attrs)
    path = cache_folder() / "resources" / f"{digest}.json"
    found, origin = _FOUND.get(digest), ""
    if found is None:
        found, origin = _packaged().get(digest), PACKAGED
    if found is None:
        found, origin = _read(path), KEPT
    if found is None:
        found, origin = _compiled(launch, device), COMPILED
        _keep(path, found)
    _FOUND[digest] = found
    if origin:
        _ORIGINS[origin] += 1
    return found


def origins() -> dict[str, int]:
    """How many figures this process took from the package, from disk, and from the compiler."""
    return {name: _ORIGINS[name] for name in (PACKAGED, KEPT, COMPILED)}


def faults_of(
    resources: Resources, launch: Launch, device: Device, *, spills: bool = True
) -> list[str]:
    """What keeps a compiled launch from being right for a device, one line each.

    Args:
        resources: what it takes.
        launch: what was compiled.
        device: the card.
        spills: whether spilled registers count; they cost time and change no number.
    """
    found = []
    if resources.shared_bytes > device.smem_per_block_bytes:
        found.append(
            f"{resources.shared_bytes:,} bytes of shared memory, "
            f"{device.smem_per_block_bytes:,} are there"
        )
    if spills and resources.spilled_bytes > max(MOST_SPILLED_BYTES, launch.most_spilled):
        found.append(f"{resources.spilled_bytes:,} bytes of registers spilled")
    others = [i for i in resources.matrix if not _takes(i, launch.matrix)] if launch.matrix else []
    if others or (launch.matrix and not resources.matrix):
        got = " and ".join(dict.fromkeys(spoken(matrix_type(i)) for i in others)) or "none"
        emitted = f" ({', '.join(others)})" if others else ""
        found.append(f"wanted a matrix instruction for {spoken(launch.matrix)}, got {got}{emitted}")
    return found


def _takes(instruction: str, operand: str) -> bool:
    """Whether an instruction multiplies an operand type, scaled where that is what it means."""
    is_scaled = "block_scale" in instruction or ".kind::mx" in instruction
    if is_scaled != (operand in _SCALED):
        return False
    return any(f".{name}" in instruction for name in _SPELLED.get(operand, (operand,)))


def matrix_type(instruction: str) -> str:
    """The operand type of a matrix instruction, as `Launch.matrix` names it; "" if unknown."""
    return next((name for name in _SPELLED if _takes(instruction, name)), "")


def spoken(matrix: str) -> str:
    """Name an operand type of a matrix instruction: ``bf16``, ``block-scaled mxf8``."""
    return f"block-scaled {matrix}" if matrix in _SCALED else (matrix or "another type")


def target_of(device: Device) -> Any:
    """Triton's name of a device.

    Raises: Unsupported for a device that Triton does not compile for.
    """
    from triton.backends.compiler import GPUTarget

    match = re.fullmatch(r"sm_(\d+)|(gfx\w+)", device.capability)
    # For targets it never heard of Triton ends the process.
    known = match is not None and (match[2] is not None or int(match[1]) >= _OLDEST_CUDA)
    if match is None or not known or not device.has("triton"):
        raise Unsupported(
            f"Triton does not compile for {device.name} ({device.capability})",
            advice="its file names a capability such as sm_90 or gfx942 and the feature triton",
        )
    if match[1]:
        return GPUTarget("cuda", int(match[1]), _CUDA_WARP)
    return GPUTarget("hip", match[2], _AMD_WARP)


# --- what Triton is asked to compile ----------------------------------------------------------


def _specialised(
    launch: Launch, device: Device
) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Signature, constants and attributes, specialised as a launch on a GPU would be.

    Numbers equal to 1 become constants; addresses and numbers divisible by 16 are marked.
    """
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attrs: dict[Any, Any] = {}
    chosen = launch.constants_on(early=device.has(EARLY))
    for index, name in enumerate(launch.function.arg_names):
        if name in chosen:
            signature[name] = "constexpr"
            constants[(index,)] = chosen[name]
            continue
        signature[name] = _type_of(launch.arguments[name])
        if launch.function.params[index].do_not_specialize:
            continue
        for path, value in _leaves(launch.arguments[name], (index,)):
            if isinstance(value, int) and not isinstance(value, bool) and value == 1:
                constants[path] = 1
                signature[name] = _replaced(signature[name], path[1:], "constexpr")
            elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attrs[path] = _DIVISIBLE
    return signature, constants, attrs


def _leaves(value: Argument, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    if isinstance(value, tuple):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _replaced(type_: Any, path: tuple[int, ...], by: str) -> Any:
    if not path:
        return by
    first, rest = path[0], path[1:]
    return (*type_[:first], _replaced(type_[first], rest, by), *type_[first + 1 :])


def _type_of(value: Argument) -> Any:
    if isinstance(value, tuple):
        return tuple(_type_of(v) for v in value)
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if hasattr(value, "block_shape"):
        # A tensor described for the copy engine, the layout of its boxes in shared memory with it.
        return f"tensordesc<{_TYPES[value.base.dtype][1:]}{value.block_shape},{value.layout!r}>"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def compiled_for(launch: Launch, device: Device) -> Any:
    """What Triton compiles a launch to for a device: its assembly and what it takes.

    Raises: Unsupported if Triton refuses the code, or knows no such device.
    """
    import triton

    signature, constants, attrs = _specialised(launch, device)
    target, kind = target_of(device), _source_kind(launch)
    source = kind(launch.function, signature, constants, attrs)
    options = launch.options_on(early=device.has(EARLY))
    try:
        return triton.compile(source, target=target, options=options)
    except Exception as error:  # Triton's passes raise whatever they like
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Unsupported(
            f"Triton cannot compile {launch.function.__name__} for {device.name}",
            text="\n".join(lines[-3:]),
            advice="another tile or kernel may fit; --forbid the one named",
        ) from error


def _compiled(launch: Launch, device: Device) -> Resources:
    made, target = compiled_for(launch, device), target_of(device)
    shared = int(made.metadata.shared)
    if target.backend == "cuda":
        code = made.asm["ptx"]
        registers, spilled = _assembled(code, target.arch)
    else:
        code = made.asm["amdgcn"]
        registers, spilled = _amd_registers(code)
    return Resources(shared, registers, spilled, tuple(sorted(set(_MATRIX.findall(code)))))


def _source_kind(launch: Launch) -> Any:
    """What Triton compiles: a function of its own language, or of Gluon."""
    if launch.function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Registers and spilled bytes, from the assembler that Triton brings along."""
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    wanted = re.search(r"\.target (\S+?)[,\s]", ptx)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool.path, "-v", f"-arch={wanted[1] if wanted else f'sm_{arch}'}", file.name]
        done = subprocess.run(
            [*command, "-o", os.devnull], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise Unsupported(
            f"the assembler refuses code for sm_{arch}",
            text=done.stderr.strip()[:500],
            advice="is Triton complete? reinstall it",
        )
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)]
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    return max(registers, default=0), sum(map(int, spills))


def _amd_registers(code: str) -> tuple[int, int]:
    """Vector registers, and spilled ones in bytes of a thread."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", code)
        return int(found[1]) if found else 0

    return number("vgpr_count"), 4 * (number("vgpr_spill_count") + number("sgpr_spill_count"))


# --- what is kept on disk -----------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled figures and emitted sources are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "metainfer" / "triton"


# What this process asked for so far, by digest; and where that came from.
_FOUND: dict[str, Resources] = {}
_ORIGINS: Counter[str] = Counter()
PACKAGED, KEPT, COMPILED = "came with the package", "were on disk", "were compiled now"
# Figures of the kernels of known models on known cards, so that a first plan needs no compiler: a
# file for each version of Triton that was asked.
FIGURES = Path(__file__).with_name("figures")


def figures_path(folder: Path = FIGURES) -> Path:
    """Where a folder has the figures of the installed Triton."""
    import triton

    return folder / f"{triton.__version__}.json"


@cache
def _packaged() -> dict[str, Resources]:
    path = figures_path()
    data = json.loads(path.read_text()) if path.exists() else {}
    return {digest: Resources(f[0], f[1], f[2], tuple(f[3])) for digest, f in data.items()}


def write_figures(path: Path) -> None:
    """Write all figures that this process asked for, one line each, sorted.

    Args:
        path: a file, or a folder of files by version of Triton.
    """
    if path.is_dir():
        path = figures_path(path)
    lines = [
        f"{json.dumps(digest)}: "
        + json.dumps([r.shared_bytes, r.registers, r.spilled_bytes, list(r.matrix)])
        for digest, r in sorted(_FOUND.items())
    ]
    write_file(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _digest(launch: Launch, device: Device, signature: Any, constants: Any, attrs: Any) -> str:
    import triton

    def text(value: Any) -> str:
        return str(getattr(value, "cache_key", value))

    parts = (
        _VERSION, _order_text(), triton.__version__, target_of(device), launch.function.cache_key,
        sorted(signature.items()), sorted((k, text(v)) for k, v in constants.items()),
        sorted(attrs.items()), launch.num_warps, launch.num_stages,
        *((launch.most_registers,) if launch.most_registers else ()),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@cache
def _order_text() -> str:
    """A hash of what Triton calls while it compiles, and puts into no key of its own."""
    path = Path(__file__).parent / "templates" / "order.py"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(path: Path) -> Resources | None:
    try:
        data = json.loads(path.read_text())
        return Resources(**{**data, "matrix": tuple(data["matrix"])})
    except (OSError, ValueError, TypeError, KeyError):
        # Absent or damaged: it is made anew.
        return None


def _keep(path: Path, made: Resources) -> None:
    """Spare the next process the compiling; where nothing can be written, it compiles again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(asdict(made)).encode(), lasting=False)
