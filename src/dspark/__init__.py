"""dspark: a language model answers faster, with exactly the same answers."""
