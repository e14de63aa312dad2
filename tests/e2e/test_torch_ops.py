"""Ops of PyTorch that are spelled by several ops of the IR, beside eager, at several sizes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lm_steps import load_plan
from module_runs import check, compiled, seeded
from safetensors.torch import save_file
from torch import Tensor, nn

import metainfer
from metainfer.backends.cpu import program
from metainfer.ir.errors import TypeMismatch, Unsupported
from metainfer.models.spec import ModelSpec

Op = Callable[[Tensor], Any]


class Several(nn.Module):
    """Many ops on one input, as one module: a compilation costs more than they do."""

    def __init__(self, ops: dict[str, Op]) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for op in self.ops.values():
            made = op(x)
            found += [made] if isinstance(made, Tensor) else made
        return tuple(found)


ROWS: dict[str, dict[str, Op]] = {
    "rounding": {
        "round": lambda x: (x * 2).round(),
        "ties": lambda x: ((x * 2).floor() + 0.5).round(),
        "large": lambda x: (x * 2**24).round(),
        "ceil": lambda x: (x * 3).ceil(),
        "trunc": lambda x: (x * 3).trunc(),
        "sign": lambda x: (x * x.gt(0.3)).sign(),
        "fmod": lambda x: (x * 5).fmod(1.5),
        "exp2": lambda x: x.exp2(),
        "log2": lambda x: x.abs().log2(),
        "log10": lambda x: x.abs().log10(),
        "isnan": lambda x: x.clamp(min=0).sqrt().div(x.gt(0)).isnan(),
        "relu6": lambda x: F.relu6(x * 9),
    },
    "statistics": {
        "var": lambda x: x.var(-1),
        "population": lambda x: x.var(-1, correction=0, keepdim=True),
        "std": lambda x: x.std(-1, keepdim=True),
        "biased": lambda x: x.std(1, unbiased=False),
        "both": lambda x: torch.var_mean(x, -1),
        "both_std": lambda x: torch.std_mean(x, -1, correction=2),
        "over_rows": lambda x: x.var(0, correction=0),
        "prod": lambda x: x.prod(-1),
        "prod_odd": lambda x: x[:, :7].prod(1, keepdim=True),
        "largest": lambda x: x.max(-1),
        "least": lambda x: x.min(1, keepdim=True),
        "of_two": lambda x: torch.max(x, -x),
        "of_all": lambda x: x.max(),
        "argmin": lambda x: x.argmin(-1),
        "any": lambda x: [(x > 0.9).any(-1), (x > -0.9).all(1, keepdim=True), x.floor().all(-1)],
        "norms": lambda x: [x.norm(dim=-1), x.norm(p=1, dim=-1), F.normalize(x, dim=-1)],
        "largest_norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True),
        "cosine": lambda x: F.cosine_similarity(x, x.roll(1, -1), dim=-1),
    },
    "order": {
        "sort": lambda x: x.sort(-1),
        "descending": lambda x: x.sort(1, descending=True),
        "stable": lambda x: (x * 2).floor().sort(dim=-1, stable=True),
        "argsort": lambda x: x.argsort(-1),
        "least": lambda x: x.topk(3, -1, largest=False),
        "along_first": lambda x: x.T.topk(2, 0),
        "flip": lambda x: [x.flip(-1), x.flip((0, 1))],
        "roll": lambda x: [x.roll(3, -1), x.roll((-1, 1), (1, 1)), x.roll(-1, 0)],
    },
    "indexing": {
        "gather": lambda x: x.gather(1, x[:, :3].gt(0).long() + 2),
        "gather_first": lambda x: x[:1].gather(0, torch.zeros(1, 8, dtype=torch.long)),
        "inner": lambda x: x[:, torch.tensor([1, 0, 2])],
        "negative": lambda x: [x[torch.tensor([-1, 0])], x[:, torch.tensor([[-1], [-8]])]],
        "varying": lambda x: x[x.argmax(0) - x.shape[0]],
        "two": lambda x: x.view(-1, 2, 4)[:, torch.tensor([0, 1, -1]), torch.tensor([2, -1, 0])],
        "select": lambda x: x.index_select(1, torch.tensor([1, 5])),
        "one_hot": lambda x: F.one_hot(x.gt(0).long() + 1, 4),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_ops_on_rows(name: str) -> None:
    module = Several(ROWS[name])
    model = compiled(module, (seeded((3, 8)),), (("B",),))
    for rows in (1, 2, 5):
        check(model, module, (seeded((rows, 8), rows),))


IMAGES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "batch_norm": (nn.BatchNorm2d(4), (4, 8, 6)),
    "batch_norm_plain": (nn.BatchNorm2d(4, affine=False), (4, 8, 6)),
    "batch_norm_rows": (nn.BatchNorm1d(8), (8,)),
    "group_norm": (nn.GroupNorm(2, 4), (4, 8, 6)),
    "group_norm_plain": (nn.GroupNorm(4, 4, affine=False), (4, 5)),
    "instance_norm": (nn.InstanceNorm2d(4, affine=True), (4, 8, 6)),
    "layer_norm_two": (nn.LayerNorm([8, 6]), (4, 8, 6)),
    "average": (nn.AvgPool2d(3, 2, 1), (4, 8, 6)),
    "average_inside": (nn.AvgPool2d((3, 2), 2, (1, 1), count_include_pad=False), (4, 8, 6)),
    "average_by": (nn.AvgPool2d(2, divisor_override=3), (4, 8, 6)),
    "average_rows": (nn.AvgPool1d(3, 2, 1), (4, 9)),
    "largest": (nn.MaxPool2d(3, 2, 1), (4, 8, 6)),
    "largest_apart": (nn.MaxPool2d((2, 3), 1, dilation=(2, 1)), (4, 8, 6)),
    "largest_rows": (nn.MaxPool1d(3, 2, 1), (4, 9)),
    "adaptive": (nn.AdaptiveAvgPool2d((4, 3)), (4, 8, 6)),
    "adaptive_one": (nn.AdaptiveAvgPool2d(1), (4, 8, 6)),
    "adaptive_some": (nn.AdaptiveAvgPool2d((None, 2)), (4, 8, 6)),
    "adaptive_rows": (nn.AdaptiveAvgPool1d(3), (4, 9)),
    "conv1d": (nn.Conv1d(4, 6, 3, 2, 1, groups=2), (4, 9)),
    "conv_same": (nn.Conv2d(4, 6, (3, 2), padding="same"), (4, 8, 6)),
    "conv_valid": (nn.Conv1d(4, 6, 3, padding="valid", bias=False), (4, 9)),
    "upsample": (nn.Upsample(scale_factor=2), (4, 8, 6)),
    "prelu": (nn.PReLU(4), (4, 8, 6)),
}


def trained(module: nn.Module) -> nn.Module:
    """Weights and statistics unlike those that a new module has."""
    torch.manual_seed(0)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2.0) if "var" in name else tensor.normal_()
    return module.eval()


@pytest.mark.parametrize("name", IMAGES)
def test_layers_on_images(name: str) -> None:
    module, shape = IMAGES[name]
    module = trained(module)
    model = compiled(module, (seeded((3, *shape)),), (("B",),))
    for batch in (1, 4):
        check(model, module, (seeded((batch, *shape), batch),))


REFUSED: dict[str, tuple[Op | nn.Module, str]] = {
    "ceil_mode": (nn.AvgPool2d(3, ceil_mode=True), "ceil_mode"),
    "unequal_parts": (nn.AdaptiveAvgPool2d((3, 3)), "no equal parts"),
    "dilated": (nn.Conv2d(4, 6, 3, dilation=2), "dilated"),
    "statistics_of_the_batch": (nn.BatchNorm2d(4, track_running_stats=False), "model.eval"),
    "varying_variance": (lambda x: x.var(0), "correction=0"),
    "sorting_what_varies": (lambda x: x.sort(0)[0], "fixed size"),
    "long_product": (lambda x: x.flatten(1).prod(1), "64"),
    "mask": (lambda x: x[:, torch.tensor([True, False, True, True])], "mask"),
    "decimals": (lambda x: x.round(decimals=2), "decimals"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    op, words = REFUSED[name]
    module = op if isinstance(op, nn.Module) else Several({name: op})
    with pytest.raises(Unsupported) as caught:
        compiled(module.eval(), (seeded((3, 4, 8, 6)),), (("B",),))
    assert words in str(caught.value)


class AnyNumber(nn.Module):
    """Inputs without names of their own."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            x = x + other.sum(-1, keepdim=True)
        return x


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_inputs(count: int) -> None:
    module = AnyNumber()
    inputs = tuple(seeded((3, 4 + i), i) for i in range(count))
    model = compiled(module, inputs, (("B",),) * count)
    check(model, module, tuple(seeded((5, 4 + i), i) for i in range(count)))


