"""Groups that hold a collective: formed on GPUs, the same on all ranks, split where forbidden."""

from typing import Any

import numpy as np
import pytest
from pass_oracle import target_for
from ranks import rank_target

from metainfer.backends.registry import installed
from metainfer.compiler.cost import CostModel
from metainfer.hardware import load_machine
from metainfer.ir.graph import Module
from metainfer.ir.options import Options
from metainfer.ir.parser import parse_module
from metainfer.ir.simulate import RankInput, simulate
from metainfer.ir.strategy import Strategy
from metainfer.ir.types import Mesh
from metainfer.ir.verify import verify_module
from metainfer.passes.candidates import candidates_of, query_of
from metainfer.passes.fuse import fuse
from metainfer.passes.pipeline import pass_named, run_passes
from metainfer.passes.target import Report, Target
from metainfer.runtime.self_test import trials

KIND = "all_reduce_add_rms_norm"
MESH = (("tp", 2),)


def block_end(stream: str, weight: str, computed: bool = False) -> Module:
    one = f"""%6 = full() {{dtype = "{weight}", shape = (), value = 1.0}} : {weight}[]
        %7 = add(@w, %6) : {weight}[24]""" if computed else ""  # fmt: skip
    return parse_module(f"""module m {{
      mesh (tp=2)
      dim T in [1, 64]
      main(%x: {stream}[T,16], %r: {stream}[T,24]) {{
        weights {{
          @down : {stream}[24,16]
          @w : {weight}[24]
        }}
        %0 = linear(%x, @down) : {stream}[T,24]
        %1 = all_reduce(%0) {{axis = "tp", ranks = 2}} : {stream}[T,24]
        %2 = add(%r, %1) : {stream}[T,24]
        {one}
        %3 = rms_norm(%2, {"%7" if computed else "@w"}) {{eps = 1e-06}} : {stream}[T,24]
        return %2, %3
      }}
    }}""")


def kinds(module: Module) -> list[str]:
    return [str(op.attr.get("kind", op.name)) for op in module.main.ops]


def numbers_of(module: Module) -> list[np.ndarray]:
    """First rank's results; the ranks' inputs differ, so that a sum of one shows."""
    rng = np.random.default_rng(2)
    values = {v.name: v.tensor for v in (*module.main.inputs, *module.main.weights)}
    data = {
        name: [rng.uniform(-1, 1, t.concrete({"T": 3})).astype(t.dtype.numpy) for _ in "01"]  # type: ignore[union-attr]
        for name, t in values.items()
    }
    given = [RankInput([data["%x"][n], data["%r"][0]], {}, {}) for n in (0, 1)]
    results = simulate(module, given, lambda name: data[f"@{name}"][0])
    for one, two in zip(results[0].outputs, results[1].outputs, strict=True):
        np.testing.assert_array_equal(one, two)
    return list(results[0].outputs)


@pytest.mark.parametrize("weight", ["bf16", "f32"])
@pytest.mark.parametrize("stream", ["bf16", "f32"])
def test_a_group_is_what_its_ops_were(stream: str, weight: str) -> None:
    before, target = block_end(stream, weight), rank_target(MESH)
    after = fuse(before, target)
    verify_module(after)
    assert kinds(after) == ["linear", KIND]
    for old, new in zip(numbers_of(before), numbers_of(after), strict=True):
        np.testing.assert_array_equal(old, new)
    (decision,) = [d for d in target.report.decisions if d.chosen == KIND]
    assert "bytes and 2 launches fewer" in decision.reason


def test_a_norm_by_weight_plus_one_is_left_alone() -> None:
    """Field fault B41: the group is about weights, and this one is computed in the step."""
    after = fuse(block_end("bf16", "f32", computed=True), rank_target(MESH))
    assert KIND not in kinds(after)


def test_a_cpu_keeps_its_own_norm() -> None:
    after = fuse(block_end("f32", "f32"), target_for("2xcpu"))
    assert kinds(after) == ["linear", "all_reduce", "add_rms_norm"]


def target_of(**options: Any) -> Target:
    backends, machine, mesh = installed(), load_machine("8xpcie"), Mesh(MESH)
    costs = CostModel(backends.layouts, machine, mesh)
    strategy = Strategy("decode", mesh)
    return Target(machine, strategy, Options(**options), backends.kernels, costs, Report())


def compiled(**options: Any) -> Module:
    target = target_of(**options)
    passes = [pass_named(name) for name in ("fuse", "layout", "select", "collectives")]
    return run_passes(block_end("bf16", "f32"), target, passes)[0]


def test_algorithms_are_chosen_and_tested_by_themselves() -> None:
    made = compiled()
    group = made.main.ops[-1]
    assert group.choices
    assert all(c.kernel.startswith(f"ranks.{KIND}_") for c in group.choices)
    found = trials([made])
    assert found
    for trial in found:
        assert trial.op.name == "all_reduce"
        assert trial.kernel.startswith("ranks.all_reduce_")
        assert KIND not in trial.kernel


def test_a_group_whose_kernels_are_forbidden_is_split() -> None:
    kernels = [k.name for k in installed().kernels.all() if k.op == KIND]
    made = compiled(forbids=tuple(kernels))
    assert kinds(made) == ["linear", "all_reduce", "add_rms_norm"]
    assert all(op.choices for op in made.main.ops)


def bans(**options: Any) -> dict[str, str]:
    """What is forbidden for the sum of `block_end`, and why."""
    target, module = target_of(**options), block_end("bf16", "bf16")
    op = module.main.ops[1]
    query = query_of(op, target, module.limits(), frozenset())
    return {c.kernel.name: c.ban for c in candidates_of(op, query, target) if c.ban}


def test_codes_are_sent_only_where_asked_and_never_where_numbers_are_exact() -> None:
    fp8, pull = "ranks.all_reduce_two_shot_fp8", "ranks.all_reduce_one_shot_pull"
    found = bans()
    assert found[fp8] == "it changes numbers by up to 1.2e-01: only with --compress-collectives fp8"
    assert found[pull].startswith("policy of the machine against *_pull: direct-attached boards")
    assert fp8 not in bans(compress_collectives="fp8")
