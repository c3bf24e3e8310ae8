"""Processes of a test, forked from a server that has imported everything once."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

_PRELOADED = ["tests.training.killed_runs", "tests.training.two_processes"]


def context() -> ForkServerContext:
    """The same server for all tests: starting one costs seconds."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOADED)
    return found


def exit_codes(target: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[int | None]:
    """Run the calls at the same time, each in a process of its own; -9 is a kill."""
    children = [context().Process(target=target, args=arguments) for arguments in calls]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return [child.exitcode for child in children]
