"""Like layers are traced once, and the captured text is that of tracing every one."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from metainfer.compiler import repeats
from metainfer.compiler.capture import Captured, capture_language_model, capture_module
from metainfer.ir.interpret import interpret
from metainfer.ir.printer import print_module
from metainfer.models.decoder import Decoder
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.experts_config import ExpertsConfig

SMALL = DecoderConfig(
    hidden=32, layers=5, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=50,
    max_positions=64,
)  # fmt: skip
CONFIGS = {
    "equal": SMALL,
    "two_windows": replace(SMALL, windows=(0, 9, 0, 9, 0)),
    "some_experts": replace(
        SMALL, experts=ExpertsConfig(4, 2, 16, layers=(False, True, True, False, True))
    ),
    "tied": replace(SMALL, tie=True),
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Captured]], list[Any]]:
    """Captures twice, with like layers repeated and without; returns both texts and the groups."""

    def both(capture: Callable[[], Captured]) -> list[Any]:
        seen: list[Any] = []
        find = repeats._groups
        monkeypatch.setattr(repeats, "_groups", lambda m: seen.append(find(m)) or seen[-1])
        first = capture()
        monkeypatch.setattr(repeats, "_groups", lambda m: [])
        second = capture()
        monkeypatch.setattr(repeats, "_groups", find)
        assert print_module(first.module) == print_module(second.module)
        assert list(first.constants) == list(second.constants)
        return [len(g.members) for g in seen[0]]

    return both


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("equal", [5]), ("two_windows", [3, 2]), ("some_experts", [2, 3]), ("tied", [5])],
)
def test_decoders(traced: Any, name: str, sizes: list[int]) -> None:
    config = CONFIGS[name]
    found = traced(
        lambda: capture_language_model(
            "small", lambda: Decoder(config), dtype=torch.float32, max_tokens=64,
            max_sequences=4, max_pages=8, kv_dtype="f32",
        )
    )  # fmt: skip
    assert found == sizes


@dataclass
class Slope:
    factor: float


class Block(nn.Module):
    def __init__(self, width: int = 8, **attrs: Any) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)
        self.factor, self.slope = 1.0, Slope(2.0)
        for name, value in attrs.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.slope.factor * self.down(torch.relu(self.up(x)))


class Pair(Block):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x), x  # type: ignore[return-value]


class Buffered(Block):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.bias: Tensor
        self.register_buffer("bias", torch.full((8,), value))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Net(nn.Module):
    def __init__(self, *layers: nn.Module, order: tuple[int, ...] = (), named: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.order = order or tuple(range(len(layers)))
        self.named = named

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            layer = self.layers[index]
            x = layer(x=x) if self.named else layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


def shared() -> Net:
    layers = [Block() for _ in range(4)]
    layers[2].up.weight = layers[0].up.weight
    return Net(*layers)


def _tripled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 3


def hooked() -> Net:
    net = Net(*(Block() for _ in range(3)))
    net.layers[1].register_forward_hook(_tripled)
    return net


NETS: dict[str, tuple[Callable[[], Net], list[int]]] = {
    "equal": (lambda: Net(*(Block() for _ in range(4))), [4]),
    "other_order": (lambda: Net(*(Block() for _ in range(3)), order=(2, 0, 1)), [3]),
    "other_width": (lambda: Net(Block(), Block(16), Block(), Block(16)), [2, 2]),
    "other_number": (lambda: Net(Block(), Block(factor=3.0), Block()), [2]),
    "other_dataclass": (lambda: Net(Block(), Block(slope=Slope(3.0)), Block()), [2]),
    "other_object": (lambda: Net(*(Block(held=object()) for _ in range(3))), []),
    "layer_numbers": (lambda: Net(*(Block(index=i) for i in range(3))), []),
    "shared_weight": (shared, [3]),
    "hooks": (hooked, [2]),
    "buffers": (lambda: Net(*(Buffered(i) for i in range(3))), []),
    "named_arguments": (lambda: Net(*(Block() for _ in range(3)), named=True), [3]),
    "pairs": (lambda: Net(*(Pair() for _ in range(3))), [3]),
    "called_twice": (lambda: Net(*(Block() for _ in range(3)), order=(0, 1, 0, 2)), [3]),
    "left_out": (lambda: Net(*(Block() for _ in range(4)), order=(1, 3)), [4]),
}


@pytest.mark.parametrize("name", NETS)
def test_modules(traced: Any, name: str) -> None:
    make, sizes = NETS[name]
    torch.manual_seed(0)
    net = make()
    x = torch.randn(3, 8)
    captured: list[Captured] = []

    def capture() -> Captured:
        captured.append(capture_module("net", net, [x], [["T", ""]], {"T": (1, 9)}))
        return captured[-1]

    assert traced(capture) == sizes
    assert all("forward" not in vars(layer) for layer in net.layers)
    weights = {k: v.detach().numpy() for k, v in net.state_dict().items()}
    y = torch.randn(5, 8)
    (found,) = interpret(captured[0].module, [y.numpy()], weights.__getitem__).outputs
    with torch.no_grad():
        np.testing.assert_allclose(found, net(y).numpy(), atol=1e-5)


def test_a_layer_that_fails_leaves_the_model_as_it_was() -> None:
    net = Net(Block(factor=math.nan), Block(factor=math.nan))
    net.order = (0, 7)
    with pytest.raises(Exception, match="cannot be captured"):
        capture_module("net", net, [torch.randn(3, 8)], [["T", ""]], {"T": (1, 9)})
    assert all("forward" not in vars(layer) for layer in net.layers)
