"""Routers: which experts a token goes to, and its shares in them."""

# T tokens, D hidden, N experts of a layer, K chosen by a token, G groups of experts, J chosen ones.

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metainfer.models import functional
from metainfer.models.experts_config import ExpertsConfig


class Router(nn.Module):
    """Scores of all experts, and the best ones' shares.

    Scores are shares of one softmax, or sigmoids of their own. Sigmoids are chosen by after a
    correction is added that the shares do not see, which training used to balance experts.
    Source: Fedus et al. 2022; DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2.
    """

    def __init__(self, width: int, experts: ExpertsConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.num, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)
        self.experts = experts
        if experts.scores == "sigmoid":
            self.e_score_correction_bias = nn.Parameter(torch.zeros(experts.num))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Corrections stay in float32 whatever type the model is cast to: they decide choices."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.experts.scores == "sigmoid":
            held = self.e_score_correction_bias
            self.e_score_correction_bias = nn.Parameter(held.float(), requires_grad=False)
        return self

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and numbers of each token's experts: x [T, D] -> [T, K] and [T, K]."""
        config, logits_TN = self.experts, F.linear(x_TD, self.weight)
        if config.scores == "sigmoid":
            return functional.choose_experts(
                logits_TN, self.e_score_correction_bias, k=config.chosen, groups=config.groups,
                chosen_groups=config.chosen_groups, renormalise=config.renormalise,
                scaling=config.scaling,
            )  # fmt: skip
        shares_TN = logits_TN.float().softmax(-1)
        if config.groups > 1:
            shares_TN = self._within_groups(shares_TN)
        shares_TK, ids_TK = torch.topk(shares_TN, config.chosen)
        if config.renormalise:
            shares_TK = shares_TK / shares_TK.sum(-1, keepdim=True)
        return shares_TK if config.scaling == 1.0 else shares_TK * config.scaling, ids_TK

    def _within_groups(self, shares_TN: Tensor) -> Tensor:
        """The shares with those outside the best groups, by their best expert, set to zero."""
        groups = self.experts.groups
        shares = shares_TN.reshape(-1, groups, self.experts.num // groups)
        _, best_TJ = torch.topk(shares.amax(-1), self.experts.chosen_groups)
        every_G = torch.arange(groups, device=best_TJ.device)
        kept_TG = (best_TJ[..., None] == every_G).float().sum(-2) > 0
        return shares.masked_fill(~kept_TG[..., None], 0.0).flatten(-2)
