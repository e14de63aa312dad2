"""Builds a tokenizer of the vocabulary in a GGUF file.

Two families are known: byte-level BPE ("gpt2"), whose pre-tokenizer is named by
``tokenizer.ggml.pre``, and SentencePiece BPE ("llama"), whose merges follow from the scores.

Source: llama.cpp's llama-vocab.cpp for the meaning of the keys and the pre-tokenizer patterns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from metainfer.ir.errors import CheckpointError, Unsupported

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_NORMAL = 1
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_AGAIN = "the file is damaged or was converted badly: download or convert it again"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_DIGITS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes(*, words: bool) -> pre_tokenizers.PreTokenizer:
    """Map bytes to characters, after GPT-2's split into words if ``words``."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


@dataclass(frozen=True)
class _PreTokenizer:
    """How one family of byte-level BPE models cuts text before merging.

    Attributes:
        steps: makes the pre-tokenizers to run in order.
        adds_bos: whether texts begin with bos when the file does not say.
        whole_words: whether a word that is a token skips the merges.
        normalizer: makes the normalizer, if any.
    """

    steps: Callable[[], list[pre_tokenizers.PreTokenizer]]
    adds_bos: bool = False
    whole_words: bool = False
    normalizer: Callable[[], normalizers.Normalizer] | None = None


_LLAMA3 = _PreTokenizer(
    lambda: [_split(_WORDS_AND_DIGITS % 3), _bytes(words=False)], adds_bos=True, whole_words=True
)
PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "default": _PreTokenizer(
        lambda: [
            _split(r"[\p{P}\$\+<=>\^~\|]+"),
            _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
            _split(r"\p{N}+"),
            _split(r"[0-9][0-9][0-9]"),
            _bytes(words=False),
        ]
    ),
    "gpt-2": _PreTokenizer(lambda: [_bytes(words=True)]),
    "smollm": _PreTokenizer(
        lambda: [pre_tokenizers.Digits(individual_digits=True), _bytes(words=True)]
    ),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _PreTokenizer(
        lambda: [_split(_WORDS_AND_DIGITS % 1), _bytes(words=False)],
        normalizer=normalizers.NFC,
    ),
}


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a role.

    Attributes:
        named: by role: bos, eos, unk, pad.
        eos_ids: all ids that end a generation.
        prefix_ids: ids put before a text.
        suffix_ids: ids put after a text.
    """

    named: Mapping[str, int]
    eos_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]


def build_backend(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the `tokenizers` object of a GGUF file's metadata.

    Raises: CheckpointError if keys are missing or contradict each other; Unsupported on an unknown
        model or pre-tokenizer.
    """
    tokens = read_tokens(metadata)
    kinds = _read_kinds(metadata, len(tokens))
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(t for i, t in enumerate(tokens) if ids[t] != i)
        raise CheckpointError(f"token {twice!r} is twice in the vocabulary", advice=_AGAIN)
    if _is_sentencepiece(metadata):
        backend = _sentencepiece(metadata, tokens, ids, kinds)
    else:
        backend = _byte_level(metadata, ids)
    # The normalizer must not touch the names of these tokens.
    backend.add_special_tokens(
        [_added(t, special=True) for t, k in _of_kind(tokens, kinds, {_UNKNOWN, _CONTROL})]
    )
    backend.add_tokens(
        [_added(t, special=False) for t, k in _of_kind(tokens, kinds, {_USER_DEFINED})]
    )
    return backend


def _is_sentencepiece(metadata: Mapping[str, object]) -> bool:
    model = metadata.get(f"{_PREFIX}model")
    if model not in ("gpt2", "llama"):
        raise Unsupported(
            f"the GGUF file's tokenizer model is {model!r}", advice="known: gpt2, llama"
        )
    return model == "llama"


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _of_kind(tokens: list[str], kinds: list[int], wanted: set[int]) -> list[tuple[str, int]]:
    return [(t, k) for t, k in zip(tokens, kinds, strict=True) if k in wanted and t]


def read_tokens(metadata: Mapping[str, object]) -> list[str]:
    """Return the vocabulary by id. Raises: CheckpointError if the file has none."""
    return _texts(metadata, "tokens")


