"""Expert modules whose loop depends on data: replaced before export by the op, and checked.

Transformers' experts (classes ``*Experts`` with stacked ``gate_up_proj`` and ``down_proj``), and
blocks that hold a list of MLPs (``*SparseMoeBlock`` with ``gate`` and ``experts``), visit only the
experts that were chosen, which no export can follow. While a model is exported their forwards call
`functional.experts`; each kind is first held against its own forward on random numbers, on a copy
of narrow experts. A class of such a name that computes otherwise is exported as it stands.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metainfer.models import functional

Forward = Callable[..., Any]
ACTIVATIONS = ("silu", "gelu_tanh")
_TOLERANCE = 1e-4
# (gate, up, down) as MLPs of lists of experts call them.
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
# Sizes of the checked copy: enough for every expert to be chosen by some token.
_TOKENS, _WIDTH, _INNER = 64, 16, 24


@dataclass(frozen=True)
class _Choice:
    """What the check found: the activation, and whether the block returns its result alone."""

    activation: str
    is_bare: bool


Make = Callable[[nn.Module, _Choice], Forward]


@contextmanager
def replaced_experts(model: nn.Module) -> Iterator[list[str]]:
    """Within, the forwards of known expert modules call the structured op.

    Yields what was left alone, and why: it tells the user what to do if the export fails.
    """
    changed: list[nn.Module] = []
    left: list[str] = []
    kinds: dict[Any, _Choice | None] = {}
    try:
        for path, module in model.named_modules():
            make = _form_of(module)
            if make is None or "forward" in vars(module):
                continue
            kind = (type(module), _switches(module))
            if kind not in kinds:
                kinds[kind] = _checked(path, module, make, left)
            choice = kinds[kind]
            if choice is not None:
                module.forward = make(module, choice)
                changed.append(module)
        yield left
    finally:
        for module in changed:
            del module.forward


def _form_of(module: nn.Module) -> Make | None:
    name = type(module).__name__
    if name.endswith("Experts") and _is_stacked(module):
        return _stacked_forward
    if name.endswith("SparseMoeBlock") and _is_listed(module):
        return _listed_forward
    return None


def _switches(module: nn.Module) -> tuple[Any, ...]:
    """Attributes that change what a module computes, beside its class."""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | str)}
    act = getattr(module, "act_fn", None)
    return (*sorted(plain.items()), type(act).__name__, len(getattr(module, "experts", ())))


# --- one module with stacked weights -----------------------------------------------------------


def _is_stacked(module: nn.Module) -> bool:
    names = set(dict(module.named_parameters(recurse=False)))
    if names != {"gate_up_proj", "down_proj"}:
        return False
    both, down = module.gate_up_proj, module.down_proj
    if not isinstance(both, Tensor) or not isinstance(down, Tensor) or both.ndim != 3:
        return False
    num, twice, width = both.shape
    return tuple(down.shape) == (num, width, twice // 2) and twice % 2 == 0


def _stacked_forward(module: nn.Module, choice: _Choice) -> Forward:
    def forward(
        hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        gate, up = module.get_parameter("gate_up_proj").chunk(2, dim=1)
        return functional.experts(
            hidden_states, top_k_index, top_k_weights, gate, up,
            module.get_parameter("down_proj"), activation=choice.activation,
        )  # fmt: skip

    return forward


# --- a router and a list of MLPs ---------------------------------------------------------------


def _is_listed(module: nn.Module) -> bool:
    experts, gate = getattr(module, "experts", None), getattr(module, "gate", None)
    if (
        not isinstance(experts, nn.ModuleList)
        or not len(experts)
        or not isinstance(gate, nn.Linear)
    ):
        return False
    names = _projections(experts)
    return bool(names) and isinstance(getattr(module, "top_k", None), int) and gate.bias is None


def _projections(experts: nn.ModuleList) -> tuple[str, ...]:
    for names in _PROJECTIONS:
        found = [getattr(e, n, None) for e in experts for n in names]
        if all(isinstance(f, nn.Linear) and f.bias is None for f in found):
            return names
    return ()


def _listed_forward(module: nn.Module, choice: _Choice) -> Forward:
    experts: Any = module.experts
    names = _projections(experts)
    # Mixtral has no such switch: it always renormalises.
    renormalise = getattr(module, "norm_topk_prob", True)
    router: Any = module.gate
    chosen: Any = module.top_k

    def forward(hidden_states: Tensor) -> Any:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = router(x)
        shares, ids = torch.topk(logits.float().softmax(-1), chosen)
        if renormalise:
            shares = shares / shares.sum(-1, keepdim=True)
        weights = (torch.stack([getattr(e, n).weight for e in experts]) for n in names)
        y = functional.experts(x, ids, shares, *weights, activation=choice.activation)
        y = y.reshape(hidden_states.shape)
        return y if choice.is_bare else (y, logits)

    return forward


# --- the check ---------------------------------------------------------------------------------


def _checked(path: str, module: nn.Module, make: Make, left: list[str]) -> _Choice | None:
    """With what the op computes what the module does; None, and a note, if with nothing."""
    name = f"{path or 'the model'} ({type(module).__name__})"
    try:
        small = _small_copy(module)
        inputs = _inputs(small)
        with torch.no_grad():
            made = small(*inputs)
            wanted, is_bare = _tensors(made), isinstance(made, Tensor)
            choices = [_Choice(a, is_bare) for a in ACTIVATIONS]
            errors = {c: _error(_tensors(make(small, c)(*inputs)), wanted) for c in choices}
    except Exception as error:  # the module's own code raises what it likes
        left.append(f"{name}: its forward fails on a small copy: {error}")
        return None
    best = min(errors, key=lambda c: errors[c])
    if errors[best] <= _TOLERANCE:
        return best
    left.append(
        f"{name}: experts would differ from its results by {errors[best]:.2g} of their size"
    )
    return None


def _small_copy(module: nn.Module) -> nn.Module:
    """The module on the CPU in float32, its widths cut and its numbers random."""
    generator = torch.Generator().manual_seed(0)
    copied = copy.copy(module)
    copied.__dict__ = {**vars(module), "_parameters": dict(module._parameters)}
    copied.__dict__["_modules"] = dict(module._modules)
    if _is_stacked(module):
        num = module.get_parameter("gate_up_proj").shape[0]
        shapes = {"gate_up_proj": (num, 2 * _INNER, _WIDTH), "down_proj": (num, _WIDTH, _INNER)}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            copied._parameters[name] = nn.Parameter(values, requires_grad=False)
        return copied
    experts: Any = module.experts
    names = _projections(experts)
    copied._modules["gate"] = _linear(_WIDTH, len(experts), generator)
    small = []
    for expert in experts:
        part = copy.copy(expert)
        part.__dict__ = {**vars(expert), "_modules": dict(expert._modules)}
        for name in names:
            sizes = (_INNER, _WIDTH) if name == names[-1] else (_WIDTH, _INNER)
            part._modules[name] = _linear(*sizes, generator)
        small.append(part)
    copied._modules["experts"] = nn.ModuleList(small)
    return copied


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False, device="cpu")
    values = torch.randn((outputs, inputs), generator=generator) * inputs**-0.5
    made.weight = nn.Parameter(values, requires_grad=False)
    return made


def _inputs(small: nn.Module) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((_TOKENS, _WIDTH), generator=generator)
    if not _is_stacked(small):
        return (x[None],)
    num = small.get_parameter("gate_up_proj").shape[0]
    order = torch.rand((_TOKENS, num), generator=generator).argsort(-1)
    return x, order[:, : min(num, 3)], torch.rand((_TOKENS, min(num, 3)), generator=generator)


def _tensors(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [t for t in made if isinstance(t, Tensor)]


def _error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest difference over the largest number; infinite where the forms differ."""
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return float("inf")
    return max(
        float((f - w).abs().max() / w.abs().max().clamp(min=1e-9))
        for f, w in zip(found, wanted, strict=True)
    )
