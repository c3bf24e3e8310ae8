"""The toy engine of the server's tests."""

from tests.serving.conftest import llm, loaded

__all__ = ["llm", "loaded"]
