"""Groups that begin with a sum over ranks: what they send, then the rest of the body in one pass.

The pass is the group's own body with a local sum in place of the collective, emitted like any
other: it sums parts that came whole, and takes a finished sum as it is. So types that a body mixes
(a float32 norm weight over a bf16 stream) are computed as the body says, or refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from metainfer.backends.kernel import Constraint, Kernel, Query, Registry, device_kind, feature
from metainfer.backends.ranks.algorithms import (
    LIBRARY_ERROR,
    gather_flat,
    group_of_call,
    guarded,
    parts_to_sum,
    received,
    two_shot_sum,
)
from metainfer.backends.ranks.constraints import requires_of, window_of_query
from metainfer.backends.ranks.direct import DIRECT
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.emit.source import body_of, emit
from metainfer.backends.triton.interpreter import prepare
from metainfer.backends.triton.launch import Launch, Launches, TritonBinder
from metainfer.backends.triton.pointwise import launches
from metainfer.ir.dims import dim
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Graph, Op, Value, attrs_of

KIND = "all_reduce_add_rms_norm"
ROUNDED = "all_reduce_add_rms_norm_quantize"
SCATTERED = "reduce_scatter_add_rms_norm"
_SUMS = ("all_reduce", "reduce_scatter")
Receive = Callable[[TorchCall], torch.Tensor]
_NOTHING: frozenset[int] = frozenset()


def local_op(op: Op, parts: int) -> Op:
    """What a rank computes of a group once it has received.

    Args:
        op: a group whose body begins with a sum over ranks of its first operand.
        parts: how many parts it received; 0 if the sum is finished.

    Shapes: the first operand becomes [parts, ...], or stays.

    Raises: Unsupported if the body is another one.
    """
    body = op.body
    if body is None or not _begins_by_meeting(body):
        raise Unsupported(
            "the group does not begin with a sum over ranks of its first operand",
            advice="the group is split, or another kernel takes it",
        )
    total, rest = body.ops[0].result, body.ops[1:]
    first, ops = total, rest
    if parts:
        type_ = total.tensor
        first = Value(body.inputs[0].name, type_.with_shape((dim(parts), *type_.shape)))
        ops = (Op("sum", (first,), (total,), attrs_of({"dims": (0,)})), *rest)
    given = Value(op.operands[0].name, first.type)
    return replace(
        op,
        operands=(given, *op.operands[1:]),
        attrs=attrs_of({"kind": f"{op.attr['kind']}_{'parts' if parts else 'whole'}"}),
        body=replace(body, inputs=(first, *body.inputs[1:]), ops=ops),
        choices=(),
    )


def _begins_by_meeting(body: Graph) -> bool:
    first = next(iter(body.ops), None)
    return first is not None and first.name in _SUMS and first.operands[0] == body.inputs[0]


def _library(call: TorchCall) -> torch.Tensor:
    x = call.inputs[0].clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group_of_call(call))
    return x


def _one_shot(call: TorchCall) -> torch.Tensor:
    x, ranks = call.inputs[0], int(call.attrs["ranks"])
    return gather_flat(x, group_of_call(call), ranks).view(ranks, *x.shape)


@dataclass(frozen=True)
class MeetingBinder(TritonBinder):
    """An exchange, then the launches of the pass on what was received.

    Attributes:
        receive: meets the other ranks: the finished sum, or all parts in rank order.
    """

    receive: Receive

    def bind(self, call: TorchCall) -> Callable[[], None]:
        """A function without arguments that runs the call; buffers are made as it runs."""
        prepare(call.outputs[0].device.type)

        def passed(call: TorchCall) -> None:
            for launch in _pass(call, self.receive(call)):
                launch.run()

        return partial(guarded(str(call.attrs["kind"]), passed), call)


def _pass(call: TorchCall, received: torch.Tensor) -> Sequence[Launch]:
    parts = received.shape[0] if received.ndim > call.inputs[0].ndim else 0
    inputs = (received, *call.inputs[1:])
    return launches(replace(call, op=local_op(call.op, parts), inputs=inputs))


def _launches(is_whole: bool) -> Launches:
    """Launches of the pass, whatever is received: what a check of kernels compiles."""

    def made(call: TorchCall) -> Sequence[Launch]:
        x, shape = call.inputs[0], call.outputs[0].shape
        received = shape if is_whole else (int(call.attrs["ranks"]), *shape)
        return _pass(call, torch.empty(received, dtype=x.dtype, device=x.device))

    return made


_MEETINGS = {KIND: "all_reduce", ROUNDED: "all_reduce", SCATTERED: "reduce_scatter"}
# How the sum comes, and whether it is finished then.
_RECEIVE: Mapping[tuple[str, str], tuple[Receive, bool]] = {
    **{
        (kind, algorithm): how
        for kind in (KIND, ROUNDED)
        for algorithm, how in {
            "library": (_library, True),
            "one_shot": (_one_shot, False),
            "two_shot": (two_shot_sum, True),
        }.items()
    },
    (SCATTERED, "one_shot"): (parts_to_sum, False),
    **{
        (kind, algorithm): (partial(received, algorithm=run), True)
        for kind, name in _MEETINGS.items()
        for algorithm, run in DIRECT[name].items()
    },
}


def _is_emitted(query: Query) -> str | None:
    # What cannot be emitted is raised, and read from there as the reason.
    for parts in (0, int(str(query.op.attr["ranks"]))):
        emit(body_of(local_op(query.op, parts)), _NOTHING, _NOTHING)
    return None


EMITTED = Constraint("a sum over ranks and a body that can be emitted", _is_emitted)


def register_fused(kernels: Registry) -> None:
    """Add each group by each algorithm of its sum."""
    for (kind, algorithm), (receive, is_whole) in _RECEIVE.items():
        units = (feature("fp8_mma"),) if kind == ROUNDED else ()
        kernels.add(
            Kernel(
                f"ranks.{kind}_{algorithm}", kind, "ranks",
                requires=(
                    device_kind("gpu"), feature("triton"), *units, *requires_of(algorithm), EMITTED,
                ),
                error=LIBRARY_ERROR if algorithm == "library" else 0.0,
                window=window_of_query(algorithm),
                binder=MeetingBinder(_launches(is_whole), receive),
            )
        )  # fmt: skip
