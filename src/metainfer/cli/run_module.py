"""`metainfer run` of a module: named arrays in, named arrays out."""

import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer

from metainfer.cli.output import print_json, print_table, show_seconds
from metainfer.ir.errors import MetainferError
from metainfer.runtime.load import LoadedModel


def run_module(
    model: LoadedModel, inputs: list[str], output: Path | None, trace: Path | None, as_json: bool
) -> None:
    """Compute once and write the results.

    Raises: MetainferError for inputs that are missing, unknown or unreadable.
    """
    names = list(model.plan.meta["model"]["inputs"])
    tensors = read_inputs(inputs, names)
    begun = time.perf_counter()
    made = model(*tensors)
    seconds = time.perf_counter() - begun
    results = [t.float().numpy() if t.dtype == torch.bfloat16 else t.numpy() for t in _many(made)]
    arrays = {f"output{number}": array for number, array in enumerate(results)}
    if output is not None:
        _write(output, arrays)
    if trace is not None:
        from metainfer.cli.tracing import save_trace, trace_call

        save_trace(model, trace_call(model, tensors), trace)
    shapes: dict[str, Any] = {
        name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in arrays.items()
    }
    if as_json:
        print_json({"outputs": shapes, "seconds": seconds, "plan_hash": model.plan_hash})
        return
    rows = [(name, str(list(a.shape)), str(a.dtype), _range(a)) for name, a in arrays.items()]
    print_table("Results", ("name", "shape", "type", "least, mean, greatest"), rows, left=3)
    place = f", written to {output}" if output is not None else ""
    typer.echo(f"{show_seconds(seconds)}, plan {model.plan_hash}{place}")


def _many(made: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _range(array: np.ndarray) -> str:
    if not array.size:
        return "empty"
    return f"{array.min():.4g}, {array.mean():.4g}, {array.max():.4g}"


def read_inputs(pairs: list[str], names: list[str]) -> list[torch.Tensor]:
    """Arrays for the inputs, in their order, from texts NAME=FILE.npy.

    Raises: MetainferError naming the input that is missing or unknown, or the file.
    """
    files: dict[str, str] = {}
    for pair in pairs:
        name, _, file = pair.partition("=")
        if name not in names or not file:
            raise MetainferError(
                f"--input {pair} names no input of the module",
                advice=f"give NAME=FILE.npy for each of: {', '.join(names)}",
            )
        files[name] = file
    missing = [name for name in names if name not in files]
    if missing:
        raise MetainferError(
            f"no array for the input {missing[0]}", advice=f"give --input {missing[0]}=FILE.npy"
        )
    return [torch.from_numpy(_read(Path(files[name]))) for name in names]


def _read(file: Path) -> np.ndarray:
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise MetainferError(
            f"{file} is no array: {error}", advice="write it with numpy.save"
        ) from error
    if not isinstance(found, np.ndarray):
        raise MetainferError(f"{file} holds several arrays", advice="give one .npy for each input")
    return found


def _write(file: Path, arrays: dict[str, np.ndarray]) -> None:
    part = file.with_name(f".{file.name}.part")
    try:
        with part.open("wb") as out:
            np.savez(out, **arrays)  # type: ignore[arg-type, unused-ignore]
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise MetainferError(
            f"the results cannot be written: {error.strerror or error}",
            origin=str(file),
            advice="give a file in a folder that exists and can be written to",
        ) from error
