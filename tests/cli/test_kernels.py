"""`metainfer kernels`: checks plans without a GPU, writes sources for reading."""

import json
from pathlib import Path

import pytest

from metainfer.backends.triton import cross


@pytest.fixture(scope="module")
def gpu_plan(cli, plans: Path) -> Path:
    out = plans / "smollm2-8xpcie"
    assert cli("compile", "smollm2", "--hw", "8xpcie", "--out", out).code == 0
    return out


def test_a_plan_is_checked(cli, gpu_plan: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    result = cli("kernels", "check", gpu_plan, "--keep", figures)
    assert result.code == 0, result.out
    assert "101,376 bytes of shared memory a program" in " ".join(result.out.split())
    assert "mma m16n8k16 bf16" in result.out
    assert "every kernel fits its card" in result.out
    assert max(map(len, result.out.splitlines())) <= 100
    assert len(json.loads(figures.read_text())) > 5


def test_faults_are_named_and_the_exit_code_says_so(
    cli, gpu_plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross, "_takes", lambda instruction, operand: False)
    result = cli("kernels", "check", gpu_plan)
    assert result.code == 1
    assert "WRONG" in result.out
    said = " ".join(result.out.split())
    assert "wanted a matrix instruction for bf16, got another type (mma.sync" in said
    assert "kernels are not right for their cards" in result.out


def test_sources_are_written(cli, gpu_plan: Path, tmp_path: Path) -> None:
    result = cli("kernels", "sources", gpu_plan, "--out", tmp_path / "k")
    assert result.code == 0
    names = {path.name.rsplit("_", 1)[0] for path in (tmp_path / "k").glob("*.py")}
    assert {"rms_norm", "rope_kv_write"} <= names
    assert (tmp_path / "k" / "gemm_gated.py").exists()
    for path in (tmp_path / "k").glob("*.py"):
        compile(path.read_text(), str(path), "exec")


def test_a_folder_that_is_no_plan(cli, tmp_path: Path) -> None:
    result = cli("kernels", "check", tmp_path)
    assert result.code == 2
    assert "plan" in result.err


def test_kernels_are_listed_with_what_a_machine_lacks(cli) -> None:
    result = cli("kernels", "list", "--op", "linear", "--hw", "8xpcie")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 100
    rows = {row.split()[0]: row for row in result.out.splitlines() if ".linear" in row}
    assert " yes " in rows["triton.linear_plain_m16"]
    assert " no: cpu " in rows["cpu.linear_w8"]
    listed = json.loads(cli("kernels", "list", "--backend", "ranks", "--json").out)["kernels"]
    assert {k["backend"] for k in listed} == {"ranks"}
    wrong = cli("kernels", "list", "--op", "nothing")
    assert wrong.code == 2
    assert "backends: cpu, cuda, ranks, torch, triton" in wrong.err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("triton.linear_plain_m16", ("requires feature bf16_mma", "def gemm(", "linear of bf16: ")),
        ("triton.attention_split", ("page size is a power of two", "def attention_split(")),
        ("triton.rms_norm", ("a stream of one read", "metainfer kernels sources PLAN")),
        ("cuda.linear_fp8", ("repaired by pad N", "packed as cuda.fp8_cols", "def linear_fp8(")),
        ("cpu.linear_w4a8", ("device is a cpu (this device does not)", "_linear(call, function")),
        ("ranks.all_reduce_library", ("all_reduce by ranks",)),
    ],
)
def test_a_kernel_is_shown(cli, name: str, said: tuple[str, ...]) -> None:
    result = cli("kernels", "show", name, "--hw", "8xpcie")
    assert result.code == 0
    for text in said:
        assert text in result.out, text


def test_an_unknown_kernel_is_told_with_near_names(cli) -> None:
    result = cli("kernels", "show", "triton.linear_plain_m17")
    assert result.code == 2
    assert "did you mean triton.linear_plain_m1" in result.err
