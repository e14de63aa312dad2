"""What a language model is measured with."""

from typing import NamedTuple


class Load(NamedTuple):
    """What a language model is measured with."""

    prompt_tokens: int
    new_tokens: int
    batch: int
