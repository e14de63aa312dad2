"""Finds the model that an argument means: a file, a folder, a known name, or a Python object."""

import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from torch import Tensor, nn

from metainfer.compiler.gguf_source import gguf_spec
from metainfer.compiler.hf_folder import hf_spec
from metainfer.compiler.python_file import MINIMAL, load_file, spec_of, variant_of
from metainfer.ir.errors import MetainferError
from metainfer.models import MODELS
from metainfer.models.spec import ModelSpec

_FORMS = (
    "give a model.py, a Hugging Face folder with config.json, a .gguf file, module:attribute, "
    "or a known name"
)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def resolve_model(
    model: str | Path | ModelSpec | nn.Module,
    *,
    example_inputs: Callable[[], tuple[Tensor, ...]] | None = None,
    dynamic: tuple[tuple[str, ...], ...] = (),
    bounds: Mapping[str, tuple[int, int]] | None = None,
) -> ModelSpec:
    """The spec of a model.

    A text is tried as: a path that exists (``model.py``, a Hugging Face folder, a ``.gguf`` file);
    such a path with ``:variant``; the name of one of `metainfer.models.MODELS`; ``module:name``. A
    variant is an attribute of the file, a key of its ``variants``, or "tiny".

    Args:
        model: what was asked for.
        example_inputs: for a bare nn.Module: makes the tensors its forward takes.
        dynamic: for a bare nn.Module: see `ModelSpec.dynamic`.
        bounds: for a bare nn.Module: see `ModelSpec.bounds`.

    Raises: MetainferError saying what is wrong with the argument, ParseError for a file that is no
        Python, Unsupported for a config or GGUF file of an unknown model.
    """
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, nn.Module):
        return _module_spec(model, example_inputs, dynamic, bounds or {})
    if example_inputs is not None or dynamic or bounds:
        raise MetainferError(
            f"example inputs were given for {str(model)!r}",
            advice="only a bare nn.Module takes them here; a model.py sets them in its ModelSpec",
        )
    text = str(model)
    whole = _existing(text)
    if whole is not None:
        return _from_path(whole)
    base, colon, variant = text.rpartition(":")
    if not colon:
        return _from_name(text)
    part = _existing(base)
    if part is not None:
        return _variant_of_path(part, variant)
    return _from_module(base, variant)


def known_name(path: Path) -> str:
    """The known name of a model file that is the installed one, byte for byte; "" for any other."""
    for name, module in MODELS.items():
        spec = find_spec(module)
        if spec is None or spec.origin is None or not path.is_file():
            continue
        if Path(spec.origin).read_bytes() == path.read_bytes():
            return name
    return ""


def _existing(text: str) -> Path | None:
    """The path that a text names, if something lies there; "" names nothing."""
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, RuntimeError):
        # Longer than a name may be, or the home of an unknown user.
        return None


def _from_path(path: Path) -> ModelSpec:
    if path.is_dir():
        return hf_spec(path)
    if path.suffix == ".gguf":
        return gguf_spec(path)
    if path.suffix == ".py":
        return spec_of(load_file(path), str(path))
    advice = _FORMS
    if path.suffix in (".safetensors", ".json"):
        advice = f"give the folder: {path.parent}"
    raise MetainferError("the file is no model", origin=str(path), advice=advice)


def _variant_of_path(path: Path, variant: str) -> ModelSpec:
    if path.suffix == ".py":
        return variant_of(load_file(path), variant, str(path))
    return _tiny_of(_from_path(path), variant, str(path))


def _tiny_of(spec: ModelSpec, variant: str, origin: str) -> ModelSpec:
    if variant == "tiny" and spec.tiny is not None:
        return spec.tiny()
    known = "tiny" if spec.tiny is not None else "none"
    raise MetainferError(
        f"model {spec.name!r} has no variant {variant!r}", origin=origin, advice=f"known: {known}"
    )


def _from_name(name: str) -> ModelSpec:
    if name in MODELS:
        return spec_of(import_module(MODELS[name]), MODELS[name])
    looks_like_path = "/" in name or Path(name).suffix in (".py", ".gguf")
    if looks_like_path or not name:
        raise MetainferError(f"there is no file or folder {name!r}", advice=_FORMS)
    near = get_close_matches(name, MODELS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise MetainferError(
        f"there is no model {name!r}",
        advice=f"{hint}known names: {', '.join(MODELS)}; or {_FORMS}",
    )


def _from_module(base: str, variant: str) -> ModelSpec:
    if base in MODELS:
        return variant_of(import_module(MODELS[base]), variant, MODELS[base])
    if not _MODULE.fullmatch(base):
        raise MetainferError(f"there is no file or folder {base!r}", advice=_FORMS)
    return variant_of(_import(base), variant, base)


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MetainferError(
            f"there is neither a file {name!r} nor a Python module of that name: {error}",
            advice=_FORMS,
        ) from error


def _module_spec(
    module: nn.Module,
    example_inputs: Callable[[], tuple[Tensor, ...]] | None,
    dynamic: tuple[tuple[str, ...], ...],
    bounds: Mapping[str, tuple[int, int]],
) -> ModelSpec:
    kind = type(module)
    if example_inputs is None:
        raise MetainferError(
            f"an nn.Module of class {kind.__name__} was given without example inputs",
            advice="pass example_inputs=lambda: (...), or wrap it in a ModelSpec:\n" + MINIMAL,
        )
    return ModelSpec(
        name=re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower(),
        build=lambda: module,
        kind="module",
        example_inputs=example_inputs,
        dynamic=dynamic,
        bounds=bounds,
        source_file=_source_file(kind),
    )


def _source_file(kind: type[nn.Module]) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except (OSError, TypeError):
        # A class typed into an interpreter has no file.
        return None
