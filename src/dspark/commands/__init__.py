"""The commands, a module for each kind. Each parses, builds, calls one function and prints.

Heavy modules are imported inside the commands, so that `--help` answers at once and without torch.
"""
