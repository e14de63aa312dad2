"""run, bench, verify, diff and opt on a tiny random model and on a module."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from metainfer.cli.app import app

SMALL = ("--max-tokens", "32", "--max-sequences", "2", "--max-context", "96")


# --- run ---------------------------------------------------------------------------------------


def test_run_streams_the_answer_and_states_the_plan(cli, plan: Path) -> None:
    result = cli("run", plan, "abc", "--raw", "--max-new-tokens", "5")
    assert result.code == 0
    again = json.loads(cli("run", plan, "abc", "--max-new-tokens", "5", "--json").out)
    assert result.out == again["text"] + "\n"
    assert again["prompt_tokens"] == 3
    assert again["generated_tokens"] == 5
    assert f"plan {again['plan_hash']}" in result.err


def test_run_reads_the_prompt_from_standard_input(plan: Path) -> None:
    arguments = ["run", str(plan), "-", "--max-new-tokens", "3", "--json"]
    data = json.loads(CliRunner().invoke(app, arguments, input="abcd").stdout)
    assert data["prompt_tokens"] == 4


def test_run_samples_by_seed(cli, plan: Path) -> None:
    def ids(seed: int) -> list[int]:
        arguments = ("--temperature", "1.5", "--seed", str(seed), "--max-new-tokens", "12")
        return json.loads(cli("run", plan, "abc", *arguments, "--json").out)["token_ids"]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_trace_holds_measured_and_predicted(cli, plan: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    plain = json.loads(cli("run", plan, "abc", "--max-new-tokens", "4", "--json").out)
    traced = cli("run", plan, "abc", "--max-new-tokens", "4", "--json", "--trace", file)
    assert json.loads(traced.out)["token_ids"] == plain["token_ids"]
    data = json.loads(file.read_text())
    assert data["otherData"]["plan_hash"] == plain["plan_hash"]
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert {e["cat"] for e in slices} == {"measured", "predicted"}
    assert {e["args"]["place"].split(",")[0] for e in slices} == {"prefill", "decode"}
    assert "predicted us" in traced.err


def test_the_variable_makes_bench_trace_too(
    cli, plan: Path, module_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = ("--prompt-tokens", 5, "--new-tokens", 3, "--batch", 2, "--repeat", 1)
    for verb, phases in (((plan, *workload), {"prefill", "decode"}), ((module_plan,), {"call"})):
        file = tmp_path / "bench.json"
        monkeypatch.setenv("METAINFER_TRACE", str(file))
        result = cli("bench", *verb, "--json")
        found = json.loads(result.out)["measurements"]
        assert {m["phase"] for m in found} == phases
        data = json.loads(file.read_text())
        slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
        assert {e["args"]["place"].split(",")[0] for e in slices} == phases
        assert f"wrote {file}" in result.err
        file.unlink()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, ["no prompt is given"]),
        (("",), 2, ["the prompt is empty"]),
        (("abc", "--raw", "--system", "x"), 2, ["--system needs a chat"]),
        (("abc", "--temperature", "-1"), 2, ["temperature is -1.0"]),
        (("abc", "--input", "x=y.npy"), 2, ["for modules"]),
        (("a" * 97, "--max-new-tokens", "1"), 3, ["longer than the capacity", "max_context"]),
        (("abc", "--weights", "nowhere"), 2, ["nowhere"]),
    ],
)
def test_run_refuses_bad_input(
    cli, plan: Path, arguments: tuple[str, ...], code: int, words: list[str]
) -> None:
    result = cli("run", plan, *arguments)
    assert result.code == code
    assert result.err.startswith("error: ")
    assert all(word in result.err for word in words), result.err


def test_run_of_a_model_says_how_to_compile_it(cli, tiny: Path, tmp_path: Path) -> None:
    for verb in ("run", "explain", "verify", "bench"):
        result = cli(verb, tiny)
        assert result.code == 2
        assert f"metainfer compile {tiny}" in result.err
    assert "no plan at" in cli("run", tmp_path / "missing").err


def test_run_maps_arrays_of_a_module(cli, module_plan: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "y.npz"
    result = cli("run", module_plan, "--input", f"x={tmp_path / 'x.npy'}", "--output", out)
    assert result.code == 0, result.err
    assert "[5, 4]" in result.out
    assert np.load(out)["output0"].shape == (5, 4)
    assert "no array for the input x" in cli("run", module_plan).err
    assert "names no input" in cli("run", module_plan, "--input", "z=a.npy").err
    assert "takes arrays and no prompt: x" in cli("run", module_plan, "hello").err


# --- bench -------------------------------------------------------------------------------------


def test_bench_counts_prefill_and_decode_apart(cli, plan: Path) -> None:
    workload = ("--prompt-tokens", "40", "--new-tokens", "6", "--batch", "2", "--repeat", "2")
    data = json.loads(cli("bench", plan, *workload, "--json").out)
    prefill, decode = data["measurements"]
    assert (prefill["phase"], prefill["count"], prefill["steps"]) == ("prefill", 80, 3)
    # The first token comes from prefill; steps while a prompt is being computed are not counted.
    assert decode["phase"] == "decode"
    assert decode["count"] <= 2 * 5
    for row in data["measurements"]:
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) <= row["median_seconds"] <= max(row["seconds"])
        assert row["predicted_seconds"] > 0
    table = cli("bench", plan, *workload)
    assert data["plan_hash"] in table.out
    assert all(len(line.rstrip()) <= 100 for line in table.out.splitlines())


def test_bench_refuses_what_does_not_fit(cli, plan: Path) -> None:
    result = cli("bench", plan, "--batch", "3")
    assert result.code == 3
    assert "--max-sequences" in result.err
    assert cli("bench", plan, "--size", "B=2", "--repeat", "1").code == 2


def test_bench_of_a_module(cli, module_plan: Path) -> None:
    result = cli("bench", module_plan, "--size", "B=4", "--repeat", "2", "--json")
    (row,) = json.loads(result.out)["measurements"]
    assert (row["what"], row["unit"], len(row["seconds"])) == ("B=4", "calls", 2)
    assert "has no size 'C'" in cli("bench", module_plan, "--size", "C=4").err


# --- verify ------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_verify_of_an_exact_plan(cli, plan: Path) -> None:
    result = cli("verify", plan, "--tokens", "40", "--max-kl", "1e-6")
    assert result.code == 0, result.err
    assert "passed: mean KL at most 1e-06" in result.out
    assert re.search(r"decode, B=2 .* 100.0%", result.out)


def test_verify_reads_a_text_and_measures_its_perplexity(cli, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("ab" * 20)
    result = cli("verify", plan, "--text", tmp_path / "text", "--tokens", "0", "--json")
    data = json.loads(result.out)
    assert data["tokens"] == 40
    walks = {c["name"]: c for c in data["comparisons"]}
    assert walks["prefill, T=2"]["rows"] == 40
    assert walks["prefill, T=2"]["perplexity"] == pytest.approx(
        walks["prefill, T=2"]["reference_perplexity"], rel=1e-3
    )
    assert cli("verify", plan, "--text", tmp_path / "none").code == 2


def test_verify_fails_a_lossy_plan_under_a_tight_limit(cli, tiny: Path, tmp_path: Path) -> None:
    cli("compile", tiny, *SMALL, "--weights", "int4", "--out", tmp_path / "p")
    result = cli("verify", tmp_path / "p", "--tokens", "32", "--max-kl", "1e-6", "--json")
    assert result.code == 1
    data = json.loads(result.out)
    assert not data["passed"]
    assert max(c["mean_kl"] for c in data["comparisons"]) > 1e-6
    assert cli("verify", tmp_path / "p", "--tokens", "32", "--max-kl", "100").code == 0


def test_verify_of_a_module_asks_for_its_file(cli, module_plan: Path, module_file: Path) -> None:
    refused = cli("verify", module_plan)
    assert refused.code == 2
    assert f"--model {module_file}" in refused.err
    result = cli("verify", module_plan, "--model", module_file)
    assert result.code == 0, result.err
    assert "against PyTorch in float32" in result.out


# --- diff --------------------------------------------------------------------------------------


def test_diff_of_equal_plans(cli, plan: Path) -> None:
    result = cli("diff", plan, plan, "--exit-code")
    assert result.code == 0
    assert result.out.startswith("the plans are equal")


def test_diff_names_options_kernels_and_times(cli, tiny: Path, plan: Path, tmp_path: Path) -> None:
    other = tmp_path / "p"
    cli("compile", tiny, *SMALL, "--weights", "int8", "--out", other)
    result = cli("diff", plan, other)
    assert result.code == 0
    assert "weights: auto -> int8" in result.out
    for section in ("options", "capacity", "kernels decode", "predicted decode", "texts"):
        assert f"\n{section}\n" in result.out
    assert cli("diff", plan, other, "--exit-code").code == 1
    text = cli("diff", plan, other, "--text").out
    assert text.startswith("--- a/stage0.")
    assert "+++ b/stage0." in text
    rows = json.loads(cli("diff", plan, other, "--json").out)["rows"]
    assert {"section", "name", "first", "second"} == set(rows[0])


# --- opt ---------------------------------------------------------------------------------------

GRAPH = """\
graph f(%x: f32[T,64]) {
  %0 = silu(%x) : f32[T,64]
  %1 = silu(%x) : f32[T,64]
  %2 = add(%0, %1) : f32[T,64]
  return %2
}
"""


def test_opt_runs_the_passes_named(cli, tmp_path: Path) -> None:
    file = tmp_path / "a.mir"
    file.write_text(GRAPH)
    result = cli("opt", file, "-p", "canonicalize")
    assert result.code == 0, result.err
    assert result.out.count("silu") == 1
    chosen = cli("opt", file, "-p", "canonicalize, select", "--reasons")
    assert " by {" in chosen.out
    assert "select main: " in chosen.err


def test_opt_reads_a_test_case(cli) -> None:
    """The first half, by the passes and for the machine that its header names."""
    cases = Path(__file__).parent.parent / "passes" / "cases"
    case = cases / "fuse" / "on_a_gpu.mir"
    before, _, after = case.read_text().partition("# -----\n")
    assert "hw: 1xh200" in before
    result = cli("opt", case)
    assert result.code == 0, result.err
    assert re.findall(r"fused\[\w+\]", result.out) == re.findall(r"fused\[\w+\]", after) != []
    assert "fused" not in cli("opt", case, "-p", "canonicalize").out


def test_opt_gives_a_module_back_as_it_was(cli, plan: Path) -> None:
    file = plan / "stage0.decode.mir"
    assert cli("opt", file, "-p", "canonicalize").out == file.read_text()


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (GRAPH, ("-p", "fise"), ["unknown pass 'fise'"]),
        (GRAPH, ("--phase", "warmup"), ["unknown phase 'warmup'"]),
        (GRAPH.replace("silu(%x)", "silo(%x)", 1), (), ["silo"]),
        (GRAPH.replace("f32[T,64]\n  return", "f32[T,65]\n  return"), (), ["add"]),
        ("module {", (), ["a.mir: line 1, column"]),
    ],
)
def test_opt_shows_what_is_wrong(
    cli, tmp_path: Path, text: str, arguments: tuple[str, ...], words: list[str]
) -> None:
    file = tmp_path / "a.mir"
    file.write_text(text)
    result = cli("opt", file, *arguments)
    assert result.code == 2
    assert result.out == ""
    assert all(word in result.err for word in words), result.err
