"""Corpora to tokenizers and shards: reading documents, training a tokenizer, building and inspecting shards."""
