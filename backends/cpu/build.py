"""Compile the C++ kernels on first use, once per machine and compiler, and load them.

The library lies in the user's cache folder under a name that hashes all that it depends on, and
appears there whole or not at all, so that processes may build at the same time.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from metainfer.ir.errors import Unsupported

_FOLDER = Path(__file__).resolve().parent
_FLAGS = ("-std=c++20", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-pthread")
_COMPILERS = ("g++", "c++", "clang++")
_PARALLEL_COMPILES = 2
_ERROR_LINES = 12


@dataclass(frozen=True)
class Library:
    """The loaded kernels.

    Attributes:
        handle: the shared library, its functions' types declared.
        kernels: number of each kernel by name.
        instruction_set: "avx512-vnni", "avx512", "avx2" or "scalar".
        path: where it lies.
    """

    handle: ctypes.CDLL
    kernels: dict[str, int]
    instruction_set: str
    path: Path


def available() -> tuple[bool, str]:
    """Say whether the kernels can be used here, and why or why not, without compiling."""
    compiler = _find_compiler()
    if compiler is not None:
        return True, f"compiled by {compiler} on first use"
    return False, _no_compiler().what


@cache
def library(scalar: bool = False) -> Library:
    """Build the kernels if need be, and load them.

    Args:
        scalar: plain C++ without vector intrinsics (slow; what the others are tested against).

    Raises: Unsupported if there is no C++ compiler, or it refuses the sources.
    """
    path = _build(scalar)
    handle = ctypes.CDLL(str(path))
    handle.mi_kernel_name.restype = ctypes.c_char_p
    handle.mi_instruction_set.restype = ctypes.c_char_p
    handle.mi_set_num_threads.argtypes = [ctypes.c_int]
    handle.mi_set_num_threads.restype = None
    handle.mi_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    handle.mi_run.restype = None
    count = int(handle.mi_kernel_count())
    kernels = {handle.mi_kernel_name(i).decode(): i for i in range(count)}
    return Library(handle, kernels, handle.mi_instruction_set().decode(), path)


def _find_compiler() -> str | None:
    """Return the compiler to use: $CXX if set, else the first of the usual ones."""
    wanted = os.environ.get("CXX")
    candidates = (wanted,) if wanted else _COMPILERS
    return next((path for name in candidates if (path := shutil.which(name))), None)


def _no_compiler() -> Unsupported:
    wanted = os.environ.get("CXX")
    tried = f"$CXX = {wanted!r}" if wanted else ", ".join(_COMPILERS)
    return Unsupported(
        f"no C++ compiler for the CPU kernels (tried {tried})",
        advice="install g++ 11 or clang++ 14 or newer, or set CXX to one",
    )


def _flags(scalar: bool) -> tuple[str, ...]:
    is_arm = platform.machine() in ("aarch64", "arm64")
    tuning = "-mcpu=native" if is_arm else "-march=native"
    # At -O3 the plain form's loops (tests, and machines without AVX2) compile half a minute a file.
    level = "-O2" if scalar or is_arm else "-O3"
    return (*_FLAGS, tuning, level, *(("-DMETAINFER_SCALAR",) if scalar else ()))


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "metainfer"


def _cpu_features() -> str:
    """Text that changes with what -march=native means (a home may be shared by machines)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    keys = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    digest = hashlib.sha256()
    for text in (compiler, version.stdout, *flags, _cpu_features()):
        digest.update(text.encode() + b"\0")
    for source in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _build(scalar: bool) -> Path:
    compiler = _find_compiler()
    if compiler is None:
        raise _no_compiler()
    flags = _flags(scalar)
    folder = _cache_folder()
    target = folder / f"cpu-kernels-{_key(compiler, flags)}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
        objects = _compile(compiler, flags, Path(work))
        made = Path(work) / target.name
        link = [compiler, "-shared", "-pthread", "-o", str(made), *map(str, objects)]
        _check(subprocess.run(link, capture_output=True, text=True, check=False), compiler)
        os.replace(made, target)
    return target


def _compile(compiler: str, flags: tuple[str, ...], work: Path) -> list[Path]:
    """Compile all sources, the longest files first, a few at a time."""
    sources = sorted(_FOLDER.glob("*.cpp"), key=lambda path: -path.stat().st_size)

    def compile_one(source: Path) -> Path:
        target = work / f"{source.stem}.o"
        command = [compiler, *flags, "-c", str(source), "-o", str(target)]
        _check(subprocess.run(command, capture_output=True, text=True, check=False), compiler)
        return target

    with ThreadPoolExecutor(_PARALLEL_COMPILES) as pool:
        return list(pool.map(compile_one, sources))


def _check(done: subprocess.CompletedProcess[str], compiler: str) -> None:
    if done.returncode == 0:
        return
    lines = done.stderr.splitlines()
    errors = [line for line in lines if "error" in line.lower()] or lines
    raise Unsupported(
        f"{compiler} cannot compile the CPU kernels",
        text="\n".join(errors[:_ERROR_LINES]),
        advice="set CXX to g++ 11 or clang++ 14 or newer",
    )
