"""Routers: which experts a token goes to, and its shares in them."""

# T tokens, D hidden, N experts of a layer, K chosen by a token, G groups of experts, J chosen ones.

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metainfer.models.experts_config import ExpertsConfig

# A group of experts counts by this many of its best ones, where scores are corrected.
_BEST_OF_GROUP = 2
# Keeps a share of nothing from becoming NaN.
_TINY = 1e-20


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
        logits_TN = F.linear(x_TD, self.weight).float()
        if self.experts.scores == "sigmoid":
            shares_TK, ids_TK = self._corrected(logits_TN.sigmoid())
        else:
            shares_TN = logits_TN.softmax(-1)
            if self.experts.groups > 1:
                best_TG = self._grouped(shares_TN).amax(-1)
                shares_TN = self._within(shares_TN, best_TG, 0.0)
            shares_TK, ids_TK = torch.topk(shares_TN, self.experts.chosen)
        if self.experts.renormalise:
            shares_TK = shares_TK / self._total(shares_TK)
        if self.experts.scaling != 1.0:
            shares_TK = shares_TK * self.experts.scaling
        return shares_TK, ids_TK

    def _total(self, shares_TK: Tensor) -> Tensor:
        total_T1 = shares_TK.sum(-1, keepdim=True)
        return total_T1 + _TINY if self.experts.scores == "sigmoid" else total_T1

    def _corrected(self, scores_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Experts chosen by corrected scores; their shares are the plain ones."""
        choice_TN = scores_TN + self.e_score_correction_bias
        if self.experts.groups > 1:
            best_TGb, _ = torch.topk(self._grouped(choice_TN), _BEST_OF_GROUP)
            choice_TN = self._within(choice_TN, best_TGb.sum(-1), float("-inf"))
        _, ids_TK = torch.topk(choice_TN, self.experts.chosen)
        return scores_TN.gather(-1, ids_TK), ids_TK

    def _grouped(self, scores_TN: Tensor) -> Tensor:
        return scores_TN.reshape(-1, self.experts.groups, self.experts.num // self.experts.groups)

    def _within(self, scores_TN: Tensor, groups_TG: Tensor, outside: float) -> Tensor:
        """The scores with those outside the best groups replaced."""
        _, best_TJ = torch.topk(groups_TG, self.experts.chosen_groups)
        every_G = torch.arange(self.experts.groups, device=best_TJ.device)
        kept_TG = (best_TJ[..., None] == every_G).float().sum(-2) > 0
        kept = self._grouped(scores_TN).masked_fill(~kept_TG[..., None], outside)
        return kept.flatten(-2)
