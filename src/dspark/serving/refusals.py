"""Errors as clients of the OpenAI API read them. It knows no request's content."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dspark.errors import DSparkError
from dspark.serving.work import Cause, Failure

_STATUS = {
    Cause.INPUT: (400, "invalid_request_error", None),
    Cause.DEADLINE: (504, "timeout_error", "deadline_exceeded"),
    Cause.ENGINE: (500, "server_error", "engine_failed"),
    Cause.SHUTDOWN: (503, "server_error", "shutting_down"),
    Cause.SLOW_READER: (503, "server_error", "slow_reader"),
}
_MUST = ", but it must be "
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}


class Refusal(Exception):
    """An answer of another status than 200, in the API's own shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`kind`: the error's `type`; `None` takes the one of the status."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        if kind is None:
            kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.kind = kind
        self.headers = dict(headers or {})

    @classmethod
    def of_failure(cls, failure: Failure) -> "Refusal":
        """What the engine said."""
        status, kind, code = _STATUS[failure.cause]
        headers = {"Retry-After": "1"} if status == 503 else {}
        param = named_field(failure.message) if failure.cause is Cause.INPUT else None
        return cls(status, failure.message, kind=kind, code=code, headers=headers, param=param)

    @classmethod
    def of_error(cls, error: DSparkError) -> "Refusal":
        """A mistake in a request."""
        return cls(400, str(error), param=named_field(str(error)))

    @classmethod
    def of_fields(cls, errors: Iterable[Mapping[str, Any]]) -> "Refusal":
        """What pydantic found: one message with all of it, `param` the first field."""
        found = _sentences(errors)
        params = [param for param, _ in found if param]
        message = "; ".join(_joined(sentence for _, sentence in found)) + "."
        return cls(400, message, param=params[0] if params else None)

    @classmethod
    def of_route(cls, status: int, method: str, path: str, allowed: str) -> "Refusal":
        """A path that is not there (404), or not for this method (405)."""
        if status == 405:
            return cls(405, f"{method} is not for {_short(path)}; use {allowed}.")
        return cls(404, f"There is no {_short(path)} here; GET /openapi.json lists what there is.")

    def body(self) -> bytes:
        """The JSON of the error."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}, ensure_ascii=False).encode("utf-8", "replace")


def named_field(message: str) -> str | None:
    """The field that a sentence of the engine begins with: "top_p is 2, but .."."""
    found = re.match(r"([a-z][a-z_]*)(\[[^\]]*\])? (is|holds) ", message)
    return found.group(1) if found else None


def _joined(sentences: Iterable[str]) -> list[str]:
    """Each sentence once; what several say that one value must be becomes one (a union's rules)."""
    rules: dict[str, list[str]] = {}
    for sentence in sentences:
        value, _, rule = sentence.partition(_MUST)
        rules.setdefault(value, []).append(rule)
    return [
        value + (_MUST + " or ".join(dict.fromkeys(found)) if any(found) else "")
        for value, found in rules.items()
    ]


def _sentences(errors: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Field and sentence of each error; of a union only the branch that got deepest."""
    deepest: dict[str, tuple[int, str, str]] = {}
    found: list[tuple[str, str, str]] = []
    for error in errors:
        path = [part for part in error["loc"] if part not in ("body", "query", "path", "header")]
        field = "" if error["type"] == "json_invalid" else _name(path)  # its path is a position
        root = field.split("[")[0].split(".")[0]
        sentence = _sentence(field, error)
        if error["type"] == "value_error":  # of a whole object; its rule names the field in it
            field = sentence.partition(" is ")[0]
        found.append((root, field, sentence))
        if len(path) >= deepest.get(root, (-1, "", ""))[0]:
            deepest[root] = (len(path), field, found[-1][2])
    is_union = {root: len({f for r, f, _ in found if r == root}) > 1 for root, _, _ in found}
    kept = []
    for root, field, sentence in found:
        if not is_union[root] or deepest[root][1] == field:
            kept.append((field, sentence))
    return kept


def _name(path: Sequence[Any]) -> str:
    """messages[0].content; names of the branches of a union left out."""
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        elif (
            re.fullmatch(r"[A-Za-z_]\w*", part) and part not in ("str", "int") and part[0].islower()
        ):
            name += f".{part}" if name else part
    return name


def _sentence(field: str, error: Mapping[str, Any]) -> str:
    subject = field or "The body"
    match error["type"]:
        case "extra_forbidden":
            return f"{field} is not supported by this server"
        case "missing":
            return f"{subject} is missing"
        case "json_invalid":
            reason = error.get("ctx", {}).get("error", "")
            return f"The body is no valid JSON ({reason}, at character {error['loc'][-1]})"
        case "value_error":
            rule = str(error["msg"]).removeprefix("Value error, ")
            return f"{field}.{rule}" if field else rule
        case "model_attributes_type" | "model_type" if not field:
            return "The body must be a JSON object, sent as application/json"
        case "too_short" | "too_long" as kind:
            limit = error["ctx"]["min_length" if kind == "too_short" else "max_length"]
            some = "at least" if kind == "too_short" else "at most"
            count = error["ctx"]["actual_length"]
            return f"{field} holds {count} items, but it must hold {some} {limit}"
        case _:
            rule = str(error["msg"]).removeprefix("Input should be ").removeprefix("Input ")
            return f"{subject} is {_short(error.get('input'))}{_MUST}{rule}"


def _short(value: Any) -> str:
    """A value as a client of JSON knows it, not too long for a sentence."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
