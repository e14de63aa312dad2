"""Modules with experts: loops over data are replaced and checked, static ones are raised."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import metainfer
from metainfer.backends.torch.tensors import to_numpy
from metainfer.compiler import known_experts
from metainfer.compiler.capture import capture_module
from metainfer.ir.dtypes import BF16
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Module
from metainfer.ir.interpret import interpret

D, INNER, NUM, CHOSEN = 32, 64, 5, 2
_SIZES: dict[str, Any] = {
    "hidden_size": D,
    "vocab_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": CHOSEN,
}


def qwen(implementation: str = "eager", **options: Any) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        num_experts=NUM, moe_intermediate_size=INNER, **_SIZES, **options
    )
    return block_of(transformers.Qwen3MoeForCausalLM(config), implementation)


def mixtral(implementation: str = "eager") -> nn.Module:
    config = transformers.MixtralConfig(num_local_experts=NUM, intermediate_size=INNER, **_SIZES)
    return block_of(transformers.MixtralForCausalLM(config), implementation)


def block_of(model: Any, implementation: str) -> nn.Module:
    model.set_experts_implementation(implementation)
    block: nn.Module = model.model.layers[0].mlp
    assert block.experts.config._experts_implementation == implementation  # type: ignore[union-attr]
    return block


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, INNER, bias=False), nn.Linear(D, INNER, bias=False)
        self.w2 = nn.Linear(INNER, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class OldSparseMoeBlock(nn.Module):
    """As transformers 4 had it: a list of MLPs, those that were hit one after the other."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.gate = nn.Linear(D, NUM, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(NUM))
        self.top_k, self.scale = CHOSEN, scale

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        shares, ids = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
        shares = self.scale * shares / shares.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=NUM).permute(2, 1, 0)
        for e in (mask.sum(dim=(-1, -2)) > 0).nonzero():
            place, token = torch.where(mask[e].squeeze(0))
            made = self.experts[int(e)](x[token]) * shares[token, place, None]
            y.index_add_(0, token, made)
        return y.reshape(hidden_states.shape), logits


class Loop(nn.Module):
    """A static loop over all experts, each masked by its share."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, NUM, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(NUM))
        self.shared = Mlp()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, ids = torch.topk(self.router(x).softmax(-1), CHOSEN)
        return shares / shares.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        shares, ids = self.route(x)
        y = x + self.shared(x)
        for e, expert in enumerate(self.experts):
            y = y + ((ids == e) * shares).sum(-1, keepdim=True) * expert(x)
        return y


class Gathered(Loop):
    """The chosen experts' weights, gathered for each token."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.gate, self.up = (nn.Parameter(torch.randn(NUM, INNER, D) / D**0.5) for _ in "gu")
        self.down = nn.Parameter(torch.randn(NUM, D, INNER) / INNER**0.5)

    def forward(self, x: Tensor) -> Tensor:
        shares, ids = self.route(x)
        gate = torch.einsum("tkfd,td->tkf", self.gate[ids], x)
        up = torch.einsum("tkfd,td->tkf", self.up[ids], x)
        y = torch.einsum("tkdf,tkf->tkd", self.down[ids], F.silu(gate) * up)
        return x + self.shared(x) + (y * shares[..., None]).sum(1)


class Grouped(Gathered):
    """Rows in the order of experts, grouped products, and back."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        shares, ids = self.route(x)
        order = ids.flatten().argsort(stable=True)
        rows = x[order // CHOSEN]
        counts = (ids.flatten()[:, None] == torch.arange(NUM)).sum(0)
        ends = counts.cumsum(0).int()
        gate = F.grouped_mm(rows, self.gate.mT, offs=ends)
        up = F.grouped_mm(rows, self.up.mT, offs=ends)
        made = F.grouped_mm(F.silu(gate) * up + self.shift, self.down.mT, offs=ends)
        made = (made * shares.flatten()[order, None])[order.argsort()]
        return x + self.shared(x) + made.unflatten(0, (-1, CHOSEN)).sum(1)


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return module.eval()


def compiled(module: nn.Module, example: Tensor, dims: tuple[str, ...]) -> metainfer.Plan:
    return metainfer.compile(
        module, "cpu", example_inputs=(example,), dynamic=(dims,), bounds={"S": (1, 32)},
        activations="f32", weights="f32", exact=True,
    )  # fmt: skip


def ops_of(plan: metainfer.Plan) -> list[str]:
    module: Module = plan.module("call")
    return [op.name for graph in module.graphs for op in graph.ops]


def check(module: nn.Module, *, rank: int = 3) -> None:
    """The plan has one op for the experts, on a made kernel, and the module's numbers."""
    shape = (2, 7, D) if rank == 3 else (7, D)
    plan = compiled(module, torch.randn(shape), ("", "S", "") if rank == 3 else ("S", ""))
    names = ops_of(plan)
    assert names.count("experts") == 1
    assert "gather" not in names
    assert _experts_kernels(plan) == ["cpu.experts_f32"]
    loaded = metainfer.load(plan, module.state_dict(), allow_machine_mismatch=True)
    for length in (1, 5, 12):
        x = torch.randn((2, length, D) if rank == 3 else (length, D))
        with torch.no_grad():
            wanted, found = module(x), loaded(x)
        first = wanted[0] if isinstance(wanted, tuple) else wanted
        torch.testing.assert_close(
            found[0] if isinstance(found, tuple) else found, first, atol=2e-5, rtol=1e-4
        )


