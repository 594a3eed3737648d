"""The causal language model: megatron-core blocks with explicit positions, document-wise attention and a chunked loss.

It knows nothing of slots, noise or objectives: those are in the batch (see `refusion_train.objective`).
"""

from refusion_train import parallel as _parallel  # noqa: F401  (silences megatron-core's remarks on import)
