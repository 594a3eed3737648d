"""What decoding by slots is compared with: left to right with a cache, and masked diffusion.

Both yield queries as the slot decoder does, so they use the same cache, the same forward and the same head.

This file is copied into every exported folder: it imports nothing but its neighbours.
"""

from __future__ import annotations

from .cache import Query
from .decoding import EQUAL, Cache, Steps
from .settings import Settings


class LeftToRightDecoder:
    """One token after the other with a cache: what any causal language model does."""

    def __init__(self, prompt: list[int], settings: Settings, cache: Cache) -> None:
        if not prompt:
            raise ValueError("decoding left to right needs a prompt of at least one token, for example the begin token")
        self.prompt = prompt
        self.settings = settings
        self.cache = cache
        self.tokens = [settings.mask_id] * settings.region
        self.end: int | None = None

    def steps(self) -> Steps:
        """Yield one forward for each token; the first is the prompt's."""
        count = len(self.prompt)
        seen = yield Query(self.prompt, list(range(count)), wanted=[count - 1], sure=False)
        self.cache.commit(count)
        for offset in range(self.settings.region):
            token = seen.tokens[0]
            self.tokens[offset] = token
            if token in self.settings.end_ids:
                self.end = offset
                return
            if offset + 1 < self.settings.region:
                seen = yield Query([token], [count + offset], sure=False)
                self.cache.commit(1)


class DiffusionDecoder:
    """Masked diffusion with low-confidence remasking, block by block, as in LLaDA (arXiv 2502.09992).

    Attention is bidirectional, so nothing can be cached: every forward reads the prompt and the whole region. Either
    the number of forwards is fixed (`steps`) and each decides equally many tokens, the surest ones; or each decides
    all that are surer than `confidence_threshold`, at least one. When an end token is decided the region ends there,
    as documents do in training.
    """

    def __init__(self, prompt: list[int], settings: Settings, cache: Cache) -> None:
        self.prompt = prompt
        self.settings = settings
        self.tokens = [settings.mask_id] * settings.region
        self.end: int | None = None

    def steps(self) -> Steps:
        """Yield the forwards; each decides the surest masked tokens of the current block."""
        block = self.settings.region // self.settings.num_blocks
        forwards = (self.settings.steps or self.settings.region) // self.settings.num_blocks
        for first in range(0, self.settings.region, block):
            for step in range(forwards):
                masked = self._masked(first, first + block)
                if not masked:
                    break
                # The first forwards decide one more where the block does not divide evenly.
                count = block // forwards + (step < block % forwards)
                yield from self._decide(masked, count)

    def _masked(self, first: int, stop: int) -> list[int]:
        """Offsets of a block that are undecided and not behind the end token."""
        stop = stop if self.end is None else min(stop, self.end)
        return [offset for offset in range(first, stop) if self.tokens[offset] == self.settings.mask_id]

    def _decide(self, masked: list[int], count: int) -> Steps:
        region = self.tokens if self.end is None else self.tokens[: self.end + 1]
        before = len(self.prompt)
        length = before + len(region)
        wanted = [before + offset for offset in masked]
        seen = yield Query([*self.prompt, *region], list(range(length)), wanted=wanted, bidirectional=True)
        # Confidences as whole multiples of EQUAL: sorting is stable, so the first among equals wins.
        surest = sorted(range(len(masked)), key=lambda row: -round(seen.probabilities[row] / EQUAL))
        threshold = self.settings.confidence_threshold
        if threshold is not None:
            count = max(1, sum(probability > threshold for probability in seen.probabilities))
        for row in surest[:count]:
            self.tokens[masked[row]] = seen.tokens[row]
            if seen.tokens[row] in self.settings.end_ids:
                self.end = masked[row] if self.end is None else min(self.end, masked[row])
