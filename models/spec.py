"""What the compiler must know about a model: how to build it, feed it and find its weights."""

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import Tensor, nn

from metainfer.ir.dtypes import SCALAR_NAMES
from metainfer.ir.errors import CheckpointError, MetainferError

Kind = Literal["causal_lm", "diffusion", "module"]
KINDS: tuple[str, ...] = get_args(Kind)

# Buffers are laid out for the greatest size: wide bounds cost memory that few calls use.
DEFAULT_BOUNDS = (1, 256)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class PackageFile:
    """A file that an installed Python package carries; the package is found, never imported.

    Attributes:
        package: name of the package as Python imports it.
        file: path inside the package.
        install: command that installs it.
    """

    package: str
    file: str
    install: str

    def locate(self) -> Path:
        """Path of the file.

        Raises: CheckpointError if the package or the file is not there.
        """
        found = importlib.util.find_spec(self.package)
        folders = list(found.submodule_search_locations or []) if found else []
        if not folders:
            raise CheckpointError(
                f"the Python package {self.package!r}, which carries {self.file}, is not installed",
                advice=self.install,
            )
        for folder in folders:
            path = Path(folder) / self.file
            if path.is_file():
                return path
        raise CheckpointError(
            f"the Python package {self.package!r} has no file {self.file}",
            origin=folders[0],
            advice=f"reinstall it: {self.install}",
        )


Location = str | Path | PackageFile


def _wrong(name: object, what: str, advice: str) -> MetainferError:
    return MetainferError(f"ModelSpec {name!r}: {what}", advice=advice)


class PureBuild(ABC):
    """A build that is a value: equal ones make equal modules, whenever and however often.

    What is captured of one is kept for the next compilation in the same process.
    """

    @abstractmethod
    def __call__(self) -> nn.Module:
        """Make the module."""


@dataclass(frozen=True)
class ModelSpec:
    """A model as the compiler takes it.

    Attributes:
        name: an identifier; it names plans and their text.
        build: makes the module; the compiler calls it under ``torch.device("meta")``.
        kind: "causal_lm": ``forward(tokens [T], positions [T]) -> logits``, with
            `functional.attention` and `functional.sample_rows` inside; "diffusion" and "module":
            any forward over tensors, compiled for ``example_inputs``.
        checkpoint: where the weights are: a safetensors or GGUF file, or a folder; None if they
            come from elsewhere. A relative path begins at the folder of ``source_file``.
        tokenizer: folder with tokenizer.json, that file, or a GGUF file; None if there is none.
        tiny: makes the spec of a small random form with the same structure, for checking.
        example_inputs: makes tensors that ``forward`` takes; sizes that vary are to be at least 2
            and unequal.
        dynamic: for each input the names of its dims that vary, in order: ``(("B", "S"),)``; ""
            for a dim that is fixed; dims left out at the end are fixed. Equal names, equal sizes.
        bounds: least and greatest size by such a name; (1, 256) where none is given.
        max_positions: longest sequence of a causal_lm.
        unpermute: ``(suffix of weight names, heads)`` for rows that the checkpoint keeps in GGUF's
            interleaved order of rotary pairs.
        renames: name in the checkpoint by name of the weight, where they differ.
        ignore: glob patterns of tensors that checkpoints have and the model does not use.
        dtype: element type of the model's activations ("bf16"); None leaves it to the compiler.
        source_file: Python file, config or GGUF file that the model came from.

    Raises: MetainferError naming the field that does not fit.
    """

    name: str
    build: Callable[[], nn.Module]
    kind: Kind = "causal_lm"
    checkpoint: Location | None = None
    tokenizer: Location | None = None
    tiny: "Callable[[], ModelSpec] | None" = None
    example_inputs: Callable[[], tuple[Tensor, ...]] | None = None
    dynamic: tuple[tuple[str, ...], ...] = ()
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    max_positions: int = 0
    unpermute: tuple[tuple[str, int], ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict, hash=False)
    ignore: tuple[str, ...] = ()
    dtype: str | None = None
    source_file: str | Path | None = None

    def __post_init__(self) -> None:
        """Freeze the mappings and check every field."""
        _check_basics(self)
        _check_inputs(self)
        _check_weights(self)
        object.__setattr__(self, "bounds", MappingProxyType(dict(self.bounds)))
        object.__setattr__(self, "renames", MappingProxyType(dict(self.renames)))

    def with_(self, **fields: Any) -> "ModelSpec":
        """The spec with other values of some fields.

        Raises: MetainferError for an unknown field or a value that does not fit.
        """
        unknown = [name for name in fields if name not in self.__dataclass_fields__]
        if unknown:
            known = ", ".join(self.__dataclass_fields__)
            raise _wrong(self.name, f"there is no field {unknown[0]!r}", f"fields: {known}")
        return replace(self, **fields)

    def locate_checkpoint(self) -> Path:
        """Path of the weights.

        Raises: CheckpointError if there are none, or they are not where the spec says.
        """
        return self._locate("checkpoint", self.checkpoint)

    def locate_tokenizer(self) -> Path:
        """Path of the tokenizer.

        Raises: CheckpointError if there is none, or it is not where the spec says.
        """
        return self._locate("tokenizer", self.tokenizer)

    def checkpoint_name(self, weight: str) -> str:
        """Name in the checkpoint of a weight of the module."""
        return self.renames.get(weight, weight)

    def unpermute_heads(self, weight: str) -> int:
        """Heads over whose rotary pairs the weight's rows are interleaved; 0 if they are not."""
        return next((heads for suffix, heads in self.unpermute if weight.endswith(suffix)), 0)

    def size_bounds(self, name: str) -> tuple[int, int]:
        """Least and greatest size of a dim that varies."""
        return self.bounds.get(name, DEFAULT_BOUNDS)

    def _locate(self, what: str, location: Location | None) -> Path:
        if location is None:
            raise CheckpointError(
                f"model {self.name!r} has no {what}", advice=f"give ModelSpec({what}=...)"
            )
        if isinstance(location, PackageFile):
            return location.locate()
        path = Path(location).expanduser()
        if not path.is_absolute() and self.source_file is not None:
            path = Path(self.source_file).parent / path
        if not path.exists():
            raise CheckpointError(
                f"the {what} of model {self.name!r} is not there: {path}",
                advice=f"put it there, or give another ModelSpec({what}=...)",
            )
        return path


