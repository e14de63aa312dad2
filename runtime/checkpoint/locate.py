"""Finds out what lies at a path and opens it."""

from pathlib import Path

from metainfer.ir.errors import CheckpointError
from metainfer.runtime.checkpoint.gguf_file import GgufCheckpoint
from metainfer.runtime.checkpoint.interface import Checkpoint
from metainfer.runtime.checkpoint.safetensors_file import (
    SafetensorsFile,
    SafetensorsFolder,
    shards_of,
)
from metainfer.runtime.checkpoint.scale_rules import read_settings
from metainfer.runtime.checkpoint.scaled import with_scales

_FORMS = "give a folder with *.safetensors (and their index), a .safetensors file or a .gguf file"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder of safetensors files, one such file, or a GGUF file.

    Raises: CheckpointError if nothing readable lies there or a file is damaged.
    """
    place = Path(path)
    if place.is_dir():
        return _open_folder(place)
    if not place.exists():
        raise CheckpointError("there is no such checkpoint", origin=str(place), advice=_FORMS)
    if place.suffix == ".gguf":
        return GgufCheckpoint(place)
    if place.suffix == ".safetensors":
        return _scaled(SafetensorsFile(place), place)
    if place.name.endswith(".safetensors.index.json"):
        return _scaled(SafetensorsFolder(place), place)
    raise CheckpointError("not a checkpoint file", origin=str(place), advice=_FORMS)


def absent_shards(path: str | Path) -> tuple[str, ...]:
    """Files that the one index at a path (or in its folder) names, if none of them is there.

    So it is where a folder was downloaded without its weights. Where some are there and some are
    not, opening raises.
    """
    place = Path(path)
    indexes = sorted(place.glob("*.safetensors.index.json")) if place.is_dir() else [place]
    if len(indexes) != 1 or not indexes[0].name.endswith(".safetensors.index.json"):
        return ()
    names = shards_of(indexes[0])
    return () if any((indexes[0].parent / name).is_file() for name in names) else names


def _scaled(base: Checkpoint, path: Path) -> Checkpoint:
    """Codes and scales put together, as config.json beside the file describes them."""
    return with_scales(base, read_settings(path.parent), str(path))


def _open_folder(folder: Path) -> Checkpoint:
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    if len(indexes) == 1:
        return _scaled(SafetensorsFolder(indexes[0]), indexes[0])
    if len(indexes) > 1:
        names = "\n".join(p.name for p in indexes)
        raise CheckpointError(
            "the folder has several indexes", text=names, origin=str(folder), advice="name one"
        )
    if len(files) == 1:
        return _scaled(SafetensorsFile(files[0]), files[0])
    if files:
        raise CheckpointError(
            f"the folder has {len(files)} safetensors files and no index",
            text="\n".join(p.name for p in files),
            origin=str(folder),
            advice="download model.safetensors.index.json too, or name one file",
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return GgufCheckpoint(ggufs[0])
    if ggufs:
        names = "\n".join(p.name for p in ggufs)
        raise CheckpointError(
            "the folder has several GGUF files", text=names, origin=str(folder), advice="name one"
        )
    raise CheckpointError("the folder has no checkpoint", origin=str(folder), advice=_FORMS)
