"""The datasets of a run as a plan sees them: one dataset, with the documents and the passes of the mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from refusion_train.sources import expected_tokens, short_names, sources_of

if TYPE_CHECKING:
    from refusion_train.config import Config


class DatasetSize(Protocol):
    """What of a dataset's index a plan reads; `data.shard_index.Index` is one."""

    @property
    def documents(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class MixedSize:
    """Several datasets. documents: so many that they are on average as long as those that the run reads; epochs: passes
    over each dataset, by its name in reports."""

    documents: float
    tokens: int
    vocab_size: int
    epochs: dict[str, float]


def mixed(config: Config, sizes: Sequence[DatasetSize]) -> DatasetSize:
    """The datasets of `data.train`, in its order, as one; a lone one as it is."""
    if len(sizes) == 1:
        return sizes[0]
    sources = sources_of(config)
    per_step = config.train.global_batch_size * config.data.sequence_length
    read = expected_tokens(sources, [size.tokens for size in sizes], config.train.steps, per_step)
    tokens = sum(size.tokens for size in sizes)
    per_token = sum(
        count / sum(read) * size.documents / size.tokens for count, size in zip(read, sizes, strict=True) if size.tokens
    )
    names = short_names([source.path for source in sources])
    passes = {n: count / max(1, size.tokens) for n, count, size in zip(names, read, sizes, strict=True)}
    return MixedSize(per_token * tokens, tokens, max(size.vocab_size for size in sizes), passes)
