from importlib.util import find_spec

import numpy as np
import pytest
import torch
from plain_modules import MINILM_FILE, BertEncoder, BertSizes, MlpMixer, bert_inputs, minilm, mixer
from safetensors.torch import load_file

from metainfer.models.spec import ModelSpec


@pytest.fixture(scope="module")
def encoder() -> BertEncoder:
    if find_spec(MINILM_FILE.package) is None:
        pytest.skip(f"needs {MINILM_FILE.package}")
    made = BertEncoder(BertSizes()).eval()
    weights = load_file(minilm.locate_checkpoint())
    for name in minilm.ignore:
        del weights[name]
    made.load_state_dict(weights)
    return made


def test_minilm_equals_transformers(encoder: BertEncoder) -> None:
    transformers = pytest.importorskip("transformers")
    folder = minilm.locate_checkpoint().parent
    oracle = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids, mask = bert_inputs(30522, batch=3, length=9)
    with torch.no_grad():
        states, pooled = encoder(ids, mask)
        wanted = oracle(input_ids=ids, attention_mask=mask)
    np.testing.assert_allclose(
        states[mask > 0], wanted.last_hidden_state[mask > 0], atol=2e-5, rtol=1e-5
    )
    np.testing.assert_allclose(pooled, wanted.pooler_output, atol=1e-5)


def test_minilm_finds_near_meanings(encoder: BertEncoder) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = minilm.locate_checkpoint().parent / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_padding()

    def embed(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            states, _ = encoder(ids, torch.ones_like(ids))
        return torch.nn.functional.normalize(states.mean(1), dim=-1)[0]

    cat, kitten, market = map(
        embed,
        ["A cat sits on the mat.", "A kitten is on the rug.", "The stock market fell sharply."],
    )
    assert float(cat @ kitten) > 0.5
    assert float(cat @ market) < 0.2


def test_masked_tokens_change_nothing() -> None:
    torch.manual_seed(0)
    assert minilm.tiny is not None
    small = minilm.tiny().build().eval()
    ids, mask = bert_inputs(60)
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % 60
    with torch.no_grad():
        before, after = small(ids, mask)[0], small(other, mask)[0]
    torch.testing.assert_close(before[mask > 0], after[mask > 0])
    assert not torch.equal(before[0, -1], after[0, -1])


def test_token_types_default_to_zero() -> None:
    torch.manual_seed(0)
    assert minilm.tiny is not None
    small = minilm.tiny().build().eval()
    ids, mask = bert_inputs(60)
    with torch.no_grad():
        assert torch.equal(small(ids, mask)[0], small(ids, mask, torch.zeros_like(ids))[0])
        assert not torch.equal(small(ids, mask)[0], small(ids, mask, torch.ones_like(ids))[0])


@pytest.mark.parametrize("spec", [mixer, minilm.tiny() if minilm.tiny else minilm])
def test_specs_export_with_their_dynamic_dims(spec: ModelSpec) -> None:
    assert spec.example_inputs is not None
    dims = {n: torch.export.Dim(n, min=1, max=spec.size_bounds(n)[1]) for n in ("B", "S")}
    shapes = tuple({i: dims[n] for i, n in enumerate(names)} for names in spec.dynamic)
    module = spec.build().eval()
    inputs = spec.example_inputs()
    exported = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    one = tuple(x[:1].contiguous() for x in inputs)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(*one), module(*one))


def test_mixer_sees_all_patches() -> None:
    torch.manual_seed(0)
    module = MlpMixer().eval()
    images = torch.randn(1, 3, 16, 16)
    other = images.clone()
    other[0, :, -1, -1] += 1.0
    with torch.no_grad():
        assert module(images).shape == (1, 10)
        assert not torch.allclose(module(images), module(other))
