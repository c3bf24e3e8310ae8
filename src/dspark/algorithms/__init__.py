"""The mathematics of decoding and training: pure functions of tensors and value objects.
It knows no file, no clock, no device choice, and neither model nor engine."""
