"""The toy engine of the server's tests."""

from tests.serving.conftest import toy_llm

__all__ = ["toy_llm"]
