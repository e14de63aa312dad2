"""Reads a Hugging Face folder: config.json, maybe safetensors, maybe a tokenizer."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metainfer.ir.errors import MetainferError, ParseError
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.hf_names import hf_renames, hf_unused
from metainfer.models.spec import ModelSpec

_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def identifier(text: str) -> str:
    """The text as a name for plans: lower case, other characters become "_"."""
    name = re.sub(r"\W+", "_", text.lower(), flags=re.ASCII).strip("_")
    return f"model_{name}" if not name or name[0].isdigit() else name


def hf_spec(folder: Path) -> ModelSpec:
    """The spec of the decoder in a Hugging Face folder; its weights may be absent.

    Raises: MetainferError without a config.json, ParseError if that is no JSON, Unsupported if the
        model is not known.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise MetainferError(
            "the folder has no config.json",
            origin=str(folder),
            advice="give a Hugging Face model folder, a model.py or a .gguf file",
        )
    keys = _read_json(path)
    config = DecoderConfig.from_hf(keys, origin=str(path))
    # An index without its shards counts too: compiling says which files are missing.
    patterns = ("*.safetensors", "*.safetensors.index.json")
    has_weights = any(any(folder.glob(pattern)) for pattern in patterns)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return decoder_spec(
        identifier(folder.resolve().name),
        config,
        checkpoint=folder if has_weights else None,
        tokenizer=folder if has_tokenizer else None,
        ignore=hf_unused(keys, config),
        renames=hf_renames(str(keys.get("model_type")), config),
        # Older files say torch_dtype.
        dtype=_DTYPES.get(str(keys.get("dtype", keys.get("torch_dtype")))),
        source_file=path,
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        lines = error.doc.splitlines()
        text = lines[error.lineno - 1] if error.lineno <= len(lines) else ""
        raise ParseError(
            f"the config is no JSON: {error.msg}",
            line=error.lineno,
            column=error.colno,
            text=text,
            origin=str(path),
            advice="download config.json again",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise MetainferError(f"cannot read the config: {error}", origin=str(path)) from error
    if not isinstance(keys, dict):
        raise MetainferError(
            f"the config is a JSON {type(keys).__name__}, wanted an object", origin=str(path)
        )
    return keys