def _experts_kernels(plan: metainfer.Plan) -> list[str]:
    graphs = plan.module("call").graphs
    return [c.kernel for g in graphs for op in g.ops if op.name == "experts" for c in op.choices]


@pytest.mark.parametrize(
    ("make", "implementation"),
    [(qwen, "eager"), (qwen, "batched_mm"), (qwen, "grouped_mm"), (mixtral, "eager")],
)
def test_experts_of_transformers(make: Any, implementation: str) -> None:
    check(randomised(make(implementation)))


def test_a_block_without_renormalised_shares_and_with_gelu() -> None:
    check(randomised(qwen(norm_topk_prob=False, hidden_act="gelu_pytorch_tanh")))


def test_a_list_of_experts_as_transformers_4_has_it() -> None:
    check(randomised(OldSparseMoeBlock()))


def test_a_static_loop_is_raised() -> None:
    check(randomised(Loop()), rank=2)


def test_gathered_weights_are_raised() -> None:
    check(randomised(Gathered()), rank=2)


needs_grouped = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch has no grouped_mm")


@needs_grouped
def test_grouped_products_are_raised() -> None:
    # Torch traces them in bf16 only.
    module = randomised(Grouped()).bfloat16()
    x = torch.randn(7, D, dtype=torch.bfloat16)
    captured = capture_module("m", module, [x], [["S", ""]], {"S": (1, 32)}).module
    names = [op.name for graph in captured.graphs for op in graph.ops]
    assert names.count("experts") == 1
    weights = {k: to_numpy(v, BF16) for k, v in module.state_dict().items()}
    for length in (1, 6):
        x = torch.randn(length, D, dtype=torch.bfloat16)
        (found,) = interpret(captured, [to_numpy(x, BF16)], weights.__getitem__).outputs
        with torch.no_grad():
            wanted = module(x).float()
        made = torch.from_numpy(found.astype(np.float32))
        torch.testing.assert_close(made, wanted, atol=0.03 * float(wanted.abs().max()), rtol=0)


@needs_grouped
def test_grouped_products_that_compute_otherwise_are_not() -> None:
    module = randomised(Grouped(shift=0.5)).bfloat16()
    x = torch.randn(7, D, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="sorting 2\\*S elements"):
        capture_module("m", module, [x], [["S", ""]], {"S": (1, 32)})


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_transformers_products_are_raised_whatever_the_class_is_called(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    monkeypatch.setattr(known_experts, "_form_of", lambda module: None)
    check(randomised(qwen(implementation)))


def test_the_models_forwards_come_back() -> None:
    module = randomised(qwen())
    compiled(module, torch.randn(2, 7, D), ("", "S", ""))
    assert all("forward" not in vars(m) for m in module.modules())


def test_a_block_that_computes_otherwise_is_not_taken_for_one() -> None:
    module = randomised(OldSparseMoeBlock(scale=2.0))
    with pytest.raises(Unsupported, match="depends on data") as refused:
        compiled(module, torch.randn(2, 7, D), ("", "S", ""))
    note = "not replaced: the model (OldSparseMoeBlock): experts would differ from its results by"
    assert note in refused.value.text


class FineExperts(nn.Module):
    """Parameters like those of transformers' experts, but a product that exports as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(NUM, 2 * INNER, D))
        self.down_proj = nn.Parameter(torch.randn(NUM, D, INNER))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.gate_up_proj.sum(0).T[:, :D]


def test_a_class_of_such_a_name_is_exported_as_it_stands() -> None:
    module = randomised(FineExperts())
    plan = compiled(module, torch.randn(7, D), ("S", ""))
    assert "experts" not in ops_of(plan)
    loaded = metainfer.load(plan, module.state_dict(), allow_machine_mismatch=True)
    x = torch.randn(3, D)
    torch.testing.assert_close(loaded(x), module(x).detach(), atol=1e-4, rtol=1e-4)
