"""Text to token ids and back, from tokenizer.json or from the metadata of a GGUF file."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import tokenizers

from metainfer.ir.errors import CheckpointError, MetainferError, Unsupported
from metainfer.runtime.checkpoint import open_checkpoint
from metainfer.runtime.gguf_vocab import build_backend, read_special_ids, read_tokens

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes text for one model.

    Attributes:
        backend: the `tokenizers` object that does the work.
        bos_id: the token that begins a text, if the model has one.
        eos_ids: tokens that end a generation.
        chat_template: Jinja2 source that lays messages out, if the model has one.
        special_tokens: text of bos_token, eos_token and so on, for the template.
        prefix_ids: ids put before an encoded text, besides those that the backend adds itself.
        suffix_ids: ids put after it.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_ids: frozenset[int]
    chat_template: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding can have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for no text, such as those that begin and end turns."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the ids of a text, between the model's special tokens unless told otherwise.

        The names of special tokens inside the text become those tokens.
        Raises: MetainferError if the text has a lone surrogate, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise MetainferError(
                f"the text has a lone surrogate at character {error.start}",
                advice="decode the input with errors='replace' first",
            ) from error
        ids = self.backend.encode(text, add_special_tokens=add_special).ids
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def is_known(self, token_id: int) -> bool:
        """Whether the vocabulary has a token of this id; an embedding can have rows beyond it."""
        return self.backend.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether a token is one byte of a text, written <0xNN> in the vocabulary."""
        name = self.backend.id_to_token(token_id)
        return name is not None and _BYTE_TOKEN.fullmatch(name) is not None


class IncrementalDecoder:
    """Decodes a growing sequence piece by piece; the pieces join to the decode of the whole.

    A piece is held back while more ids could still change it: a character cut in its middle, or a
    run of byte tokens (which are judged as UTF-8 together). Only a few ids are decoded per step.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        # Ids still needed: `_context` that are done with (the text of an id depends on whether
        # another precedes it), then those not fully emitted.
        self._ids: list[int] = []
        self._context = 0
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """Add one id and return the text that is now certain, maybe none."""
        # Ids without text must not part a run of byte tokens.
        if token_id in self._skipped or not self._tokenizer.is_known(token_id):
            return ""
        self._ids.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._decode()
        # The end of a text can be a cut character, which shows as one replacement character.
        certain = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if piece and certain == len(text):
            del self._ids[: self._context]
            self._context = len(self._ids)
            self._emitted = len(self._decode())
        return piece

    def flush(self) -> str:
        """Return what was held back and start anew."""
        rest = self._decode()[self._emitted :]
        self._ids, self._context, self._emitted = [], 0, 0
        return rest

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer that belongs to a checkpoint.

    Args:
        path: a folder with tokenizer.json, a file inside it, or a GGUF file.

    Raises: CheckpointError if there is none or it is damaged; Unsupported if it is of a kind
        that is not known.
    """
    place = Path(path)
    if place.suffix == ".gguf":
        return gguf_tokenizer(open_checkpoint(place).metadata)
    folder = place if place.is_dir() else place.parent
    if (folder / "tokenizer.json").is_file():
        return _folder_tokenizer(folder)
    if len(list(folder.glob("*.gguf"))) == 1:
        return gguf_tokenizer(open_checkpoint(folder).metadata)
    if (folder / "tokenizer.model").is_file():
        raise Unsupported(
            "the tokenizer is a SentencePiece model without tokenizer.json",
            origin=str(folder / "tokenizer.model"),
            advice="save it once with transformers' AutoTokenizer(...).save_pretrained",
        )
    raise CheckpointError(
        "there is no tokenizer", origin=str(folder), advice="download tokenizer.json into it"
    )


def gguf_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that the metadata of a GGUF file describes.

    Raises: CheckpointError if it is damaged; Unsupported on an unknown model or pre-tokenizer.
    """
    backend = build_backend(metadata)
    tokens = read_tokens(metadata)
    special = read_special_ids(metadata, len(tokens))
    named = {f"{kind}_token": tokens[i] for kind, i in special.named.items()}
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_id=special.named.get("bos"),
        eos_ids=special.eos_ids,
        chat_template=template if isinstance(template, str) else None,
        special_tokens=named,
        prefix_ids=special.prefix_ids,
        suffix_ids=special.suffix_ids,
    )


def _folder_tokenizer(folder: Path) -> Tokenizer:
    place = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(place))
    # The library raises plain Exception for every kind of damage.
    except Exception as error:
        raise CheckpointError(
            f"tokenizer.json cannot be read: {error}",
            origin=str(place),
            advice="download it again, or update the tokenizers package",
        ) from error
    # Lengths are the engine's business: a file made for sentence embeddings cuts at 128 tokens.
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    named = {key: text for key in _NAMED_TOKENS if (text := _token_text(config.get(key)))}
    return Tokenizer(
        backend,
        bos_id=backend.token_to_id(named["bos_token"]) if "bos_token" in named else None,
        eos_ids=_eos_ids(backend, named, folder),
        chat_template=_folder_template(folder, config),
        special_tokens=named,
    )


def _read_json(place: Path) -> dict[str, object]:
    """Return a JSON object, empty if there is no such file."""
    if not place.is_file():
        return {}
    try:
        value = json.loads(place.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{place.name} is not JSON: {error}", origin=str(place), advice="download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{place.name} is not a JSON object", origin=str(place), advice="download it again"
        )
    return value


def _token_text(entry: object) -> str | None:
    """Return the text of a token, written plainly or as an object with its content."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _eos_ids(
    backend: tokenizers.Tokenizer, named: Mapping[str, str], folder: Path
) -> frozenset[int]:
    """Gather ends of generation from all places that name some."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool))
    if "eos_token" in named:
        token_id = backend.token_to_id(named["eos_token"])
        found.update(() if token_id is None else (token_id,))
    return frozenset(found)


def _folder_template(folder: Path, config: Mapping[str, object]) -> str | None:
    """Return the default chat template: its own file wins over tokenizer_config.json."""
    place = folder / "chat_template.jinja"
    if place.is_file():
        return place.read_text(encoding="utf-8")
    value = _read_json(folder / "chat_template.json").get(
        "chat_template", config.get("chat_template")
    )
    if isinstance(value, list):
        by_name = {e.get("name"): e.get("template") for e in value if isinstance(e, dict)}
        value = by_name.get("default")
    return value if isinstance(value, str) else None
