"""diff: what differs between two plans."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from metainfer.compiler.explain import GroupReport, group_reports
from metainfer.ir.plan import Plan

ABSENT = "-"


@dataclass(frozen=True)
class Row:
    """One thing that differs.

    Attributes:
        section: what it belongs to: "model", "machine", "options", "kernels decode" ...
        name: of the thing.
        first: in the first plan; "-" if it has no such thing.
        second: in the second plan.
    """

    section: str
    name: str
    first: str
    second: str


def compare_plans(first: Plan, second: Plan) -> tuple[Row, ...]:
    """Everything in which two plans differ; empty exactly if their hashes are equal."""
    rows = [*_meta_rows(first, second)]
    for phase in dict.fromkeys((*first.phases, *second.phases)):
        rows += _kernel_rows(first, second, phase)
        rows += _step_rows(first, second, phase)
        rows += _decision_rows(first, second, phase)
    rows += _text_rows(first, second)
    rows += _constant_rows(first, second)
    return tuple(rows)


def text_difference(first: Plan, second: Plan) -> str:
    """Unified difference of the modules' texts; "" if there is none."""
    lines: list[str] = []
    for name in dict.fromkeys((*first.texts, *second.texts)):
        before = first.texts.get(name, "").splitlines()
        after = second.texts.get(name, "").splitlines()
        lines += difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="")
    return "\n".join(lines)


# --- plain data --------------------------------------------------------------------------------

# NOTE: plans that differ in these alone are the same plan: Plan.hash leaves them away.
_NOT_COMPARED = ("phases", "timings", "created")


def _meta_rows(first: Plan, second: Plan) -> Iterator[Row]:
    sections = [k for k in dict.fromkeys((*first.meta, *second.meta)) if k not in _NOT_COMPARED]
    for section in sections:
        yield from _data_rows(section, first.meta.get(section), second.meta.get(section))
    for phase in dict.fromkeys((*first.phases, *second.phases)):
        before, after = (_phase(plan, phase) for plan in (first, second))
        rest = [k for k in dict.fromkeys((*before, *after)) if k not in ("decisions", "predicted")]
        for key in rest:
            yield from _data_rows(f"phase {phase}", before.get(key), after.get(key), key)


def _phase(plan: Plan, phase: str) -> Mapping[str, Any]:
    return plan.meta["phases"].get(phase, {})


def _data_rows(section: str, before: Any, after: Any, path: str = "") -> Iterator[Row]:
    """Leaves that differ, by dotted path."""
    if before == after:
        return
    before, after = _by_name(before), _by_name(after)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            inner = f"{path}.{key}" if path else str(key)
            yield from _data_rows(section, before.get(key, ABSENT), after.get(key, ABSENT), inner)
    elif _are_lists(before, after) and len(before) == len(after):
        for number, (a, b) in enumerate(zip(before, after, strict=True)):
            yield from _data_rows(section, a, b, f"{path}[{number}]")
    else:
        yield Row(section, path or section, _shown(before), _shown(after))


def _by_name(value: Any) -> Any:
    """A list of named things as a mapping, so that an entry more does not shift the others."""
    if not isinstance(value, list | tuple) or not value:
        return value
    names = [v.get("name") if isinstance(v, Mapping) else None for v in value]
    if None in names or len(set(names)) < len(names):
        return value
    return dict(zip(names, value, strict=True))


def _are_lists(before: Any, after: Any) -> bool:
    return isinstance(before, list | tuple) and isinstance(after, list | tuple)


def _shown(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


# --- phases ------------------------------------------------------------------------------------


def _kernel_rows(first: Plan, second: Plan, phase: str) -> Iterator[Row]:
    before, after = _groups(first, phase), _groups(second, phase)
    for key in dict.fromkeys((*before, *after)):
        a, b = before.get(key), after.get(key)
        texts = _kernels(a), _kernels(b)
        if texts[0] != texts[1]:
            yield Row(f"kernels {phase}", " ".join(key), *texts)


def _groups(plan: Plan, phase: str) -> dict[tuple[str, str], GroupReport]:
    """Groups by graph and, where a kind occurs several times, number: names may have shifted."""
    if phase not in plan.phases:
        return {}
    found: dict[tuple[str, str], GroupReport] = {}
    counts: dict[tuple[str, str], int] = {}
    for group in group_reports(plan, phase):
        key = (group.graph, group.kind)
        counts[key] = counts.get(key, 0) + 1
        number = f" #{counts[key]}" if counts[key] > 1 else ""
        found[group.graph, f"{group.kind}{number}"] = group
    return found


def _kernels(group: GroupReport | None) -> str:
    if group is None:
        return ABSENT
    if len(group.table) == 1:
        return group.table[0].kernel
    return ", ".join(f"{row.sizes}: {row.kernel}" for row in group.table)


def _step_rows(first: Plan, second: Plan, phase: str) -> Iterator[Row]:
    before, after = _steps(first, phase), _steps(second, phase)
    for sizes in dict.fromkeys((*before, *after)):
        a, b = before.get(sizes), after.get(sizes)
        if a != b:
            yield Row(f"predicted {phase}", sizes, _step_text(a), _step_text(b))


def _steps(plan: Plan, phase: str) -> dict[str, Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = _phase(plan, phase).get("predicted", ())
    # NOTE: a plan that was read has its keys sorted, one just compiled has not.
    return {" ".join(f"{k}={v}" for k, v in sorted(r["sizes"].items())): r for r in rows}


def _step_text(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ABSENT
    return (
        f"{row['seconds'] * 1e3:.4g} ms, {row['bytes'] / 1e6:.4g} MB, "
        f"{row['flops'] / 1e9:.4g} GFLOP, {row['groups']} groups"
    )


def _decision_rows(first: Plan, second: Plan, phase: str) -> Iterator[Row]:
    """Decisions that are not kernels of groups: formats, packings, rewrites."""
    before, after = _decisions(first, phase), _decisions(second, phase)
    for key in dict.fromkeys((*before, *after)):
        a, b = before.get(key, ABSENT), after.get(key, ABSENT)
        if a != b:
            yield Row(f"decisions {phase}", key, a, b)
    if before == after and _phase(first, phase).get("decisions") != _phase(second, phase).get(
        "decisions"
    ):
        yield Row(f"decisions {phase}", "reasons", "other figures", "other figures")


def _decisions(plan: Plan, phase: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for decision in _phase(plan, phase).get("decisions", ()):
        if "table" in dict(decision["data"]):
            continue
        key = f"{decision['place']}: {decision['subject']}"
        text = f"{decision['chosen']} ({decision['reason']})"
        found[key] = f"{found[key]}; {text}" if key in found else text
    return found


# --- files -------------------------------------------------------------------------------------


def _text_rows(first: Plan, second: Plan) -> Iterator[Row]:
    for name in dict.fromkeys((*first.texts, *second.texts)):
        before, after = first.texts.get(name), second.texts.get(name)
        if before != after:
            yield Row("texts", name, _lines(before), _lines(after))


def _lines(text: str | None) -> str:
    return ABSENT if text is None else f"{text.count(chr(10))} lines"


def _constant_rows(first: Plan, second: Plan) -> Iterator[Row]:
    for name in dict.fromkeys((*first.constants, *second.constants)):
        a, b = first.constants.get(name), second.constants.get(name)
        if a is None or b is None or not _same(a, b):
            yield Row("constants", name, _array(a), _array(b))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _array(array: np.ndarray | None) -> str:
    return ABSENT if array is None else f"{array.dtype}{list(array.shape)}"
