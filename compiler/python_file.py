"""Runs a user's model.py and takes the ModelSpec from it."""

import hashlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from metainfer.ir.errors import MetainferError, ParseError
from metainfer.models.spec import ModelSpec

MINIMAL = """\
from metainfer.models.spec import ModelSpec
spec = ModelSpec(
    name="mlp",
    build=lambda: MyModule(),
    kind="module",
    example_inputs=lambda: (torch.zeros(2, 16),),
    dynamic=(("B",),),
)"""


def load_file(path: Path) -> ModuleType:
    """Run a Python file as a module of its own.

    Its folder can be imported from while it runs, after everything else that can.
    Raises: ParseError if it is no Python, MetainferError if it cannot be read or fails.
    """
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"metainfer_model_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise MetainferError("the file is no Python source", origin=str(path))
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up by name.
    sys.modules[name] = module
    linecache.checkcache(str(path))
    try:
        # Compiled here, not by the loader: its bytecode cache misses an edit within a second.
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        with _importable(path.resolve().parent):
            exec(code, vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _explained(error, path) from error
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _explained(error: BaseException, path: Path) -> MetainferError:
    if isinstance(error, SyntaxError):
        return _syntax_error(error, path)
    frames = _frames(error, path)
    if isinstance(error, OSError) and not frames:
        return MetainferError(f"cannot read the model file: {error}", origin=str(path))
    line = frames[-1].lineno if frames else None
    place = f"{path}:{line}" if line else str(path)
    text = (frames[-1].line or "") if frames else ""
    if not isinstance(error, MetainferError):
        what = f"the model file fails: {type(error).__name__}: {error}"
        advice = "run it with python: it must import without errors"
        return MetainferError(what, text=text, origin=place, advice=advice)
    if error.origin:
        return error
    return type(error)(error.what, text=error.text or text, origin=place, advice=error.advice)


def _frames(error: BaseException, path: Path) -> list[traceback.FrameSummary]:
    """Frames of the error that lie in the file."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if Path(f.filename).resolve() == path.resolve()]


def _syntax_error(error: SyntaxError, path: Path) -> ParseError:
    text = (error.text or "").rstrip("\n")
    column = error.offset or 1
    caret = " " * (column - 1) + "^"
    return ParseError(
        f"the model file is no Python: {error.msg}",
        line=error.lineno or 1,
        column=column,
        text=f"{text}\n{caret}" if text else "",
        origin=error.filename or str(path),
        advice="repair the line",
    )


def spec_of(module: ModuleType, origin: str) -> ModelSpec:
    """The ModelSpec of a module: its ``spec``, or the only one at its top level.

    Raises: MetainferError if there is none, or several and none called ``spec``.
    """
    found = {k: v for k, v in vars(module).items() if isinstance(v, ModelSpec)}
    # One spec under two names is one spec.
    distinct = {id(v): k for k, v in found.items()}
    if "spec" in found:
        return _placed(found["spec"], module)
    if len(distinct) == 1:
        return _placed(next(iter(found.values())), module)
    if not found:
        raise MetainferError(
            "the file defines no ModelSpec at its top level",
            origin=origin,
            advice=f"add one, for example:\n{_indented(MINIMAL)}",
        )
    raise MetainferError(
        f"the file defines several ModelSpecs: {', '.join(found)}",
        origin=origin,
        advice=f"call one of them spec, or name one: {origin}:{next(iter(found))}",
    )


def variant_of(module: ModuleType, variant: str, origin: str) -> ModelSpec:
    """A ModelSpec of a module by name.

    The name is an attribute, a key of ``variants``, or "tiny" for the tiny form of the module's
    spec; an attribute or value may be a function that returns the spec.
    Raises: MetainferError if there is none of the name.
    """
    variants = getattr(module, "variants", {})
    variants = variants if isinstance(variants, Mapping) else {}
    found = getattr(module, variant, None)
    found = variants.get(variant) if found is None else found
    if found is None and variant == "tiny":
        found = spec_of(module, origin).tiny
    if callable(found) and not isinstance(found, type):
        found = found()
    if isinstance(found, ModelSpec):
        return _placed(found, module)
    names = [k for k, v in vars(module).items() if isinstance(v, ModelSpec)]
    known = ", ".join([*names, *map(str, variants)]) or "none"
    what = f"there is no ModelSpec {variant!r}"
    if found is not None:
        what = f"{variant} is no ModelSpec but of type {type(found).__name__}"
    raise MetainferError(what, origin=origin, advice=f"known: {known}")


def _placed(spec: ModelSpec, module: ModuleType) -> ModelSpec:
    """The spec with the file it came from, by which relative paths are found."""
    if spec.source_file is not None or module.__file__ is None:
        return spec
    return spec.with_(source_file=module.__file__)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
