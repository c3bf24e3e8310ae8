"""Training examples: prompts, answers, hidden states, batches. It does not know the trainer."""
