"""Recording which experts a model's routers choose while it answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np
import torch

from metainfer.ir.errors import PlanError, Unsupported
from metainfer.ir.flatten import FlatModule, FlatOp
from metainfer.ir.graph import Graph, Op, Value
from metainfer.ir.histogram import RoutingHistogram, layer_of
from metainfer.runtime.executor import Observer

Array = np.ndarray[Any, np.dtype[Any]]
# Ops that number experts anew: by the slots of a placement, or within a rank's own.
_RENUMBERS = ("local_index", "route")


@dataclass(frozen=True)
class RoutedLayer:
    """Where the choices of a layer can be read.

    Attributes:
        name: of the layer, as a histogram names it.
        num_experts: experts that its router chooses from.
        reader: first result of the op before which the choices stand in memory.
        ids: the choices, numbers of experts as the router gives them.
    """

    name: str
    num_experts: int
    reader: str
    ids: Value


def routed_layers(flat: FlatModule) -> tuple[RoutedLayer, ...]:
    """The layers with experts of a module, in order.

    Raises: Unsupported if a fused group computes, or renumbers, what it chooses, so that choices
    are never in memory, or if a layer's rows are cut into parts.
    """
    makers = {v.name: item.op for item in flat.ops for v in item.op.results}
    found = tuple(_routed(item, op, makers) for item, op in _expert_ops(flat.ops))
    for earlier, later in pairwise(found):
        if earlier.name == later.name:
            raise Unsupported(
                f"the rows of {later.name} are cut into parts, whose padding nobody counts",
                advice="compile for recording with --no-overlap",
            )
    return found


def _expert_ops(items: Sequence[FlatOp]) -> Iterator[tuple[FlatOp, Op]]:
    """Ops that run experts, each with the item it stands in."""
    for item in items:
        inner = item.op.body.ops if item.op.body is not None else (item.op,)
        yield from ((item, op) for op in inner if op.name == "experts")


def _routed(item: FlatOp, op: Op, makers: Mapping[str, Op]) -> RoutedLayer:
    body = item.op.body
    inner = {} if body is None else {v.name: o for o in body.ops for v in o.results}
    outer = {} if body is None else dict(_pairs(body, item.op))
    weights = [outer.get(v.name, v).name for v in op.operands[3:]]
    # A tensor that two graphs make differently has the graph's name behind its own.
    name = layer_of([weight.removeprefix("@").split(":")[0] for weight in weights])
    ids, within = _before_renumbering(op.operands[1], inner)
    if ids.name in inner:
        raise Unsupported(
            f"the choices of {name} never leave a fused group",
            advice="compile for recording with --skip-pass fuse",
        )
    ids, outside = _before_renumbering(outer.get(ids.name, ids), makers)
    router = makers.get(ids.name)
    if router is not None and router.body is not None:
        if any(o.name == "route" for o in router.body.ops):
            raise Unsupported(
                f"the choices of {name} leave a fused group as slots of a placement",
                advice="compile for recording with --skip-pass fuse, or without a placement",
            )
    total = int(cast(int, op.attr.get("total", 0)))
    num = total or op.operands[3].tensor.shape[0].static
    for one in (*within, *outside):
        # Behind it there are slots, and more of them than experts.
        num = one.operands[1].tensor.shape[0].static if one.name == "route" else num
    reader = outside[-1] if outside else item.op
    return RoutedLayer(name, num, reader.results[0].name, ids)


def _before_renumbering(ids: Value, makers: Mapping[str, Op]) -> tuple[Value, list[Op]]:
    """The choices as the router made them, and the ops that number them anew, last first."""
    passed: list[Op] = []
    while ids.name in makers and makers[ids.name].name in _RENUMBERS:
        passed.append(makers[ids.name])
        ids = passed[-1].operands[0]
    return ids, passed


def _pairs(body: Graph, op: Op) -> Iterator[tuple[str, Value]]:
    """Names in a group's body, and what they are outside."""
    return ((p.name, v) for p, v in zip(body.inputs, op.operands, strict=True))


class Observed(Protocol):
    """A model whose steps can be watched; see `runtime.load.LoadedModel`."""

    max_tokens: int
    max_sequences: int
    max_context: int
    page_size: int
    num_pages: int
    vocab_size: int
    plan_hash: str

    def observe(
        self,
        phase: str,
        tokens: np.ndarray,
        step: Mapping[str, np.ndarray],
        watched: Mapping[str, Value],
        seen: Observer,
    ) -> np.ndarray:
        """Run one step, showing values on the way."""
        ...


class RecordingRunner:
    """A model as a step runner that counts the experts its tokens are sent to.

    Padding is not counted.

    Args:
        model: what runs.
        layers: its layers with experts, by phase.

    Raises: PlanError if the phases have no layers with experts, or different ones.
    """

    def __init__(self, model: Observed, layers: Mapping[str, Sequence[RoutedLayer]]) -> None:
        self._model = model
        self._layers = {
            phase: {one.reader: one for one in found} for phase, found in layers.items()
        }
        kinds = {tuple((one.name, one.num_experts) for one in found) for found in layers.values()}
        if len(kinds) != 1 or not next(iter(kinds)):
            raise PlanError(
                "the plan has no layers with experts: there is nothing to record",
                advice="compile a mixture-of-experts model",
            )
        self._counts = {name: np.zeros(num, np.int64) for name, num in next(iter(kinds))}
        self.num_tokens = 0
        self.max_tokens, self.max_sequences = model.max_tokens, model.max_sequences
        self.max_context, self.page_size = model.max_context, model.page_size
        self.num_pages, self.vocab_size = model.num_pages, model.vocab_size
        self.plan_hash = model.plan_hash

    def run(self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        """Execute one step and count. Shapes: as `StepRunner.run`."""
        valid = int(step["num_valid"][0])
        layers = self._layers[phase]

        def seen(reader: str, ids: torch.Tensor) -> None:
            layer = layers[reader]
            chosen = ids[:valid].cpu().numpy().ravel()
            known = chosen[(chosen >= 0) & (chosen < layer.num_experts)]
            self._counts[layer.name] += np.bincount(known, minlength=layer.num_experts)

        watched = {reader: layer.ids for reader, layer in layers.items()}
        logits = self._model.observe(phase, tokens, step, watched, seen)
        self.num_tokens += valid
        return logits

    def histogram(self, model: str) -> RoutingHistogram:
        """What was counted so far, under the model's name.

        Raises: HistogramError if nothing ran yet.
        """
        rows = tuple(tuple(row.tolist()) for row in self._counts.values())
        return RoutingHistogram(model, tuple(self._counts), rows)
