"""Products of many rows by codes: the weight is widened into scratch, the library multiplies.

A weight is written and read once more, in parts that scratch holds; with enough rows that costs
less than what the library's product is faster by.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from metainfer.backends.kernel import Effort, Query
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.interpreter import prepare
from metainfer.backends.triton.launch import Launch, TritonBinder
from metainfer.backends.triton.linear import STORAGES
from metainfer.backends.triton.scratch import Piece, carve, scratch_bytes
from metainfer.backends.triton.words import Words
from metainfer.hardware.device import Device
from metainfer.ir.dtypes import F8E4M3
from metainfer.ir.graph import Op

AT_ONCE = 1 << 26  # numbers that scratch holds: 128 MiB
_ROWS, _INNER = 32, 256  # of a program
_NUMBER_BYTES = 2


def spans(columns: int, inner: int) -> list[tuple[int, int]]:
    """Rows of a weight that are widened together: first and last but one, whole programs each."""
    step = max(AT_ONCE // inner // _ROWS, 1) * _ROWS
    return [(at, min(at + step, columns)) for at in range(0, columns, step)]


def scratch_of(columns: int, inner: int) -> list[Piece]:
    """Numbers of the largest part."""
    rows = max(stop - start for start, stop in spans(columns, inner))
    return [Piece((rows, inner), torch.bfloat16)]


def workspace(query: Query) -> int:
    """Scratch bytes of a product."""
    columns, inner = (n.static for n in query.tensor(1).shape)
    return scratch_bytes(scratch_of(columns, inner))


def widening(weight: Words, out: torch.Tensor, start: int, stop: int) -> Launch:
    """The launch that widens some rows of a matrix, or of a stack of them taken as one.

    Shapes: out [stop - start, K].
    """
    from metainfer.backends.triton.templates.widen_rows import widen_rows

    is_words = weight.format.element != F8E4M3
    _, pointers, format_ = STORAGES["fp4" if is_words else "codes"].parts(weight)
    programs = -(-(stop - start) // _ROWS) * -(-weight.width // _INNER)
    return Launch(
        widen_rows,
        (programs,),
        {
            "out": out, "weight": pointers, "start": start, "count": stop - start,
            "columns": math.prod(weight.shape[:-1]), "inner": weight.width,
        },
        {"FORMAT": format_, "BN": _ROWS, "BK": _INNER},
        num_warps=4,
        num_stages=1,
    )  # fmt: skip


def launches(call: TorchCall) -> Sequence[Launch]:
    """The widening of each part, in order; all of them take the same scratch."""
    weight: Words = call.inputs[1]
    columns, inner = weight.shape
    (scratch,) = carve(call.workspace, scratch_of(columns, inner), call.outputs[0].device)
    return [widening(weight, scratch, *span) for span in spans(columns, inner)]


class WidenedBinder(TritonBinder):
    """Widens a part of the weight and multiplies by it, part by part."""

    def bind(self, call: TorchCall) -> Callable[[], None]:
        """A function without arguments that runs the call.

        Raises: Unsupported if Triton cannot run here.
        """
        x, weight = call.inputs[:2]
        prepare(x.device.type)
        rows, out = x.reshape(-1, x.shape[-1]), call.outputs[0].view(-1, weight.shape[0])
        parts = [
            (launch, launch.arguments["out"][: stop - start], out[:, start:stop])
            for launch, (start, stop) in zip(
                self.launches(call), spans(*weight.shape), strict=True
            )
        ]  # fmt: skip

        def run() -> None:
            for launch, numbers, made in parts:
                launch.run()
                torch.mm(rows, numbers.t(), out=made)

        return run


def effort_of(memory: float, compute: float) -> Effort:
    """The widening and the product, one after the other, over the product's arithmetic alone.

    Args:
        memory: fraction of the bandwidth that both reach.
        compute: fraction of the rate that the product does.
    """

    def factor(op: Op, device: Device, env: Mapping[str, int]) -> float:
        rows = math.prod(op.results[0].tensor.concrete(env)[:-1])
        weight = op.operands[1].tensor
        numbers = math.prod(weight.concrete({}))
        bandwidth = device.memory_bandwidth.sustained * memory
        arithmetic_s = 2.0 * rows * numbers / (device.rate("bf16").sustained * compute)
        if arithmetic_s == 0.0:
            return 1.0
        widening_s = (weight.bytes_at({}) + _NUMBER_BYTES * numbers) / bandwidth
        # The product reads what was written, and much of that from the last cache.
        product_s = max(arithmetic_s, _NUMBER_BYTES * numbers / bandwidth)
        return (widening_s + product_s) / arithmetic_s

    return factor
