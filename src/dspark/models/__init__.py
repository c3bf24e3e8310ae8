"""Weights and forward passes. Nothing here knows a request."""
