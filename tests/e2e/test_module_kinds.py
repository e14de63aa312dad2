"""kind = "module": any nn.Module with example inputs, compiled and called as a function."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lm_steps import EXACT, load_plan
from module_runs import check, compiled, seeded
from plain_modules import MINILM_FILE, TINY_BERT, BertEncoder, BertSizes, MlpMixer, bert_inputs
from safetensors.torch import load_file
from torch import Tensor, nn

import metainfer
from metainfer.ir.errors import CapacityError, MetainferError, Unsupported

# --- models that users bring ----------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.two = nn.Conv2d(8, 6, 3, groups=2)
        self.head = nn.Linear(6 * 6 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.two(torch.relu(self.one(x))))
        return self.head(x.flatten(1)).log_softmax(-1)


class HandAttention(nn.Module):
    """Causal attention written out, with one projection for q, k and v."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in (q, k, v)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Einsums(nn.Module):
    """Attention scores by einsum; heads are fixed, so no product of two varying sizes appears."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(10, 24), nn.Linear(6, 24)
        self.gate = nn.Parameter(seeded((4, 6), 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = self.q(x).unflatten(-1, (4, 6)), self.k(y).unflatten(-1, (4, 6))
        scores = torch.einsum("bshe,bthe->bhst", q * self.gate, k)
        return torch.einsum("bhst,bthe->bshe", scores.softmax(-1), k)


class FlatEinsum(nn.Module):
    """torch flattens batch and rows of this einsum into one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((4, 10, 6), 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsd,hde->bhse", x, self.weight)


class Norms(nn.Module):
    """Layer norm, an RMS norm written out, and one without an affine part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(20)
        self.plain = nn.LayerNorm(20, elementwise_affine=False)
        self.scale = nn.Parameter(1 + 0.1 * seeded((20,), 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) + self.plain(x)
        mean = x.float().pow(2).mean(-1, keepdim=True)
        return self.scale * (x * torch.rsqrt(mean + 1e-6))


class Masked(nn.Module):
    """A padding mask chooses what counts: pooled means and a masked maximum."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(x.shape[1], device=x.device)
        seen = at[None, :] < lengths[:, None]
        kept = torch.where(seen[..., None], x, torch.zeros_like(x))
        mean = kept.sum(1) / lengths[:, None].clamp(min=1)
        highest = x.masked_fill(~seen[..., None], -1e9).amax(1)
        return mean, highest


class Gated(nn.Module):
    """Gates from split and chunk, joined by cat and stack."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 32, bias=False)
        self.outer = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.inner(x).chunk(2, dim=-1)
        first, second, third = (F.silu(gate) * up).split([4, 8, 4], dim=-1)
        joined = torch.cat([first, second, third, F.gelu(second)], dim=-1)
        y = x + self.outer(joined)
        return y, torch.stack([y.sin(), y.tanh().abs().sqrt()], dim=1)


class Embedded(nn.Module):
    """Ids in, scores over a tied vocabulary out; a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.mix = nn.Linear(16, 16)
        self.register_buffer("decay", torch.linspace(1.0, 0.1, 16), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.decay
        return F.linear(F.elu(self.mix(x)), self.table.weight)


class LlamaBlock(nn.Module):
    """A decoder layer as Hugging Face writes them: rotate_half, repeat_kv, an additive mask."""

    frequencies: Tensor

    def __init__(self, width: int = 32, heads: int = 4, kv_heads: int = 2, inner: int = 48) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.input_norm = nn.Parameter(1 + 0.1 * seeded((width,), 4))
        self.post_norm = nn.Parameter(1 + 0.1 * seeded((width,), 5))
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        frequencies = 1.0 / 10000 ** (torch.arange(0, self.size, 2).float() / self.size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    @staticmethod
    def rotate_half(x: Tensor) -> Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    @staticmethod
    def repeat_kv(x: Tensor, count: int) -> Tensor:
        batch, heads, length, size = x.shape
        wide = x[:, :, None, :, :].expand(batch, heads, count, length, size)
        return wide.reshape(batch, heads * count, length, size)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, -1, self.size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, -1, self.size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, self.size).transpose(1, 2)
        angles = torch.arange(length, device=x.device).float()[:, None] * self.frequencies[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos()[None, None], angles.sin()[None, None]
        q = q * cos + self.rotate_half(q) * sin
        k = k * cos + self.rotate_half(k) * sin
        k = self.repeat_kv(k, self.heads // self.kv_heads)
        v = self.repeat_kv(v, self.heads // self.kv_heads)
        mask = torch.full((length, length), torch.finfo(x.dtype).min, device=x.device).triu(1)
        weights = torch.matmul(q, k.transpose(2, 3)) * self.size**-0.5 + mask
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.matmul(weights, v).transpose(1, 2).contiguous()
        return self.o_proj(mixed.reshape(batch, length, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x, self.input_norm))
        y = self.norm(x, self.post_norm)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class GroupedSdpa(nn.Module):
    """scaled_dot_product_attention with its own switches."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        kv = self.kv(x)
        k, v = kv.unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class VaryingRows(nn.Module):
    """Rows whose width varies: kernels that want a fixed width must refuse them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(seeded((1,), 6))

    def forward(self, x: Tensor) -> Tensor:
        y = x.softmax(-1).exp() * x + F.silu(x) - F.gelu(x, approximate="tanh")
        y = y * self.scale + x.mean(-1, keepdim=True) + x.cumsum(-1)
        return torch.cat([y, x.sigmoid()], dim=-1) / y.abs().amax(-1, keepdim=True)


@dataclass(frozen=True)
class Kind:
    """A module, inputs of given sizes, and names of the dims that vary."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    dynamic: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[int, int], ...] = field(default=((1, 1), (1, 9), (4, 1), (3, 17)))


KINDS = {
    "conv": Kind(ConvNet, lambda b, s: (seeded((b, 3, 16, 16)),), (("B",),), ((1, 0), (5, 0))),
    "hand_attention": Kind(HandAttention, lambda b, s: (seeded((b, s, 24)),), (("B", "S"),)),
    "einsums": Kind(
        Einsums,
        lambda b, s: (seeded((b, s, 10)), seeded((b, s + 3, 6), 7)),
        (("B", "S"), ("B", "U")),
    ),
    "norms": Kind(Norms, lambda b, s: (seeded((b, s, 20)),), (("B", "S"),)),
    "masked": Kind(
        Masked,
        lambda b, s: (seeded((b, s, 4)), torch.arange(b) % s + 1),
        (("B", "S"), ("B",)),
    ),
    "gated": Kind(Gated, lambda b, s: (seeded((b, s, 12)),), (("B", "S"),)),
    "embedded": Kind(
        Embedded, lambda b, s: ((torch.arange(b * s) * 7 % 30).reshape(b, s),), (("B", "S"),)
    ),
    "llama_block": Kind(LlamaBlock, lambda b, s: (seeded((b, s, 32)),), (("B", "S"),)),
    "varying_rows": Kind(VaryingRows, lambda b, s: (seeded((b, s)),), (("B", "S"),)),
    "grouped_sdpa": Kind(GroupedSdpa, lambda b, s: (seeded((b, s, 16)),), (("B", "S"),)),
    "mixer": Kind(MlpMixer, lambda b, s: (seeded((b, 3, 16, 16)),), (("B",),), ((1, 0), (6, 0))),
    "bert": Kind(
        lambda: BertEncoder(TINY_BERT),
        lambda b, s: bert_inputs(60, b, s),
        (("B", "S"), ("B", "S")),
        # The mask of bert_inputs hides the last token of the first sequence.
        ((1, 2), (1, 9), (4, 3), (3, 17)),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_equal_to_eager_at_every_size(name: str) -> None:
    kind = KINDS[name]
    torch.manual_seed(0)
    module = kind.make().eval()
    bounds = {name: (1, 32) for names in kind.dynamic for name in names}
    model = compiled(module, kind.inputs(2, 7), kind.dynamic, bounds=bounds)
    for batch, length in kind.sizes:
        check(model, module, kind.inputs(batch, length))


def test_minilm_with_its_real_weights() -> None:
    module = BertEncoder(BertSizes()).eval()
    state = load_file(MINILM_FILE.locate())
    state.pop("embeddings.position_ids", None)
    module.load_state_dict(state)
    bounds = {"B": (1, 8), "S": (1, 128)}
    model = compiled(module, bert_inputs(30522), (("B", "S"), ("B", "S")), bounds=bounds)
    for batch, length in ((1, 2), (1, 33), (5, 12)):
        check(model, module, bert_inputs(30522, batch, length))


def test_minilm_from_its_spec_takes_the_weights_of_the_package() -> None:
    path = Path(__file__).parents[1] / "plain_modules.py"
    plan = metainfer.compile(f"{path}:minilm", "cpu", **EXACT)
    module = BertEncoder(BertSizes()).eval()
    state = load_file(MINILM_FILE.locate())
    state.pop("embeddings.position_ids", None)
    module.load_state_dict(state)
    check(load_plan(plan), module, bert_inputs(30522, 2, 11))


def test_fixed_sizes_are_held_to() -> None:
    module = Norms()
    model = compiled(module, (seeded((2, 3, 20)),))
    check(model, module, (seeded((2, 3, 20), 8),))
    with pytest.raises(MetainferError):
        model(seeded((2, 4, 20)))


def test_sizes_outside_the_bounds_are_refused() -> None:
    module = Norms()
    model = compiled(module, (seeded((2, 3, 20)),), (("B",),))
    with pytest.raises(CapacityError, match=r"B = 257.*\[1, 256\]"):
        model(seeded((257, 3, 20)))


def test_equal_names_want_equal_sizes() -> None:
    module = Einsums()
    model = compiled(module, (seeded((2, 3, 10)), seeded((2, 5, 6))), (("B",), ("B",)))
    with pytest.raises(MetainferError, match="B is 2, got 4"):
        model(seeded((2, 3, 10)), seeded((4, 5, 6)))


def test_sizes_may_be_named_as_those_of_a_step() -> None:
    """T and B are sizes of language models' steps; here they are any names."""
    module = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    for name in ("T", "B", "P", "R"):
        model = compiled(module, (seeded((3, 8)),), ((name,),))
        check(model, module, (seeded((5, 8), 1),))


def test_a_product_of_two_varying_sizes_is_refused_with_its_line() -> None:
    with pytest.raises(Unsupported, match=r"(B\*S|S\*B) is not affine") as caught:
        compiled(FlatEinsum(), (seeded((2, 3, 10)),), (("B", "S"),))
    assert "test_module_kinds.py:" in caught.value.origin
    assert "fix all but one" in caught.value.advice
    model = compiled(FlatEinsum(), (seeded((2, 3, 10)),), (("B",),))
    check(model, FlatEinsum(), (seeded((5, 3, 10)),))
