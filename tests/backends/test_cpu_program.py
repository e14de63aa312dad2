"""Command lists, their checks, the thread team, and building the library."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from metainfer.backends.cpu import build, program
from metainfer.backends.cpu.build import available, library
from metainfer.backends.cpu.kernels import FORMATS, KERNELS
from metainfer.backends.cpu.program import DimArg, ProgramBuilder
from metainfer.ir.errors import TypeMismatch, Unsupported

needs_compiler = pytest.mark.skipif(not available()[0], reason="no C++ compiler")


def doubling(x: np.ndarray, y: np.ndarray, repeats: int) -> program.Program:
    """y = 2 x, then y = y + y again and again; rows from dim 0, the width literal."""
    builder = ProgramBuilder()
    width = x.shape[1]
    a, b = x.ctypes.data, y.ctypes.data
    builder.add("scale", [b, a], [DimArg(0), width, width, width], [2.0])
    for _ in range(repeats):
        builder.add("add", [b, b, b], [DimArg(0), width, width, width, width])
    return builder.build()


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_commands_run_in_order_at_the_runs_dims(threads: int) -> None:
    program.set_num_threads(threads)
    assert program.num_threads() == threads
    x, y = np.random.default_rng(0).normal(size=(2, 8, 1000)).astype(np.float32)
    y[:] = 0
    made = doubling(x, y, 30)
    made.run([3])
    np.testing.assert_array_equal(y[:3], x[:3] * 2.0**31)
    np.testing.assert_array_equal(y[3:], 0)
    made.run([8])
    np.testing.assert_array_equal(y, x * 2.0**31)
    program.set_num_threads(0)


@needs_compiler
def test_dims_are_affine() -> None:
    x, y = np.arange(40, dtype=np.float32), np.zeros(40, np.float32)
    builder = ProgramBuilder()
    width = DimArg(1, scale=4, offset=2)
    builder.add("copy_rows", [y.ctypes.data, x.ctypes.data], [1, width, 40, 40])
    builder.build().run([99, 5])
    np.testing.assert_array_equal(y, np.where(np.arange(40) < 22, x, 0))


@needs_compiler
def test_profile_names_every_command_and_its_time() -> None:
    x, y = np.ones((2, 4, 64), np.float32)
    times = doubling(x, y, 3).profile([4])
    assert [name for name, _ in times] == ["scale", "add", "add", "add"]
    assert all(0 < us < 1e6 for _, us in times)


@needs_compiler
def test_set_pointer_redirects_one_command() -> None:
    x, y, z = np.ones((3, 1, 16), np.float32)
    made = doubling(x, y, 0)
    made.set_pointer(0, 0, z.ctypes.data)
    made.run([1])
    np.testing.assert_array_equal(y, 1)
    np.testing.assert_array_equal(z, 2)
    with pytest.raises(TypeMismatch, match="'y' is 0"):
        made.set_pointer(0, 0, 0)


@needs_compiler
def test_bad_calls_are_refused() -> None:
    builder = ProgramBuilder()
    with pytest.raises(TypeMismatch, match="unknown CPU kernel"):
        builder.add("conv", [])
    with pytest.raises(TypeMismatch, match="takes 2 pointers, 1 given"):
        builder.add("silu", [1], [1, 1, 1, 1])
    with pytest.raises(TypeMismatch, match="takes 4 ints"):
        builder.add("silu", [1, 1], [1, 1, 1])
    with pytest.raises(TypeMismatch, match="pointer 'x' is 0"):
        builder.add("silu", [1, 0], [1, 1, 1, 1])
    with pytest.raises(TypeMismatch, match="no weight format 2"):
        builder.add("linear_w8", [1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1, FORMATS["u4/32:f16+f16"]])
    x, y = np.ones((2, 1, 16), np.float32)
    with pytest.raises(TypeMismatch, match="reads 1 dims, 0 given"):
        doubling(x, y, 0).run()


@needs_compiler
@pytest.mark.parametrize("scalar", [False, True])
def test_table_of_signatures_is_the_librarys(scalar: bool) -> None:
    loaded = library(scalar)
    assert set(loaded.kernels) == set(KERNELS)
    assert loaded.handle.mi_command_bytes() == ctypes.sizeof(program._Command)
    assert (loaded.instruction_set == "scalar") == scalar or not scalar
    for signature in KERNELS.values():
        assert len(signature.pointers) <= 16
        assert len(signature.ints) <= 16
        assert len(signature.floats) <= 4


@needs_compiler
def test_programs_of_several_python_threads_take_turns() -> None:
    rng = np.random.default_rng(1)
    xs = rng.normal(size=(4, 4, 500)).astype(np.float32)
    ys = np.zeros_like(xs)

    def work(i: int) -> None:
        made = doubling(xs[i], ys[i], 20)
        for _ in range(50):
            made.run([4])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(ys, xs * 2.0**21)


_FORK = """
import os, numpy as np
from metainfer.backends.cpu import program
program.set_num_threads(2)
def run():
    x = np.ones((4, 64), np.float32); y = np.zeros_like(x)
    program.call("scale", [y.ctypes.data, x.ctypes.data], [4, 64, 64, 64], [3.0])
    assert (y == 3).all()
run()
child = os.fork()
run()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("both")
"""


@needs_compiler
def test_a_forked_child_makes_its_own_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "both\n", done.stderr


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    usable, reason = available()
    assert not usable
    assert "no-such-compiler" in reason
    with pytest.raises(Unsupported, match="set CXX"):
        build._build(False)


@pytest.mark.skipif(os.name != "posix", reason="the stand-in compiler is a shell script")
def test_compile_errors_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "bad-cxx"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(Unsupported, match="no such thing"):
        build._build(False)
    assert list((tmp_path / "cache" / "metainfer").iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="the stand-in compiler is a shell script")
def test_a_build_is_made_once_and_keyed_by_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    compiler = tmp_path / "cxx"
    # Writes its -o file and notes the call.
    compiler.write_text(
        '#!/bin/sh\nfor a; do [ "$p" = -o ] && echo made > "$a"; p="$a"; done\n'
        f'[ "$1" = --version ] || echo call >> {log}\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = build._build(False)
    calls = len(log.read_text().splitlines())
    assert build._build(False) == first
    assert build._build(True) != first
    assert first.read_text() == "made\n"
    assert len(log.read_text().splitlines()) == 2 * calls