def _check_basics(spec: ModelSpec) -> None:
    if not isinstance(spec.name, str) or not _NAME.fullmatch(spec.name):
        raise _wrong(spec.name, "the name is no identifier", "use letters, digits and _")
    if isinstance(spec.build, nn.Module) or not callable(spec.build):
        raise _wrong(
            spec.name,
            f"build is to be a function that returns the module, got {type(spec.build).__name__}",
            "write build=lambda: MyModule()",
        )
    if spec.kind not in KINDS:
        raise _wrong(spec.name, f"unknown kind {spec.kind!r}", f"known: {', '.join(KINDS)}")
    if spec.tiny is not None and not callable(spec.tiny):
        raise _wrong(
            spec.name, "tiny is to be a function that returns a ModelSpec", "write tiny=lambda: ..."
        )
    if spec.dtype is not None and spec.dtype not in SCALAR_NAMES:
        known = ", ".join(SCALAR_NAMES)
        raise _wrong(spec.name, f"unknown dtype {spec.dtype!r}", f"known: {known}")


def _check_inputs(spec: ModelSpec) -> None:
    if spec.kind == "causal_lm" and spec.max_positions < 1:
        raise _wrong(
            spec.name, "a causal_lm needs max_positions", "give the longest sequence it may see"
        )
    if spec.kind != "causal_lm" and not callable(spec.example_inputs):
        raise _wrong(
            spec.name,
            f"kind {spec.kind!r} needs example_inputs",
            "give a function that returns the tensors that forward takes",
        )
    _check_dims(spec)
    used = {name for names in spec.dynamic for name in names if name}
    for name, (least, most) in spec.bounds.items():
        if name not in used:
            raise _wrong(
                spec.name,
                f"bounds of {name!r}, which no input has",
                f"dynamic names: {', '.join(sorted(used)) or 'none'}",
            )
        if not 1 <= least <= most:
            raise _wrong(
                spec.name,
                f"bounds of {name} are ({least}, {most})",
                "give (least, greatest) with 1 <= least <= greatest",
            )


def _check_dims(spec: ModelSpec) -> None:
    for names in spec.dynamic:
        if isinstance(names, str):
            raise _wrong(
                spec.name,
                f"dynamic has the text {names!r} for an input",
                'give a tuple of dim names for each input: (("B", "S"),)',
            )
        bad = [n for n in names if n and not _NAME.fullmatch(n)]
        if bad:
            raise _wrong(
                spec.name,
                f"dim name {bad[0]!r} is no identifier",
                'use letters, digits and _; "" for a dim that is fixed',
            )


def _check_weights(spec: ModelSpec) -> None:
    if isinstance(spec.ignore, str):
        raise _wrong(spec.name, f"ignore is the text {spec.ignore!r}", 'give a tuple: ("*.bias",)')
    for suffix, heads in spec.unpermute:
        if heads < 1:
            raise _wrong(
                spec.name, f"unpermute of {suffix!r} over {heads} heads", "give its head count"
            )
    for what, location in (("checkpoint", spec.checkpoint), ("tokenizer", spec.tokenizer)):
        if location is not None and not isinstance(location, Location):
            raise _wrong(
                spec.name,
                f"{what} is to be a path, got {type(location).__name__}",
                "give a str, a Path or a PackageFile",
            )
