"""Training: `loop` is the file to read first; nothing but the command line imports this package."""
