"""What if the machine were another one: plans change as its file does, and explain says why.

The model is Qwen3-MoE's large form with two of its 94 layers: the same widths, the same decisions.
"""

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import metainfer
from metainfer.cli.app import app
from metainfer.compiler.explain import Explanation, GroupReport, explain
from metainfer.hardware.load import FOLDER
from metainfer.ir.errors import CapacityError
from metainfer.ir.plan import Plan
from metainfer.models.decoder import decoder_spec
from metainfer.models.qwen3_moe import config_235b
from metainfer.models.spec import ModelSpec

SPEC = decoder_spec("qwen3_moe_few", replace(config_235b, layers=2), dtype="bf16")
DENSE = decoder_spec("few_dense", replace(config_235b, layers=2, experts=None), dtype="bf16")
# What the compiler chooses for all layers; fixed, so that algorithms alone differ.
SPREAD: dict[str, Any] = {"dp": 4, "ep": 4}
Link = dict[str, Any]
LINKS: list[Link] = tomllib.loads((FOLDER / "8xpcie.toml").read_text())["links"]


def same(link: Link) -> Link:
    return link


def swapped(link: Link) -> Link:
    return {**link, "read": link["write"], "write": link["read"]}


def staged(link: Link) -> Link:
    return {**link, "p2p": False}


def as_toml(link: Link) -> str:
    # JSON's texts, lists and truth values are TOML's too.
    return "\n".join(["[[links]]", *(f"{k} = {json.dumps(v)}" for k, v in link.items()), ""])


