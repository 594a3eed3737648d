"""From shards on disk to corrupted micro-batches: tokenizer, shards, packing, order, loader."""