# --- tensors that a model makes itself ------------------------------------------------------------


class Statistics(nn.Module):
    """Statistics of training, a buffer that no checkpoint has, a parameter that nothing reads."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.unread = nn.Parameter(torch.zeros(3))
        self.register_buffer("steps", torch.arange(4.0), persistent=False)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x) + self.steps) * self.scale


def test_trained_statistics_come_from_the_weights() -> None:
    """Compiled from a new module: the running means of the weights given are taken, not its own."""
    plan = metainfer.compile(
        Statistics(), "cpu", example_inputs=(seeded((3, 4)),), dynamic=(("B",),), exact=True
    )
    module = trained(Statistics())
    check(load_plan(plan, weights=module.state_dict()), module, (seeded((5, 4), 1),))


@pytest.mark.parametrize("left_out", ["", "scale"])
def test_trained_statistics_come_from_the_checkpoint(tmp_path: Path, left_out: str) -> None:
    """A buffer that the checkpoint lacks is the model's own; what forward does not read may be."""
    module = trained(Statistics())
    tensors = {n: t for n, t in module.state_dict().items() if n != left_out}
    save_file(tensors, tmp_path / "model.safetensors")
    spec = ModelSpec(
        "statistics", Statistics, kind="module", checkpoint=tmp_path / "model.safetensors",
        example_inputs=lambda: (seeded((3, 4)),), dynamic=(("B",),),
    )  # fmt: skip
    if left_out:
        module.get_buffer("scale").fill_(2.0)
    check(load_plan(metainfer.compile(spec, "cpu", exact=True)), module, (seeded((5, 4), 1),))


