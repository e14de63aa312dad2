"""Every algorithm of every collective on the GPUs of one host, by size, beside the library's own.

Times are of a call within a captured graph of many, the slowest rank's; beside each stands the
prediction, and below the sizes what a rank puts on the wire in a second, beside the link's rate as
the machine's file has it. Algorithms that the ranks refuse are named with their reason.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/gpu/collectives.py --hw 2xh200
    NCCL_P2P_DISABLE=1 python -m torch.distributed.run --nproc-per-node 2 \\
        benchmarks/gpu/collectives.py --hw 2xh200-nop2p
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from timing import captured_us

from metainfer.backends.ranks.algorithms import ALGORITHMS
from metainfer.backends.registry import installed
from metainfer.backends.torch.call import TorchCall
from metainfer.hardware import load_machine
from metainfer.hardware.collective_cost import prices
from metainfer.hardware.machine import Machine
from metainfer.ir.dtypes import BF16
from metainfer.ir.errors import MetainferError
from metainfer.ir.graph import Op, Value, attrs_of
from metainfer.ir.ops.record import infer_types, op_def
from metainfer.ir.strategy import Layout
from metainfer.ir.streams import payload_bytes
from metainfer.ir.types import tensor
from metainfer.runtime.ranks import Ranks, join, launched

WIDTH = 4096
CALLS = 20  # of one graph
_OWN: dict[str, dict[str, Any]] = {"all_reduce": {}, "all_to_all": {"source": 0, "target": 0}}


def op_of(name: str, payload: int, ranks: int) -> Op:
    """A collective of bf16 rows whose payload is about so many bytes."""
    rows = max(payload // (2 * WIDTH), 1)
    given = max(rows // ranks, 1) * (1 if name == "all_gather" else ranks)
    shape = (rows if name == "all_reduce" else given, WIDTH)
    attrs = op_def(name).complete({"axis": "tp", "ranks": ranks, **_OWN.get(name, {"dim": 0})})
    x = Value("%x", tensor(BF16, *shape))
    (result,) = infer_types(name, [x.type], attrs)
    return Op(name, (x,), (Value("%y", result),), attrs_of(attrs))


def sent_bytes(op: Op, algorithm: str, ranks: int) -> float:
    """What one rank puts on the wire."""
    parts = ranks if op.name == "all_reduce" and algorithm.startswith("one_shot") else 1
    times = 2 if op.name == "all_reduce" and parts == 1 else 1
    return payload_bytes(op, {}) * times * parts * (ranks - 1) / ranks


def time_of(op: Op, algorithm: str, ranks: Ranks) -> float:
    """Microseconds of a call, the slowest rank's.

    Raises: MetainferError if the ranks refuse the algorithm.
    """
    attrs = op_def(op.name).complete(op.attr)
    x, out = (
        torch.randn(v.tensor.concrete({}), dtype=torch.bfloat16, device=ranks.device)
        for v in (op.operands[0], op.result)
    )
    run = installed().kernels.get(f"ranks.{op.name}_{algorithm}").binder.run
    call: Callable[[], object] = partial(run, TorchCall(op, (x,), (out,), attrs))
    call()
    own = torch.tensor([captured_us([call] * CALLS)])
    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=ranks.control)
    return float(own)


def report(name: str, sizes: list[int], machine: Machine, ranks: Ranks) -> list[str]:
    """Lines of one collective."""
    world = ranks.process.world
    lines = [f"{name} over {world} ranks, us in a graph (predicted us), GB/s on the wire"]
    for algorithm in ALGORITHMS[name]:
        if algorithm == "islands":
            continue
        cells = []
        for size in sizes:
            op = op_of(name, size, world)
            try:
                us = time_of(op, algorithm, ranks)
            except MetainferError as error:
                cells = [f"refused: {error.what}"]
                break
            found = prices(name, machine, tuple(range(world)), payload_bytes(op, {}))
            wanted = next((p.seconds * 1e6 for p in found if p.algorithm == algorithm), 0.0)
            rate = sent_bytes(op, algorithm, world) / us / 1e3
            cells.append(f"{size >> 10} KiB {us:.1f} ({wanted:.1f}) {rate:.0f}")
        lines.append(f"  {algorithm:14s} " + "; ".join(cells))
    return lines


def main() -> None:
    """Measure and print, on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hw", required=True, help="the machine that the ranks run on")
    parser.add_argument("--kib", type=int, nargs="*", default=[8, 64, 512, 4096, 32768, 65536])
    args = parser.parse_args()
    process, machine = launched(), load_machine(args.hw)
    if process is None:
        parser.error("start it by torch.distributed.run")
    ranks = join(
        Layout(tp=process.world), "none", process, "gpu", 60.0, machine.topology()
    )  # fmt: skip
    link = machine.topology().path(0, 1)
    lines = [f"link: {link.write / 1e9:.0f} GB/s written, {link.read / 1e9:.0f} GB/s read"]
    for name in ALGORITHMS:
        lines += report(name, [k << 10 for k in args.kib], machine, ranks)
        if ranks.is_leader:
            print("\n".join(lines), flush=True)
        lines = []
    ranks.close()


if __name__ == "__main__":
    main()
