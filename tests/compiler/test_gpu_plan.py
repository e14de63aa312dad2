"""Plans for GPUs are made on a machine without one, and say what is generic on them."""

import pytest

import metainfer
from metainfer.backends.registry import installed
from metainfer.ir.errors import StrictError
from metainfer.ir.plan import Plan

# Without them a library composes what they do.
FORBIDDEN = (
    "triton.rope", "triton.rope_kv_write", "triton.silu_mul_halves",
    *(k.name for k in installed().kernels.all() if k.op == "linear_silu_mul"),
)  # fmt: skip


TEMPLATES = tuple(
    k.name for k in installed().kernels.all() if k.backend == "triton" and "linear" in k.op
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return metainfer.compile("smollm2", "8xpcie", forbids=TEMPLATES)


def test_quantized_weights_are_packed_for_the_parts_of_a_split_group(plan: Plan) -> None:
    """No library takes linear_add with 4-bit weights whole: its linear still needs a packing."""
    block = plan.module("decode").graph("layer")
    linears = [op for op in block.ops if op.name == "linear"]
    assert len(linears) == 4
    assert {op.operands[1].tensor.layout for op in linears} == {"torch.dense_bf16"}
    assert not [op for op in block.ops if op.attr.get("kind") == "linear_add"]


def test_strict_lists_every_generic_group_with_its_cost() -> None:
    with pytest.raises(StrictError) as caught:
        metainfer.compile("smollm2", "8xpcie", strict=True, forbids=FORBIDDEN)
    assert caught.value.exit_code == 3
    lines = caught.value.text.splitlines()
    assert {line.split(" -> ")[0].split()[2] for line in lines} == {"rope", "silu_mul_halves"}
    assert all("over the roofline" in line for line in lines)


@pytest.mark.parametrize("machine", [pytest.param("cpu", marks=pytest.mark.thorough), "8xpcie"])
def test_strict_passes_where_every_group_has_a_made_kernel(machine: str) -> None:
    strict = metainfer.compile("smollm2", machine, strict=True)
    decisions = [d for p in strict.meta["phases"].values() for d in p["decisions"]]
    assert not [d for d in decisions if d["severity"] == "fallback"]


def test_phases_come_in_the_order_of_use(plan: Plan) -> None:
    assert plan.phases == ("prefill", "decode")


def test_decoding_reads_4_bit_weights_as_they_are() -> None:
    module = metainfer.compile("smollm2", "8xpcie").module("decode")
    chosen = [c.kernel for g in module.graphs for op in g.ops for c in op.choices]
    assert any(name.startswith("triton.linear_add_rms_norm_int4") for name in chosen)
    assert any(name.startswith("triton.linear_silu_mul_int4") for name in chosen)
