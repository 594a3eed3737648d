"""The causal language model: megatron-core blocks with explicit positions, document-wise attention and a chunked loss.

It knows nothing of slots, noise or objectives: those are in the batch (see `refusion_train.objective`).
"""

import warnings

# megatron-core says so once per module on import; the fallbacks are what this package is tested with.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
