"""The engines' errors, in the shapes in which they send them."""

from __future__ import annotations

import orjson
import pytest

from kvsteward.errors import ContextOverflowError, EngineResponseError, NotFoundError
from kvsteward.wire.errors import engine_error, error_body

VLLM = {
    "error": {
        "message": "This model's maximum context length is 8192 tokens. However, your prompt contains 9000 input tokens.",
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": 400,
    }
}
LLAMA = {
    "error": {"code": 400, "message": "too long", "type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 8}
}
LLAMA_POOL = {"error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}}
OPENAI = {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}


@pytest.mark.parametrize(("status", "body"), [(400, VLLM), (400, LLAMA), (500, LLAMA_POOL), (400, OPENAI)])
def test_an_overflow_is_known_in_every_dialect(status, body):
    error = engine_error(status, orjson.dumps(body))
    assert isinstance(error, ContextOverflowError)
    assert error.message == body["error"]["message"]


def test_sglang_is_flat():
    flat = {"object": "error", "message": "bad sampling", "type": "BadRequestError", "param": "top_p", "code": 400}
    error = engine_error(400, orjson.dumps(flat))
    assert isinstance(error, EngineResponseError)
    body = error_body(error)["error"]
    assert (body["message"], body["param"], body["type"]) == ("bad sampling", "top_p", "BadRequestError")


@pytest.mark.parametrize(
    "raw", [b"", b"Internal Server Error", b"[1]", b'{"error":"plain"}', b'{"detail":"nope"}', b"\xff"]
)
def test_whatever_an_engine_sends_there_is_a_message(raw):
    error = engine_error(500, raw)
    assert error.status == 500
    assert error_body(error)["error"]["message"]


def test_a_status_that_is_no_error_becomes_502():
    assert engine_error(302, b"moved").status == 502


def test_our_shape_is_openais_with_a_hint():
    body = error_body(NotFoundError("no such thing", param="model"), "req-1")["error"]
    assert body["type"] == "not_found_error"
    assert body["code"] == "not_found"
    assert body["param"] == "model"
    assert body["request_id"] == "req-1"
    assert body["hint"]
