"""Changing a drafter's weights: objective, optimiser, loop, validation."""
