"""Whether a name can be asked for at the hub, told within seconds. It loads nothing.

The hub's own library tries a name that it does not have six times, over 25 seconds, before it says
that there is no network.
"""

import socket
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache

_TIMEOUT_S = 5.0
_FIRST_FILES = {"model": "config.json", "dataset": "README.md"}


def is_out_of_reach(name: str, kind: Literal["model", "dataset"] = "model") -> bool:
    """Whether it is neither in the hub's cache nor at a server that answers.

    `False` behind a proxy, which may know more addresses than this machine.
    """
    try:
        if try_to_load_from_cache(name, _FIRST_FILES[kind], repo_type=kind) is not None:
            return False
    except ValueError:  # no name that the hub could have; its library says why
        return False
    return constants.is_offline_mode() or not _answers(constants.ENDPOINT)


def _answers(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    if getproxies().keys() & {parts.scheme, "all"}:
        return True
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def endpoint() -> str:
    """Where the hub is looked for."""
    return str(constants.ENDPOINT)
