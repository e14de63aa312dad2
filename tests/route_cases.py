"""Cases of the op route: choices of experts, and the slots of their replicas. Holds no tests."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from metainfer.backends.torch.check import make_op
from metainfer.ir.dtypes import I32, I64, Scalar
from metainfer.ir.graph import Op
from metainfer.ir.types import tensor


@dataclass(frozen=True)
class Case:
    """Sizes, and how many replicas an expert has at most."""

    tokens: int
    choices: int
    experts: int
    most: int
    ids: Scalar = I64


CASES = {
    "one of each": Case(1, 1, 1, 1),
    "one replica each": Case(7, 2, 5, 1),
    "one expert has all": Case(9, 3, 1, 8),
    "odd": Case(37, 3, 13, 3, I32),
    "large": Case(300, 8, 128, 17),
    "narrow": Case(64, 8, 160, 4, I32),
}


def routed(case: Case) -> tuple[Op, list[Any]]:
    """The op and its data: some choices are none of the experts."""
    rng = np.random.default_rng(case.tokens)
    replicas = rng.integers(1, case.most + 1, case.experts).astype(np.int32)
    replicas[rng.integers(case.experts)] = case.most
    slots = rng.permutation(case.experts * case.most).reshape(case.experts, case.most)
    behind = np.arange(case.most)[None, :] >= replicas[:, None]
    table = np.where(behind, -1, slots).astype(np.int32)
    ids = rng.integers(-1, case.experts + 1, (case.tokens, case.choices)).astype(case.ids.numpy)
    ids[-1, -1] = -1
    ids[0, 0] = case.experts - 1
    types = [tensor(case.ids, *ids.shape), tensor(I32, *table.shape), tensor(I32, case.experts)]
    return make_op("route", types, {}), [ids, table, replicas]
