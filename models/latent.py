"""Multi-head latent attention (DeepSeek-V2 and V3) in plain PyTorch.

Keys and values of all heads are made from one narrow latent a token; a rotary key beside it is
shared by all heads. The module says so plainly, by `functional.attention` over whole keys and
values; the pass `absorb_latents` finds that only latents need to be kept.
"""

# T tokens, D hidden, H heads, C width of a latent, R of a rotary key, N of the rest of a head's
# key, V of a head's value.

import torch
from torch import Tensor, nn

from metainfer.models import functional
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.latent_config import LatentConfig
from metainfer.models.norm import RmsNorm

# NOTE: DeepSeek's norms of latents have this, whatever the model's own is.
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Causal attention whose keys and values come from one latent a token."""

    def __init__(self, config: DecoderConfig, latent: LatentConfig) -> None:
        super().__init__()
        self.config, self.latent = config, latent
        hidden, heads, bias = config.hidden, config.heads, config.qkv_bias
        if latent.query_rank:
            self.q_a_proj = nn.Linear(hidden, latent.query_rank, bias=bias)
            self.q_a_layernorm = RmsNorm(latent.query_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(latent.query_rank, heads * latent.key_width, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, heads * latent.key_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent.rank + latent.rope_width, bias=bias)
        self.kv_a_layernorm = RmsNorm(latent.rank, LATENT_EPS)
        inner = heads * (latent.plain_width + latent.value_width)
        self.kv_b_proj = nn.Linear(latent.rank, inner, bias=False)
        self.o_proj = nn.Linear(heads * latent.value_width, hidden, bias=config.o_bias)

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """Mix each token with those before it: x [T, D] -> [T, D]."""
        latent, heads = self.latent, self.config.heads
        rotary = latent.rope_width
        q_THQ = self._queries(x_TD).reshape(-1, heads, latent.key_width)
        q_THN, q_THR = torch.split(q_THQ, [latent.plain_width, rotary], -1)
        c_TC, r_TR = torch.split(self.kv_a_proj_with_mqa(x_TD), [latent.rank, rotary], -1)
        kv_THK = self.kv_b_proj(self.kv_a_layernorm(c_TC)).unflatten(-1, (heads, -1))
        k_THN, v_THV = torch.split(kv_THK, [latent.plain_width, latent.value_width], -1)
        q_THR = self._turned(q_THR, positions_T)
        r_THR = self._turned(r_TR.unsqueeze(1), positions_T).expand(-1, heads, -1)
        mixed_THV = functional.attention(
            torch.cat((q_THN, q_THR), -1),
            torch.cat((k_THN, r_THR), -1),
            v_THV,
            scale=self.config.scale or latent.key_width**-0.5,
        )
        return self.o_proj(mixed_THV.flatten(-2))

    def _queries(self, x_TD: Tensor) -> Tensor:
        if not self.latent.query_rank:
            return self.q_proj(x_TD)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))

    def _turned(self, x_THR: Tensor, positions_T: Tensor) -> Tensor:
        return functional.rope(
            x_THR,
            positions_T,
            interleaved=self.latent.interleaved,
            **self.config.rope.attrs(),
        )
