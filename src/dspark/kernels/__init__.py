"""Operators with one signature each: a PyTorch reference and a C++ path for CPUs.

They know shapes and dtypes; no model, request or file. The C++ path is chosen where it is built
and fits, the reference elsewhere; both compute the same function.
"""
