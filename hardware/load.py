"""Reading machines: from a path or a known name to a checked, frozen Machine.

`load_machine` is what the rest of the compiler calls. Descriptions lie beside this file: machines
as NAME.toml, devices as devices/NAME.toml; a user's own folder is looked in first, for what its
files extend and for the device types they name.
"""

import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from metainfer.hardware import build, checks, schema
from metainfer.hardware.device import Device
from metainfer.hardware.document import Document, Loc, near, overlay, read_document
from metainfer.hardware.machine import Machine
from metainfer.ir.errors import HardwareError

FOLDER = Path(__file__).parent


def known_machines() -> tuple[str, ...]:
    """Return the names of the machines that come with metainfer."""
    return _stems(FOLDER)


def known_devices() -> tuple[str, ...]:
    """Return the names of the devices that come with metainfer."""
    return _stems(FOLDER / "devices")


def _stems(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def load_machine(path_or_name: str) -> Machine:
    """Read a machine from a TOML file, or by the name of a known one.

    Raises: HardwareError naming file, line and key, if it cannot be read or contradicts itself.
    """
    return read_machine(_machine_document(path_or_name))


def load_device(name_or_path: str) -> Device:
    """Read a device from a TOML file, or by the name of a known one.

    Raises: HardwareError naming file, line and key.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        found = _find_device(name_or_path, FOLDER / "devices")
        if found is None:
            advice = near(name_or_path, list(known_devices()))
            raise HardwareError(f"unknown device {name_or_path!r}", advice=advice)
        path = found
    return _read_device(read_document(path, _find_device, _device_names))


def _machine_document(path_or_name: str) -> Document:
    path = Path(path_or_name)
    if path.suffix != ".toml":
        if path_or_name not in known_machines():
            advice = near(path_or_name, list(known_machines()))
            raise HardwareError(
                f"unknown machine {path_or_name!r}",
                advice=f"{advice}\n  a path to a file ends in .toml",
            )
        path = FOLDER / f"{path_or_name}.toml"
    return read_document(path, _find_machine, _machine_names)


def _find_machine(name: str, folder: Path) -> Path | None:
    return _find(name, folder, FOLDER)


def _machine_names(folder: Path) -> tuple[str, ...]:
    return (*_stems(folder), *known_machines())


def _find_device(name: str, folder: Path) -> Path | None:
    return _find(name, folder, folder / "devices", FOLDER / "devices")


def _device_names(folder: Path) -> tuple[str, ...]:
    return (*_stems(folder / "devices"), *known_devices())


def _find(name: str, *folders: Path) -> Path | None:
    """First file of a name in some folders; a name with .toml is a path beside the first."""
    stem = name.removesuffix(".toml")
    candidates = [folder / f"{stem}.toml" for folder in folders]
    return next((path for path in candidates if path.is_file()), None)


def read_machine(document: Document) -> Machine:
    """Check a document and build its machine.

    Raises: HardwareError naming file, line and key.
    """
    if "rates" in document.data:
        raise document.error(
            ("rates",),
            "the file describes a device, not a machine",
            f'give a machine that has it: [[devices]] type = "{Path(document.path).stem}"',
        )
    table = _validate(schema.MachineFile, document)
    checks.check_machine(table, document)
    devices = _device_types(table, document)
    machine = build.machine(table, devices, document.path)
    checks.check_paths(machine, document)
    return machine


def _device_types(table: schema.MachineFile, document: Document) -> dict[str, Device]:
    """Read every device type that the machine names, inline ones first."""
    folder = Path(document.path).parent
    found: dict[str, Device] = {}
    for i, entry in enumerate(table.devices):
        if entry.type in found:
            continue
        if entry.type in table.types:
            found[entry.type] = _read_device(_inline(entry.type, folder, document))
            continue
        path = _find_device(entry.type, folder)
        if path is None:
            names = [*table.types, *_device_names(folder)]
            loc: Loc = ("devices", i, "type")
            raise document.error(
                loc, f"unknown device type {entry.type!r}", near(entry.type, names)
            )
        found[entry.type] = _read_device(read_document(path, _find_device, _device_names))
    return found


def _inline(name: str, folder: Path, document: Document) -> Document:
    """Document of a device type written inside a machine file."""
    loc: Loc = ("types", name)
    own = document.under(loc)
    if not isinstance(own.data, dict):
        raise document.error(loc, f"[types.{name}] is not a table")
    data = {"name": name, **own.data}
    base = data.pop("extends", None)
    places = dict(own.places)
    places.setdefault((), document.place(loc))
    own = Document(document.path, data, places)
    if base is None:
        return own
    path = _find_device(str(base), folder)
    if path is None:
        what = f"extends unknown device {base!r}"
        raise document.error((*loc, "extends"), what, near(str(base), list(_device_names(folder))))
    return overlay(read_document(path, _find_device, _device_names), own)


def _read_device(document: Document) -> Device:
    table = _validate(schema.DeviceFile, document)
    checks.check_device(table, document)
    return build.device(table)


_Model = typing.TypeVar("_Model", bound=BaseModel)


def _validate(model: type[_Model], document: Document) -> _Model:
    """Run the schema; turn its first complaint into an error that points, and count the others."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        problems = error.errors()
        first = problems[0]
        loc = tuple(first["loc"])
        what, advice = _explain(model, loc, dict(first), document)
        if len(problems) > 1:
            others = ", ".join(_dotted(tuple(p["loc"])) for p in problems[1:4])
            advice += f"\n  {len(problems) - 1} more to look at: {others}"
        raise document.error(loc, what, advice) from None


def _explain(
    model: type[BaseModel], loc: Loc, problem: dict[str, Any], document: Document
) -> tuple[str, str]:
    """Say in our words what pydantic found."""
    key = _dotted(loc)
    fields = _fields_at(model, loc[:-1])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}", near(str(loc[-1]), fields)
    if problem["type"] == "missing":
        what = f"{key} is missing"
        if loc[-1] == "source":
            return what, 'say where the figures come from: source = "datasheet ..."'
        present = _keys_at(document.data, loc[:-1])
        unknown = [k for k in present if k not in fields]
        advice = f"is {unknown[0]!r} meant to be it?" if unknown else f"add {loc[-1]} = ..."
        return what, advice
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, schema.QuantityError):
        return f"{key}: {cause}", cause.advice
    message = str(problem["msg"])
    return (
        f"{key}: {message[:1].lower()}{message[1:]}, not {problem['input']!r}",
        "correct the value",
    )


def _dotted(loc: Loc) -> str:
    return ".".join(str(part) for part in loc)


def _keys_at(data: Any, loc: Loc) -> list[str]:
    for part in loc:
        data = data[part]
    return list(data) if isinstance(data, dict) else []


def _fields_at(model: type[BaseModel], loc: Loc) -> list[str]:
    """Valid keys of the table at a location of a model."""
    hint: Any = model
    for part in loc:
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            by_key = {f.alias or name: f.annotation for name, f in hint.model_fields.items()}
            hint = _inner(by_key.get(str(part)))
        else:
            hint = _inner(hint)
    if not (isinstance(hint, type) and issubclass(hint, BaseModel)):
        return []
    return [field.alias or name for name, field in hint.model_fields.items()]


def _inner(hint: Any) -> Any:
    """The table type inside a list, a dict, an optional or an annotation."""
    while typing.get_origin(hint) in (list, dict, types.UnionType, typing.Annotated, typing.Union):
        arguments = typing.get_args(hint)
        hint = arguments[-1] if typing.get_origin(hint) is dict else arguments[0]
    return hint
