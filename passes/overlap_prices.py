"""What the tasks of a block cost at given sizes, by the kernels that `select` chose."""

from collections.abc import Mapping

from metainfer.backends.kernel import Query
from metainfer.hardware.sharing import sharing_of
from metainfer.ir.graph import Choice, Op
from metainfer.passes.step_tasks import Price
from metainfer.passes.target import Target


def choice_at(op: Op, env: Mapping[str, int]) -> Choice:
    """The row of a kernel table that applies at concrete sizes."""
    for choice in op.choices:
        if not choice.symbol or env[choice.symbol] <= choice.limit:
            return choice
    return op.choices[-1]


class Pricing:
    """Prices of ops, each asked once."""

    def __init__(self, target: Target, limits: Mapping[str, tuple[int, int]]) -> None:
        self.sharing = sharing_of(target.device)
        self._target, self._limits = target, limits
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    def at(self, env: Mapping[str, int]) -> Price:
        """Prices at concrete sizes."""
        sizes = tuple(sorted(env.items()))

        def price(op: Op) -> tuple[float, float]:
            if not op.choices:
                return 0.0, 1.0
            name = choice_at(op, env).kernel
            types = tuple(v.type for v in (*op.operands, *op.results))
            key = (sizes, name, op.attrs, types)
            if key not in self._known:
                self._known[key] = self._price(op, name, env)
            return self._known[key]

        return price

    def _price(self, op: Op, name: str, env: Mapping[str, int]) -> tuple[float, float]:
        target, device = self._target, self._target.device
        kernel = target.kernels.get(name)
        waste = 0.0
        if kernel.repairs:
            query = Query(op, device, self._limits)
            waste = sum(r.waste(query) for r in kernel.repairs_for(kernel.refusals(query)) or ())
        seconds = target.costs.kernel(kernel, op, device, env, waste).seconds
        least = target.costs.roofline(op, device, env, kernel.efficiency.rate).seconds
        return seconds, min(max(least / seconds, 0.05), 1.0) if seconds else 1.0
