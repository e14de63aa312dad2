"""Whether a plan fits into what is free of a GPU's memory: asked before any weight is read."""

import torch

from metainfer.ir.errors import CapacityError
from metainfer.ir.plan import Plan

_GIB = 2**30


def check_free_memory(plan: Plan, stage: int, index: int) -> None:
    """Require free memory for all that a rank of a plan holds.

    Args:
        plan: the plan.
        stage: of the pipeline, whose part the rank holds.
        index: of the rank's GPU on this host.

    Raises: CapacityError saying what is needed, term by term, and what is there.
    """
    capacity = plan.capacity(stage)
    needed = int(capacity["total_bytes"])
    free, total = torch.cuda.mem_get_info(index)
    if needed <= free:
        return
    terms = [f"{t['name']:<12} {t['bytes'] / _GIB:9.2f} GiB" for t in capacity["terms"]]
    raise CapacityError(
        f"GPU {index} has {free / _GIB:.2f} GiB free, the plan needs {needed / _GIB:.2f} GiB",
        text="\n".join(terms),
        advice=f"{(total - free) / _GIB:.2f} of its {total / _GIB:.2f} GiB are taken: end what "
        "holds them, or compile with a smaller --memory-fraction or --max-context",
    )
