"""Rotary embedding frequencies: one definition for references, kernels and models.

Source: Su et al. 2021; scalings as published with Llama 3.1 ("llama3"), Chen et al. 2023
("linear") and Peng et al. 2023 ("yarn").
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from metainfer.ir.errors import Unsupported

SCALINGS = ("", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Parameters of a rotary embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        scaling: "", "linear", "llama3" or "yarn".
        factor: how much longer the context became.
        low_freq_factor: llama3: wavelengths above original_max / this are divided by factor.
        high_freq_factor: llama3: wavelengths below original_max / this are kept.
        original_max: positions the model was first trained on (llama3, yarn).
        beta_fast: yarn: rotations over the original context above which a frequency is kept.
        beta_slow: yarn: rotations below which it is interpolated.
        attention_factor: yarn: multiplies cos and sin; 0 means 0.1 ln(factor) + 1, at least 1.
    """

    theta: float = 10000.0
    scaling: str = ""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0

    def __post_init__(self) -> None:
        """Check the scaling's name.

        Raises: Unsupported if it is unknown.
        """
        if self.scaling not in SCALINGS:
            known = ", ".join(repr(s) for s in SCALINGS)
            raise Unsupported(f"unknown rope scaling {self.scaling!r}", advice=f"known: {known}")

    def attrs(self) -> dict[str, Any]:
        """The parameters that differ from the defaults, as op attributes."""
        default = Rope()
        return {k: v for k, v in asdict(self).items() if v != getattr(default, k)}

    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.scaling != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0

    def inverse_frequencies(self, width: int) -> np.ndarray:
        """Radians per position of each rotated pair, float32 [width / 2]."""
        exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        plain = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        if self.scaling == "linear":
            return (plain / np.float32(self.factor)).astype(np.float32)
        if self.scaling == "llama3":
            return self._llama3(plain)
        if self.scaling == "yarn":
            return self._yarn(plain, width)
        return plain

    def cos_sin(self, positions: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines, float32 [*positions.shape, width / 2]."""
        angles = positions[..., None].astype(np.float32) * self.inverse_frequencies(width)
        scale = np.float32(self.magnitude())
        return np.cos(angles) * scale, np.sin(angles) * scale

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        wavelengths = 2 * math.pi / plain
        longest = self.original_max / self.low_freq_factor
        shortest = self.original_max / self.high_freq_factor
        blend = (self.original_max / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        middle = (1 - blend) * plain / self.factor + blend * plain
        scaled = np.where(wavelengths > longest, plain / self.factor, plain)
        between = (wavelengths <= longest) & (wavelengths >= shortest)
        return np.where(between, middle, scaled).astype(np.float32)

    def _yarn(self, plain: np.ndarray, width: int) -> np.ndarray:
        def pair_at(rotations: float) -> float:
            turns = self.original_max / (rotations * 2 * math.pi)
            return width * math.log(turns) / (2 * math.log(self.theta))

        low = max(math.floor(pair_at(self.beta_fast)), 0)
        high = min(math.ceil(pair_at(self.beta_slow)), width - 1)
        span = (high - low) or 0.001
        ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / span, 0, 1)
        return (plain / self.factor * ramp + plain * (1 - ramp)).astype(np.float32)
