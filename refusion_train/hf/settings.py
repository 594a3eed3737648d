"""How to decode: every option of `generate` with its default, and what is refused.

This file is copied into every exported folder: it imports nothing of the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DECODINGS = ("plan_and_infill", "left_to_right", "mdm")
CORRECTIONS = ("ar", "redraft")
_WHOLE = {"max_new_tokens": 1, "slot_size": 1, "num_blocks": 1, "seed": 0, "steps": 1}  # least value of each
_SHARES = ("slot_threshold", "token_threshold", "confidence_threshold", "top_p")


@dataclass
class Settings:
    """How to decode. The defaults are those of greedy decoding of slots."""

    mask_id: int
    end_ids: tuple[int, ...] = ()
    decoding: str = "plan_and_infill"
    max_new_tokens: int = 128
    slot_size: int = 8
    # Serial blocks of the response region; slots of later blocks are not planned before earlier blocks are full.
    num_blocks: int = 1
    # A slot is chosen when the probability of its first token is above this (or when it is the best).
    slot_threshold: float = 0.9
    # A drafted token is accepted while its left-to-right probability within the slot is above this.
    token_threshold: float = 0.4
    # What replaces a rejected token: ar (argmax of the distribution that rejected it), redraft (the paper's).
    correction: str = "ar"
    # Recompute the keys of slots that were completed side by side in one causal pass.
    exact_kv: bool = False
    # A slot whose predecessor is committed may take its first token from the left-to-right prediction there.
    first_from_ar: bool = True
    # Neighbouring chosen slots are verified and corrected as one run, the first tokens of all but one of them too
    # (where first_from_ar has a meaning, and with correction ar).
    join_slots: bool = True
    # 0: argmax. Probabilities compared with thresholds are always those at temperature 1.
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    # mdm: forwards over the whole response; None: one for each token.
    steps: int | None = None
    # mdm: instead of a number of forwards, every forward decides all tokens that are surer than this (or the surest).
    confidence_threshold: float | None = None

    @property
    def joined(self) -> bool:
        """Whether neighbouring slots are one run."""
        return self.join_slots and self.first_from_ar and self.correction == "ar"

    @property
    def unit(self) -> int:
        """What the length of the response region is a multiple of."""
        return self.slot_size if self.decoding == "plan_and_infill" else 1

    @property
    def region(self) -> int:
        """Length of the response region: max_new_tokens rounded up to whole slots (slots only)."""
        return -(-self.max_new_tokens // self.unit) * self.unit

    def validate(self) -> None:
        """Raise ValueError, naming the option and a remedy, for values that cannot work."""
        _one_of("decoding", self.decoding, DECODINGS)
        _one_of("correction", self.correction, CORRECTIONS)
        for name, least in _WHOLE.items():
            value = getattr(self, name)
            if name == "steps" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        for name in ("temperature", *_SHARES):
            value = getattr(self, name)
            if name == "confidence_threshold" and value is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}={value!r} must be a number of at least 0")
            if name in _SHARES and (value > 1 or (name == "top_p" and value == 0)):
                raise ValueError(f"{name}={value!r} must be in {'(0' if name == 'top_p' else '[0'}, 1]")
        if self.decoding != "left_to_right":
            self._validate_blocks()

    def _validate_blocks(self) -> None:
        if self.region % (self.num_blocks * self.unit):
            raise ValueError(
                f"a response region of {self.region} tokens (max_new_tokens={self.max_new_tokens}) cannot be cut into "
                f"num_blocks={self.num_blocks} blocks of whole slots (slot_size={self.unit}); "
                f"make max_new_tokens a multiple of {self.num_blocks * self.unit}, or change num_blocks"
            )
        if self.decoding != "mdm" or self.steps is None:
            return
        if self.confidence_threshold is not None:
            raise ValueError(
                f"steps={self.steps} and confidence_threshold={self.confidence_threshold} both say how many "
                "tokens a forward decides; leave one of them out"
            )
        if self.steps % self.num_blocks or self.steps > self.region:
            raise ValueError(
                f"steps={self.steps} must be a multiple of num_blocks={self.num_blocks} and at most "
                f"max_new_tokens={self.max_new_tokens}"
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value} is not one of {', '.join(allowed)}")
