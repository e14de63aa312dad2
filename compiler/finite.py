"""The first op of a step whose result is not finite: where NaN or infinite weights show."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from metainfer.ir.errors import MetainferError
from metainfer.ir.flatten import FlatOp
from metainfer.ir.graph import Value
from metainfer.ir.printer import print_op
from metainfer.ir.views import is_view, strided_values
from metainfer.runtime.model import LoadedModel


def refuse_not_finite(
    model: LoadedModel, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]
) -> None:
    """Run a step whose logits are not finite again, and name the op that began it.

    Shapes: tokens and step as `runtime.runner.StepRunner.run`.
    Raises: MetainferError, always.
    """
    item = first_not_finite(model, phase, tokens, step)
    if item is None:
        raise MetainferError(
            "logits are not finite, although the results of all ops are when they are looked at",
            advice="kernels that run beside each other may share memory: report this plan",
        )
    op = item.op
    weights = ", ".join(v.name[1:] for v in op.operands if v.is_weight)
    blame = f"{weights} may hold NaN or infinite numbers" if weights else "what it reads is finite"
    raise MetainferError(
        f"a result of {op.attr.get('kind', op.name)} is not finite, the first of a {phase} step",
        text=f"{item.place}: {print_op(op)}",
        origin=str(op.source or ""),
        advice=f"{blame}: check the checkpoint; if numbers outgrow their format, compile with "
        "--activations f32 or --kv f32",
    )


def first_not_finite(
    model: LoadedModel, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]
) -> FlatOp | None:
    """The first op that makes a number which is not finite; None if there is none.

    Each result is looked at right before the next op runs: later ones may lie in its memory.
    """
    flat = model.executor(phase).flat
    strided = strided_values(item.op for item in flat.ops)
    made = [item for item in flat.ops if not is_view(item.op, strided)]
    watched: dict[str, Value] = {}
    makers: dict[str, FlatOp] = {}
    for item, following in pairwise(made):
        result = next((v for v in item.op.results if not v.is_state), None)
        if result is not None:
            reader = following.op.results[0].name
            watched[reader], makers[reader] = result, item
    bad: list[FlatOp] = []

    def seen(reader: str, value: Any) -> None:
        if not bad and not is_finite(value):
            bad.append(makers[reader])

    logits = model.observe(phase, tokens, step, watched, seen)
    if not bad and not np.isfinite(logits).all():
        bad.append(made[-1])
    return bad[0] if bad else None


def is_finite(value: Any) -> bool:
    """Whether all numbers of a tensor are finite; of codes it is their scales that tell."""
    numbers: torch.Tensor = value.scales if hasattr(value, "scales") else value
    return not numbers.is_floating_point() or bool(torch.isfinite(numbers.float()).all())
