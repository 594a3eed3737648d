"""From this package's parameters to Hugging Face tensors and back: one table of names, export, import."""
