"""Compares the tensors of a checkpoint with those that a model wants."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint.interface import Checkpoint

# Enough to see the pattern; the counts say how many there are.
_LISTED = 10


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    *,
    ignore: Sequence[str] = (),
) -> None:
    """Require that a checkpoint has exactly the expected tensors, in their shapes.

    Args:
        checkpoint: what was opened.
        expected: wanted shape by name.
        ignore: glob patterns of names that may be missing or too many.

    Raises: CheckpointError listing missing, extra and misshapen tensors.
    """
    found = {name: info.shape for name, info in checkpoint.tensors.items()}
    missing = _relevant(expected.keys() - found.keys(), ignore)
    extra = _relevant(found.keys() - expected.keys(), ignore)
    misshapen = [n for n in sorted(expected.keys() & found.keys()) if found[n] != expected[n]]
    if not (missing or extra or misshapen):
        return
    lines = _listing(
        "missing", missing, lambda n: f"{n} {list(expected[n])}{_nearest(n, extra, found)}"
    )
    lines += _listing("extra", extra, lambda n: f"{n} {list(found[n])}")
    lines += _listing(
        "misshapen", misshapen, lambda n: f"{n} has {list(found[n])}, wanted {list(expected[n])}"
    )
    raise CheckpointError(
        f"the checkpoint's tensors are not those of the model: {len(missing)} missing, "
        f"{len(extra)} extra, {len(misshapen)} misshapen",
        text="\n".join(lines),
        advice="check that checkpoint and model are of the same architecture and size"
        + ("; tensors of no use to the model are named by ModelSpec(ignore=...)" if extra else ""),
    )


def _relevant(names: Iterable[str], ignore: Sequence[str]) -> list[str]:
    return sorted(n for n in names if not any(fnmatchcase(n, p) for p in ignore))


def _listing(kind: str, names: list[str], line: Callable[[str], str]) -> list[str]:
    shown = [f"{kind}: {line(name)}" for name in names[:_LISTED]]
    rest = len(names) - len(shown)
    return [*shown, f"{kind}: and {rest} more"] if rest else shown


def _nearest(name: str, extra: list[str], found: Mapping[str, tuple[int, ...]]) -> str:
    close = difflib.get_close_matches(name, extra, n=1)
    return f" (nearest: {close[0]} {list(found[close[0]])})" if close else ""