def read_special_ids(metadata: Mapping[str, object], num_tokens: int) -> SpecialIds:
    """Return the ids with a role, those of the format's own defaults included.

    Raises: CheckpointError if an id is outside the vocabulary.
    """
    sentencepiece = _is_sentencepiece(metadata)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {role: _token_id(metadata, key, num_tokens) for role, key in roles.items()}
    present = {role: i for role, i in named.items() if i is not None}
    ends = [present.get("eos")]
    ends += [_token_id(metadata, key, num_tokens) for key in ("eot", "eom")]
    adds_bos = sentencepiece or _pre_tokenizer(metadata).adds_bos
    prefix, suffix = (
        (present[role],) if metadata.get(f"{_PREFIX}add_{role}_token", default) else ()
        for role, default in (("bos", adds_bos and "bos" in present), ("eos", False))
    )
    return SpecialIds(present, frozenset(i for i in ends if i is not None), prefix, suffix)


def _token_id(metadata: Mapping[str, object], key: str, num_tokens: int) -> int | None:
    value = metadata.get(f"{_PREFIX}{key}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < num_tokens:
        raise CheckpointError(
            f"{_PREFIX}{key}_token_id is {value!r}, but there are {num_tokens} tokens",
            advice=_AGAIN,
        )
    return value


def _texts(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(f"{_PREFIX}{key}")
    if not isinstance(value, list) or not all(isinstance(t, str) for t in value):
        raise CheckpointError(f"the GGUF file has no list of texts {_PREFIX}{key}", advice=_AGAIN)
    return value


def _read_kinds(metadata: Mapping[str, object], num_tokens: int) -> list[int]:
    value = metadata.get(f"{_PREFIX}token_type", [_NORMAL] * num_tokens)
    if not isinstance(value, list) or len(value) != num_tokens:
        raise CheckpointError(
            f"{_PREFIX}token_type is not a list of {num_tokens} numbers", advice=_AGAIN
        )
    return value


def _pre_tokenizer(metadata: Mapping[str, object]) -> _PreTokenizer:
    name = metadata.get(f"{_PREFIX}pre")
    found = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if found is None:
        raise Unsupported(
            f"the GGUF file's pre-tokenizer ({_PREFIX}pre) is {name!r}",
            advice=f"known: {', '.join(PRE_TOKENIZERS)}; "
            "or put the model's tokenizer.json beside safetensors weights",
        )
    return found


def _byte_level(metadata: Mapping[str, object], ids: dict[str, int]) -> Tokenizer:
    pre = _pre_tokenizer(metadata)
    merges = [_pair(text) for text in _texts(metadata, "merges")]
    backend = Tokenizer(_bpe(ids, merges, ignore_merges=pre.whole_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(pre.steps())
    backend.decoder = decoders.ByteLevel()
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, blank, right = merge.partition(" ")
    if not blank:
        raise CheckpointError(f"merge {merge!r} is not two tokens", advice=_AGAIN)
    return left, right


def _bpe(
    ids: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
    unk_token: str | None = None,
) -> models.BPE:
    try:
        return models.BPE(
            vocab=ids,
            merges=merges,
            ignore_merges=ignore_merges,
            byte_fallback=byte_fallback,
            unk_token=unk_token,
            fuse_unk=True,
        )
    # The library raises plain Exception, as for a merge of tokens that do not exist.
    except Exception as error:
        raise CheckpointError(
            f"the vocabulary of the GGUF file does not fit its merges: {error}", advice=_AGAIN
        ) from error


def _sentencepiece(
    metadata: Mapping[str, object], tokens: list[str], ids: dict[str, int], kinds: list[int]
) -> Tokenizer:
    unknown = _token_id(metadata, "unknown", len(tokens))
    backend = Tokenizer(
        _bpe(
            ids,
            _merges_by_score(metadata, tokens, kinds),
            byte_fallback=_BYTE in kinds,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    has_prefix = bool(metadata.get(f"{_PREFIX}add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    ends: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend


def _merges_by_score(
    metadata: Mapping[str, object], tokens: list[str], kinds: list[int]
) -> list[tuple[str, str]]:
    """List every way to make a token of two others, tokens of the best score first.

    SentencePiece always merges the pair whose result has the best score, which is what BPE does
    with merges in this order.
    """
    scores = metadata.get(f"{_PREFIX}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(
            f"{_PREFIX}scores is not a list of {len(tokens)} numbers", advice=_AGAIN
        )
    pieces = {t for t, k in zip(tokens, kinds, strict=True) if k == _NORMAL}
    order = sorted((i for i in range(len(tokens)) if tokens[i] in pieces), key=lambda i: -scores[i])
    return [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in order)
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
