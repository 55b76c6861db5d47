"""Sizes of the CS336 course's Transformer, as its hand-out of 2025 has them: numbers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass

BASICS = "basics"
"""`model_type` in a config.json, and how the names of its sizes begin."""


@dataclass(frozen=True, kw_only=True)
class BasicsConfig:
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000
    context_length: int = 2048
    rope_theta: float = 10_000.0

    @property
    def parameters(self) -> int:
        block = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return 2 * self.vocab_size * self.d_model + self.num_layers * block + self.d_model


SIZES = {
    "small": BasicsConfig(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "medium": BasicsConfig(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "large": BasicsConfig(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    "xl": BasicsConfig(d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
    "2.7B": BasicsConfig(d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
}
LATER_SIZES = {"10B": BasicsConfig(d_model=4608, d_ff=12288, num_layers=50, num_heads=36)}
"""Of the hand-out of 2026, whose xl is the 2.7B of 2025."""
