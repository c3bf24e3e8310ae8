"""What can go wrong by a user's hand, as one tree. It does not know who reports it.

DSparkError
|-- InputError (ValueError)      a request or an option holds a value that cannot be served
|-- ModelError (ValueError)      a model, drafter or artifact is missing, damaged or does not fit
|-- NumericsError (ArithmeticError)  a computation gave a value that is not finite
|-- CapacityError (RuntimeError)     memory, pages or disk do not suffice
|-- ServerFault (RuntimeError)       a server that we asked did not answer as it should
`-- Stopped                          the user ended a run that can go on; nothing is lost

Each message is one sentence: what was wrong, the value, the remedy. Our own bugs raise
`AssertionError`; they are never caught.
"""


class DSparkError(Exception):
    """Root of the tree; the CLI prints its message and exits non-zero, the server answers 400.

    `request_id` names the request at fault, if it is one request's: the others can go on.
    """

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class InputError(DSparkError, ValueError):
    """A request or an option holds a value that cannot be served."""


class ModelError(DSparkError, ValueError):
    """A model, drafter or artifact is missing, damaged, or does not fit its counterpart."""


class NumericsError(DSparkError, ArithmeticError):
    """A computation gave a value that is not finite."""


class CapacityError(DSparkError, RuntimeError):
    """Memory, pages or disk do not suffice."""


class ServerFault(DSparkError, RuntimeError):
    """A server that we asked did not answer as it should; `name` tells the kind in a few words."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Stopped(DSparkError):
    """The user ended a run, which is saved and can go on; the CLI's exit code is 130."""


def first_line(error: BaseException) -> str:
    """Of what another library's error says, to be put into a sentence; its kind if it is mute."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
