"""Requests made from the OpenAPI document, good and bad ones: none may break the server."""

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from dspark.llm import LLM
from dspark.serving.app import AppConfig
from dspark.serving.bridge import BridgeConfig
from tests.serving.conftest import serving

_SKIPPED = {"/live/events", "/live/crowd"}


def test_no_request_breaks_the_server(llm: LLM) -> None:
    config = AppConfig(served_name="toy", chat_tokens=4)
    with serving(llm, config, BridgeConfig(deadline_s=2.0)) as (_, url, _):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        num_calls = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path in _SKIPPED:  # one does not end, one starts users of its own
                continue

            @given(case=operation.as_strategy())
            @settings(
                max_examples=12,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                derandomize=True,
            )
            def call(case: schemathesis.Case) -> None:
                nonlocal num_calls
                num_calls += 1
                case.call_and_validate(
                    checks=[not_a_server_error, status_code_conformance, content_type_conformance]
                )

            call()
        assert num_calls > 20
