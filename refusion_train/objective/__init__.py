"""The objectives as pure transforms of data: tokens in, corrupted rows with labels and weights out.

No torch, no generator state, no knowledge of ranks: see docs/objective.md for what is computed and why.
"""

from refusion_train.objective.api import Objective, make_objective
from refusion_train.objective.batch import CLEAN, IGNORE, MASKED, NONE, Batch, PackedDocuments
from refusion_train.objective.noise import document_key

__all__ = [
    "CLEAN",
    "IGNORE",
    "MASKED",
    "NONE",
    "Batch",
    "Objective",
    "PackedDocuments",
    "document_key",
    "make_objective",
]
