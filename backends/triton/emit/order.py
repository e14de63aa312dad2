"""The order of a group's statements: memory is asked for all that it is to give as early as can be.

A program of several tiles that reads one, stores it and reads the next one waits for memory again
and again: no compiler moves a read over a store that may write what it reads.
"""

import re
from collections.abc import Sequence

_NAME = re.compile(r"[A-Za-z_]\w*")
_MADE = re.compile(r"    (\w+) = (.*)")
_LOAD, _STORE = "tl.load(", "    tl.store("


def reads_first(lines: Sequence[str]) -> list[str]:
    """Statements with reads before all else, those that wait for no other read first; stores last.

    Args:
        lines: statements of one depth, each of one line; a name is given another number only where
            it is made.
    """
    stores = [line for line in lines if line.startswith(_STORE)]
    kept = [line for line in lines if not line.startswith(_STORE)]
    wanted = _needed(kept)
    waits: dict[str, int] = {}  # name -> reads that it comes after, one waiting for the other
    order: list[tuple[int, str]] = []
    for number, line in enumerate(kept):
        made = _MADE.fullmatch(line)
        if made is None:
            continue
        depth = max((waits.get(name, 0) for name in _NAME.findall(made[2])), default=0)
        waits[made[1]] = depth + (_LOAD in line)
        if number in wanted:
            order.append((depth, line))
    first = [line for _, line in sorted(order, key=lambda pair: pair[0])]
    return [*first, *(line for n, line in enumerate(kept) if n not in wanted), *stores]


def _needed(lines: Sequence[str]) -> set[int]:
    """Numbers of the reads, and of the statements that they need."""
    found: set[int] = set()
    names: set[str] = set()
    for number in reversed(range(len(lines))):
        made = _MADE.fullmatch(lines[number])
        if made is not None and (_LOAD in lines[number] or made[1] in names):
            found.add(number)
            names.update(_NAME.findall(made[2]))
    return found