class Machines:
    """Files that extend 8xpcie, and the plans for them; each is compiled once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plans: dict[str, Plan] = {}

    def file(self, name: str, links: Callable[[Link], Link], more: str = "") -> str:
        path = self._folder / f"{name}.toml"
        head = f'extends = "8xpcie"\nname = "{name}"\ntitle = "what if: {name}"\n{more}\n'
        path.write_text(head + "\n".join(as_toml(links(link)) for link in LINKS))
        return str(path)

    def plan(self, name: str, hw: str, spec: ModelSpec = SPEC, **options: Any) -> Plan:
        if name not in self._plans:
            self._plans[name] = metainfer.compile(spec, hw, **{**SPREAD, **options})
        return self._plans[name]

    def direct(self) -> Plan:
        return self.plan("8xpcie", "8xpcie")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    return Machines(tmp_path_factory.mktemp("machines"))


def meetings(plan: Plan, phase: str) -> list[GroupReport]:
    found = [g for g in explain(plan, phase).groups if g.crossovers]
    assert found
    return found


def algorithms(plan: Plan, phase: str) -> set[str]:
    """Algorithms of a phase at the size that it is judged by."""
    return {g.kernel.removeprefix(f"ranks.{g.kind}_") for g in meetings(plan, phase)}


def reasons(explanation: Explanation, ending: str) -> set[str]:
    """Why kernels of an algorithm were refused."""
    return {
        refused.reason
        for group in explanation.groups
        for refused in group.refused
        if any(name.endswith(ending) for name in refused.kernels)
    }


def test_cards_that_write_faster_than_they_read_push(machines: Machines) -> None:
    free = machines.plan("free", machines.file("free", same, "policy = []"))
    assert algorithms(free, "prefill") == {"one_shot_push"}
    for group in meetings(free, "prefill"):
        assert not any(c.kernel.endswith("_pull") for c in group.crossovers)


def test_with_reads_and_writes_swapped_large_ones_pull(machines: Machines) -> None:
    plan = machines.plan("swapped", machines.file("swapped", swapped, "policy = []"))
    large = [g for g in meetings(plan, "prefill") if g.crossovers[-1].to_bytes > 8 << 20]
    assert large
    for group in large:
        # Small ones are latency, which a push has less of.
        kinds = [c.kernel.rpartition("_")[2] for c in group.crossovers]
        assert kinds[-1] == "pull"
        assert "push" in kinds
        assert group.crossovers[-1].next_best.endswith("_push")
        assert group.crossovers[-1].gap_seconds > 0


def test_a_policy_against_pulls_holds_and_is_named(machines: Machines) -> None:
    plan = machines.plan("kept", machines.file("kept", swapped))
    assert algorithms(plan, "prefill") == {"one_shot_push"}
    (reason,) = reasons(explain(plan), "_one_shot_pull")
    assert reason.startswith("policy of the machine against *_pull: direct-attached boards may")


def test_without_peer_access_nothing_is_direct_and_all_is_slower(machines: Machines) -> None:
    plan = machines.plan("staged", machines.file("staged", staged))
    for phase in plan.phases:
        assert algorithms(plan, phase) <= {"library", "one_shot", "two_shot"}
        pairs = zip(meetings(plan, phase), meetings(machines.direct(), phase), strict=True)
        for without, direct in pairs:
            assert without.seconds > direct.seconds
    assert reasons(explain(plan), "_one_shot_push") == {
        "wanted ranks of one host that reach each other's memory, found gpu0 and gpu1 have no peer "
        "access (p2p = false on the link gpu0-socket0)"
    }


MEMORY = """
[types.card]
extends = "rtx_6000d"
name = "card"
title = "a card"
[types.card.memory]
capacity = "{} GiB"
[[devices]]
names = ["gpu0", "gpu1", "gpu2", "gpu3", "gpu4", "gpu5", "gpu6", "gpu7"]
type = "card"
node = "host0"
"""


def reason_of_layout(plan: Plan) -> str:
    (note,) = [n for n in explain(plan).notes if n.place == "layout" and n.subjects == ("ranks",)]
    return note.reason


def test_with_half_the_memory_the_layout_is_another(machines: Machines) -> None:
    free: dict[str, Any] = {"dp": 0, "ep": 0, "max_context": 4096}
    plans = [
        machines.plan(f"{size}", machines.file(f"{size}", same, MEMORY.format(size)), DENSE, **free)
        for size in (8, 4)
    ]
    whole, half = (plan.layout for plan in plans)
    assert whole.num_ranks == 1
    assert half.num_ranks > 1
    assert "fit on one device" in reason_of_layout(plans[0])
    assert re.search(r"cheapest of \d+ that fit of \d+: .* of weights", reason_of_layout(plans[1]))
    # What no layout holds is refused with every layout's bytes, and what would help.
    with pytest.raises(CapacityError, match="no layout of the model fits") as caught:
        machines.plan("small", machines.file("small", same, MEMORY.format(4)), **{**free, "tp": 4})
    assert re.search(r"--weights \w+ \(lossy\) fits: tp=4.* GB of weights", str(caught.value))
    assert "GB of weights" in caught.value.text


def test_explain_prints_crossovers_as_a_table(machines: Machines, tmp_path: Path) -> None:
    machines.direct().save(tmp_path / "plan")
    made = CliRunner().invoke(app, ["explain", str(tmp_path / "plan"), "--group", "all_gather"])
    assert made.exit_code == 0, made.output
    assert re.search(r"payload of a rank +algorithm +predicted +next best", made.output)
    rows = re.findall(
        r"\n +32.00 KiB to .*one_shot_push +[\d.]+ us to [\d.]+ us +library", made.output
    )
    assert rows
    assert "basis    one_shot_push: analytic, as one_shot measured" in made.output


@pytest.mark.thorough
def test_sums_are_compressed_only_where_asked(machines: Machines) -> None:
    # Eight cards without peer access: bytes are what counts.
    tp: dict[str, Any] = {"dp": 0, "ep": 0, "tp": 8, "max_tokens": 1024}
    plans = [
        machines.plan(f"tp-{asked}", "8x4090", compress_collectives=asked, **tp)
        for asked in ("none", "fp8")
    ]
    plain, compressed = (algorithms(plan, "prefill") for plan in plans)
    assert "two_shot_fp8" not in plain
    assert "two_shot_fp8" in compressed
    told = [d["reason"] for d in plans[1].entry("prefill")["decisions"] if "_fp8" in d["chosen"]]
    assert told
    assert all("adds a relative error of up to 1.2e-01" in reason for reason in told)
