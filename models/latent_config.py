"""Sizes of multi-head latent attention (DeepSeek-V2 and V3)."""

from dataclasses import dataclass

from metainfer.ir.errors import TypeMismatch


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of latent attention; heads and hidden width are the decoder's.

    Attributes:
        rank: width of a token's latent.
        rope_width: of the rotary part of queries and keys.
        plain_width: of the other part.
        value_width: of a head's value.
        query_rank: width of what queries are made from; 0 if they are made from the token itself.
        interleaved: whether rotary pairs are neighbours, (2i, 2i + 1).

    Raises: TypeMismatch if a size is none.
    """

    rank: int = 512
    rope_width: int = 64
    plain_width: int = 128
    value_width: int = 128
    query_rank: int = 1536
    interleaved: bool = True

    def __post_init__(self) -> None:
        """Check the sizes."""
        if min(self.rank, self.rope_width, self.plain_width, self.value_width) < 1:
            raise TypeMismatch(f"latent attention of empty parts: {self}")
        if self.rope_width % 2 or self.query_rank < 0:
            raise TypeMismatch(
                f"latent attention with rotary keys of {self.rope_width} numbers and queries of "
                f"rank {self.query_rank}"
            )

    @property
    def key_width(self) -> int:
        """Of a head's whole query and key."""
        return self.plain_width + self.rope_width

    def tiny(self) -> "LatentConfig":
        """The form for a small decoder: all parts of unlike widths."""
        return LatentConfig(32, 8, 16, 12, min(self.query_rank, 24), self.interleaved)
