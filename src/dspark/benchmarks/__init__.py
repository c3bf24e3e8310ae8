"""Measurements from outside: they time and compare engines and change nothing in them."""