def test_compiling_leaves_a_module_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4)).train()
    module[1].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    inputs, modes = (seeded((3, 4)),), [m.training for m in module.modules()]
    for machine, activations in (("cpu", "f32"), ("1xh200", "bf16")):
        metainfer.compile(module, machine, example_inputs=inputs, activations=activations)
    assert [m.training for m in module.modules()] == modes
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


class Counting(nn.Module):
    """Keeps a count from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class Overwriting(nn.Module):
    """Changes what the caller gave."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x * 2


@pytest.mark.parametrize(
    ("module", "words"), [(Counting(), "buffer calls"), (Overwriting(), "input x")]
)
def test_writes_that_outlive_a_call_are_refused(module: nn.Module, words: str) -> None:
    """They were results of their own once, before the others."""
    with pytest.raises(Unsupported, match=f"writes to tensors that outlive it: {words}"):
        compiled(module, (seeded((3, 4)),), (("B",),))


def test_inner_writes_are_no_harm() -> None:
    module = Several({"op": lambda x: (x * 2).add_(1).mul_(x), "same": lambda x: x})
    check(compiled(module, (seeded((3, 4)),), (("B",),)), module, (seeded((5, 4)),))


def test_floats_are_no_ids() -> None:
    module = nn.Embedding(9, 4)
    model = compiled(module, (torch.tensor([1, 2, 3]),), (("B",),))
    check(model, module, (torch.tensor([3, 3], dtype=torch.int32),))
    with pytest.raises(TypeMismatch, match=r"input is i64, got torch.float32"):
        model(torch.tensor([1.7, 2.0]))


def test_threads_asked_for_once_are_not_kept() -> None:
    module = nn.Linear(4, 4)
    plan = metainfer.compile(module, "cpu", example_inputs=(seeded((3, 4)),))
    cpu = {"cpu"} <= set(plan.meta["kernel_sources"])
    for asked, wanted in ((1, 1), (0, len(os.sched_getaffinity(0)))):
        load_plan(plan, weights=module.state_dict(), num_threads=asked)
        assert torch.get_num_threads() == wanted
        if cpu:
            assert program.num_threads() == wanted
