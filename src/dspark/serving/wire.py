"""Answers as the OpenAI API writes them: one writer per response, pieces in, JSON out.

A stream and a whole answer are made of the same pieces. A piece of a stream is a template filled
with one JSON string: no object is built and checked for every token. It knows no HTTP.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any

from dspark.core import FinishReason, TokenLogprobs
from dspark.serving.thoughts import Thought, ThoughtReader
from dspark.serving.tools import Call, CallReader, new_id
from dspark.serving.work import Counts, Order, Piece
from dspark.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_REASONS = {
    FinishReason.STOP: '"stop"',
    FinishReason.LENGTH: '"length"',
    FinishReason.CONTEXT: '"length"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a client wants to be told."""

    is_chat: bool
    has_tools: bool = False
    """Calls of tools are read from the answer."""
    has_logprobs: bool = False
    has_token_ids: bool = False
    has_usage: bool = False
    """Of a stream: a last chunk with the usage."""
    has_running_usage: bool = False
    """Of a stream: the usage so far in every chunk."""


class Writer:
    """The JSON of one response."""

    def __init__(
        self, order: Order, wishes: Wishes, *, created: int, model: str, tokenizer: Tokenizer
    ) -> None:
        self._order = order
        self._wishes = wishes
        self._created = created
        self._model = model
        self._tokenizer = tokenizer
        self._counts: dict[int, Counts] = {}
        kind = "chat.completion.chunk" if wishes.is_chat else "text_completion"
        self._head = (
            f'data: {{"id":{dumps(order.id)},"object":"{kind}","created":{created},'
            f'"model":{dumps(model)},"choices":[{{"index":'
        )
        self._thoughts: dict[int, ThoughtReader] = {}
        self._num_thought = 0
        self._readers: dict[int, CallReader] = {}
        self._offsets: dict[int, int] = {}
        # answers to one prompt share its list of ids
        firsts: dict[int, int] = {}
        for i, request in enumerate(order.requests):
            firsts.setdefault(id(request.prompt_ids), i)
        self._firsts = list(firsts.values())
        self._num_prompt = sum(len(order.requests[i].prompt_ids) for i in self._firsts)

    def chunk(self, piece: Piece) -> str:
        """A piece as an event of a stream; empty if there is nothing to tell yet."""
        wishes, index = self._wishes, piece.answer
        is_first = index not in self._counts
        self._counts[index] = piece.counts
        reason = piece.finish_reason
        ending = "null" if reason is None else _REASONS[reason]
        calls: list[dict[str, Any]] = []
        thought, said = self._parted(piece) if wishes.is_chat else ("", piece.text)
        if wishes.has_tools:
            said, calls, ending = self._with_calls(piece, said, ending)
        is_news = said or thought or calls or reason or (is_first and wishes.is_chat)
        if not (is_news or wishes.has_logprobs or wishes.has_token_ids):
            return ""
        logprobs = "null" if not wishes.has_logprobs else dumps(self._logprobs(piece))
        extra = f',"token_ids":{dumps(list(piece.token_ids))}' if wishes.has_token_ids else ""
        if wishes.is_chat:
            role = '"role":"assistant",' if is_first else ""
            body = f'"content":{dumps(said)}'
            if calls:
                body += f',"tool_calls":{dumps(calls)}'
            if thought:
                body = f'"reasoning_content":{dumps(thought)},{body}'
            text = f'"delta":{{{role}{body}}}'
        else:
            text = f'"text":{dumps(said)}'
        if wishes.has_running_usage:
            tail = f'}}],"usage":{dumps(self.usage())}}}\n\n'
        else:
            tail = '}],"usage":null}\n\n' if wishes.has_usage else "}]}\n\n"
        return (
            f'{self._head}{index},{text},"logprobs":{logprobs},"finish_reason":{ending}'
            f"{extra}{tail}"
        )

    def _parted(self, piece: Piece) -> tuple[str, str]:
        """What a piece of a chat adds to the thought, and to what is said."""
        start = self._order.thought
        if start is Thought.NOWHERE:
            return "", piece.text
        reader = self._thoughts.setdefault(piece.answer, ThoughtReader(start))
        was_inside = reader.is_inside
        thought, said = reader.push(piece.text)
        if was_inside or reader.is_inside or thought:
            self._num_thought += len(piece.token_ids)
        if piece.finish_reason is not None:
            rest = reader.flush()
            thought, said = thought + rest[0], said + rest[1]
        return thought, said

    def _with_calls(
        self, piece: Piece, said: str, ending: str
    ) -> tuple[str, list[dict[str, Any]], str]:
        """Text, new calls and finish reason of a piece of an answer that may hold calls."""
        reader = self._readers.setdefault(piece.answer, CallReader())
        first = reader.num_calls
        text, calls = reader.push(said)
        if piece.finish_reason is not None:
            text += reader.flush()
            ending = '"tool_calls"' if reader.num_calls and ending == '"stop"' else ending
        return text, [{"index": first + i, **_call(call)} for i, call in enumerate(calls)], ending

    def usage_chunk(self) -> str:
        """The chunk after the last piece, for who asked for it."""
        head = self._head.removesuffix('{"index":')
        return f'{head}],"usage":{dumps(self.usage())}}}\n\n'

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """A response that is no stream."""
        by_index: dict[int, list[Piece]] = {i: [] for i in range(len(self._order.requests))}
        for piece in pieces:
            by_index[piece.answer].append(piece)
            self._counts[piece.answer] = piece.counts
        body = {
            "id": self._order.id,
            "object": "chat.completion" if self._wishes.is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(i, found) for i, found in by_index.items()],
            "usage": self.usage(),
        }
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()

    def usage(self) -> dict[str, Any]:
        """Tokens of all answers so far, and how many of them drafts brought."""
        total = Counts()
        for counts in self._counts.values():
            total.add(counts)
        num_prompt = self._num_prompt
        found = [self._counts[i].num_cached for i in self._firsts if i in self._counts]
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": total.num_tokens,
            "total_tokens": num_prompt + total.num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(found)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": total.num_accepted,
                "rejected_prediction_tokens": total.num_verified - total.num_accepted,
                "reasoning_tokens": self._num_thought,
            },
            "speculation": {
                "drafted_tokens": total.num_offered,
                "verified_tokens": total.num_verified,
                "accepted_tokens": total.num_accepted,
                "rounds": total.num_rounds,
            },
        }

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        reason = pieces[-1].finish_reason
        assert reason is not None
        choice: dict[str, Any] = {"index": index}
        ending = json.loads(_REASONS[reason])
        if self._wishes.is_chat:
            thoughts, said = zip(*map(self._parted, pieces), strict=True)
            message = {"role": "assistant", "content": "".join(said), "refusal": None}
            if any(thoughts):
                message["reasoning_content"] = "".join(thoughts)
            choice["message"] = message
            if self._wishes.has_tools:
                ending = _move_calls(choice["message"], ending)
        else:
            choice["text"] = "".join(piece.text for piece in pieces)
        choice["logprobs"] = self._joined_logprobs(pieces) if self._wishes.has_logprobs else None
        choice["finish_reason"] = ending
        if self._wishes.has_token_ids:
            choice["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        return choice

    def _joined_logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for part in map(self._logprobs, pieces):
            for key, value in part.items():
                if isinstance(value, list):
                    joined.setdefault(key, []).extend(value)
                else:
                    joined[key] = value
        return joined

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        found = list(zip(piece.token_ids, piece.logprobs or (), strict=True))
        if self._wishes.is_chat:
            return {"content": [self._chat_logprob(*pair) for pair in found], "refusal": None}
        return self._completion_logprobs(piece.answer, found)

    def _chat_logprob(self, token_id: int, item: TokenLogprobs) -> dict[str, Any]:
        return {
            **self._token(token_id, item.chosen),
            "top_logprobs": [self._token(token, value) for token, value in item.top],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id, keep_special=True)
        return {
            "token": data.decode("utf-8", errors="replace"),
            "logprob": logprob,
            "bytes": list(data),
        }

    def _completion_logprobs(
        self, index: int, found: Sequence[tuple[int, TokenLogprobs]]
    ) -> dict[str, Any]:
        texts = [self._text(token) for token, _ in found]
        offsets, at = [], self._offsets.get(index, 0)
        for text in texts:
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        return {
            "tokens": texts,
            "token_logprobs": [item.chosen for _, item in found],
            "top_logprobs": [self._top(item) for _, item in found],
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprobs) -> Mapping[str, float]:
        return {self._text(token): value for token, value in item.top}

    def _text(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id, keep_special=True)
        return data.decode("utf-8", errors="replace")


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": new_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _move_calls(message: dict[str, Any], ending: str) -> str:
    """Take the calls out of a message's text; returns the finish reason."""
    reader = CallReader()
    text, calls = reader.push(message["content"])
    text += reader.flush()
    if not calls:
        return ending
    message["content"] = text or None
    message["tool_calls"] = [_call(call) for call in calls]
    return "tool_calls" if ending == "stop" else ending
