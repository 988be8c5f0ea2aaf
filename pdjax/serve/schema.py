"""What bodies and queries of the serving API look like, for its OpenAPI page (GET /openapi.json). docs/api.md says what they mean.

The parsers decide what is taken, and take more (unknown keys are ignored): this describes, and must never be asked.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
ROOM: Schema = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
PORT: Schema = {"type": ["integer", "null"], "minimum": 0, "maximum": 65535}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def one_or_list(of: Schema) -> Schema:
    return {"anyOf": [of, {"type": "array", "items": of}]}


def whole(least: int) -> Schema:
    return {"type": "integer", "minimum": least}


# Of the hand-off: a router fills them in.
BOOTSTRAP = {
    "bootstrap_host": one_or_list(TEXT),
    "bootstrap_port": one_or_list(PORT),
    "bootstrap_room": one_or_list(ROOM),
}
COMMON = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": {"type": "integer"},
    "min_p": NUMBER,
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "stop": one_or_list(TEXT),
    "stop_token_ids": IDS,
    "ignore_eos": FLAG,
    "skip_special_tokens": FLAG,
    "n": whole(1),
    "logit_bias": {"type": "object", "additionalProperties": NUMBER},
}
SAMPLING = {**COMMON, "max_new_tokens": whole(1), "min_new_tokens": whole(0), "json_schema": TEXT}
OPENAI = {
    **COMMON,
    **BOOTSTRAP,
    "model": TEXT,
    "max_tokens": whole(1),
    "seed": {"type": "integer"},
    "stream": FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
}
MESSAGE = {"type": "object", "properties": {"role": TEXT, "content": TEXT}, "required": ["role", "content"]}

BODIES: dict[str, tuple[dict[str, Schema], tuple[str, ...]]] = {
    "/generate": (
        {
            "text": one_or_list(TEXT),
            "input_ids": one_or_list(IDS),
            "sampling_params": one_or_list({"type": "object", "properties": SAMPLING}),
            "stream": FLAG,
            "rid": one_or_list(TEXT),
            "return_logprob": FLAG,
            "logprob_start_len": {"type": "integer"},
            "top_logprobs_num": whole(0),
            **BOOTSTRAP,
        },
        (),
    ),
    "/v1/completions": (
        {
            **OPENAI,
            "prompt": {"anyOf": [one_or_list(TEXT), one_or_list(IDS)]},
            "logprobs": whole(0),
            "echo": FLAG,
        },
        ("prompt",),
    ),
    "/v1/chat/completions": (
        {
            **OPENAI,
            "messages": {"type": "array", "items": MESSAGE, "minItems": 1},
            "max_completion_tokens": whole(1),
            "logprobs": FLAG,
            "top_logprobs": whole(0),
            "response_format": {"type": "object"},
        },
        ("messages",),
    ),
    "/abort_request": ({"rid": TEXT, "abort_all": FLAG}, ()),
    "/pause_generation": ({"mode": {"enum": ["abort", "in_place", "retract"]}}, ()),
}
QUERIES: dict[str, dict[str, Schema]] = {
    "/flush_cache": {"timeout": {"type": "number", "minimum": 0}},
    "/debug/rooms": {"room": ROOM, "limit": whole(0)},
}


def described(path: str) -> dict[str, Any]:
    """``openapi_extra`` of a route."""
    out: dict[str, Any] = {}
    if path in BODIES:
        properties, required = BODIES[path]
        schema: Schema = {"type": "object", "properties": properties}
        if required:
            schema["required"] = list(required)
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if path in QUERIES:
        out["parameters"] = [
            {"name": name, "in": "query", "schema": schema} for name, schema in QUERIES[path].items()
        ]
    return out
