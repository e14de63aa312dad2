"""Writing TOML: plain values to text that tomllib reads back to the same values."""

import json
from typing import Any


def to_toml(data: dict[str, Any], comments: dict[str, str] | None = None) -> str:
    """Print nested dicts, lists and scalars as TOML.

    Args:
        data: keys in the order to print; None values are left out.
        comments: text to print above the first table of a dotted name; "" is the head of the file.

    Raises: TypeError for a value that TOML cannot hold.
    """
    left = dict(comments or {})
    lines = _comment(left.pop("", ""))
    lines += _table(data, "", left)
    return "\n".join(lines).strip("\n") + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}".rstrip() for line in text.splitlines()]


def _table(data: dict[str, Any], prefix: str, comments: dict[str, str]) -> list[str]:
    """Lines of one table: its own keys first, then the tables below it."""
    lines, below = [], []
    for key, value in data.items():
        if value is None:
            continue
        name = f"{prefix}{_key(key)}"
        if isinstance(value, dict):
            above = _comment(comments.pop(name, ""))
            inside = _table(value, f"{name}.", comments)
            # A table of tables alone needs no header of its own.
            holds_tables = bool(value) and all(isinstance(v, dict) for v in value.values())
            below += above + inside if holds_tables else ["", *above, f"[{name}]", *inside]
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            for entry in value:
                below += ["", *_comment(comments.pop(name, "")), f"[[{name}]]"]
                below += _table(entry, f"{name}.", comments)
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    return lines + below


def _key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # NOTE: JSON leaves DEL as it is, TOML forbids it.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise TypeError(f"TOML cannot hold {value!r}")
