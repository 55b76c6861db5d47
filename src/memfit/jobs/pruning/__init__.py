"""One-shot pruning of language models, one block of memory at a time."""
