"""Requests of real clients that users of other servers have reported, sent to this one.

`tests/test_public_reports.py` holds the reports that need no server.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from scripted import ScriptedService, finished
from serving_client import MODEL, Client
from thinned import LONG, thinned

from blockdraft.engine import Engine
from blockdraft.serving import anthropic, infill, ollama, schemas, streaming
from blockdraft.serving.openai import chat, completions, responses, utilities
from blockdraft.serving.request import TextDelta, ToolChoice
from blockdraft.types import SamplingParams

USER = {"role": "user", "content": "the ant"}
JSON = {"Content-Type": "application/json"}
HERMES = (
    "{% if tools %}In <tool_call>: {{ tools[0].function.name }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXTS = {  # by route: the body, and where its output format stands
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "the ant"},
    "/v1/messages": {"messages": [USER]},
    "/api/chat": {"messages": [USER]},
    "/api/generate": {"prompt": "the ant"},
}


def formatted(path: str, schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """Return the field of an API that holds the schema of the output."""
    more = {} if strict is None else {"strict": strict}
    if path.startswith("/api/"):
        return {"format": schema}
    if path == "/v1/messages":
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    if path == "/v1/responses":
        return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema, **more}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def limits(path: str, tokens: int) -> dict[str, Any]:
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    if path.startswith("/api/"):
        return {"options": {"num_predict": tokens, "temperature": 0}}
    return {name: tokens, "temperature": 0}


def ask(client: Client, path: str, *, tokens: int = 400, **fields: Any) -> Any:
    return client.post(path, {"model": MODEL, "stream": False, **TEXTS[path], **limits(path, tokens), **fields})


def output(path: str, answer: Any) -> str:
    """Return the text of a whole response."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if path == "/v1/responses":
        return str(body["output"][-1]["content"][0]["text"])
    if path == "/v1/messages":
        return str(body["content"][0]["text"])
    if path == "/api/generate":
        return str(body["response"])
    return str((body.get("message") or body["choices"][0]["message"])["content"])


# ---- Lines of streams


@pytest.mark.parametrize("path", [*TEXTS, "/v1/completions", "/infill"])
def test_lines_of_streams_end_where_any_client_ends_them(engine: Engine, path: str) -> None:
    """Clients that use httpx's `iter_lines` split lines as Python's `str.splitlines` does."""
    text = "a\u2028b\u2029c\x85d"
    client = ScriptedService(engine, [TextDelta(text), finished()]).client()
    body = {**TEXTS.get(path, {"prompt": "x", "input_prefix": "x", "input_suffix": "y"}), **limits(path, 9)}
    if path == "/infill":
        del body["max_tokens"]
    answer = client.post(path, json={"model": MODEL, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line and not line.startswith((":", "event:"))]
    values = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    assert text in json.dumps(values, ensure_ascii=False).encode().decode("unicode_escape", "ignore") or any(
        text in str(leaf) for value in values for leaf in _leaves(value)
    )


def _leaves(value: Any) -> Iterator[Any]:
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _leaves(inner) if isinstance(inner, dict | list) else [inner]


def test_all_streams_are_framed_by_one_function() -> None:
    text = "\x85\u2028\u2029"
    line = streaming.json_line({"a": text})
    assert json.loads(line) == {"a": text} and len(line.splitlines()) == 1
    assert len(streaming.data({"a": text}).splitlines()) == 2


# ---- Schemas of the output and of tools

NAMES = ["$ref", "properties", "type", "required", "$defs", "enum", "items", "allOf", "const", "$id"]


# All routes compile schemas in one place: each name and each route occurs, and the other combinations are long.
@pytest.mark.parametrize(("name", "path"), thinned(NAMES, TEXTS, keep=5, marks=LONG))
def test_properties_may_have_the_names_of_keywords(shared_client: Client, name: str, path: str) -> None:
    inner = {"type": "object", "properties": {name: {"enum": [7]}, "a": {"enum": [1]}}, "required": [name, "a"]}
    schema = {"type": "object", "properties": {"o": inner}, "required": ["o"]}
    text = output(path, ask(shared_client, path, **formatted(path, schema)))
    assert json.loads(text) == {"o": {name: 7, "a": 1}}


@pytest.mark.parametrize("path", TEXTS)
def test_required_names_without_a_schema_allow_any_value(shared_client: Client, path: str) -> None:
    inner = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a", "b"]}
    for schema in (inner, {"type": "object", "properties": {"o": inner}, "required": ["o"]}):
        text = output(path, ask(shared_client, path, tokens=120, **formatted(path, schema)))
        assert re.match(r'\{\s*("o"\s*:\s*\{\s*)?"a"\s*:\s*1\s*,\s*"b"\s*:', text), text


D = {"type": "object", "properties": {"x": {"enum": [7]}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("#/definitions/Box%3Cint%3E", {"definitions": {"Box<int>": D}}),
        ("#/definitions/Box<int>", {"definitions": {"Box<int>": D}}),
        ("#/$defs/my type", {"$defs": {"my type": D}}),
        ("#/$defs/a~1b", {"$defs": {"a/b": D}}),
        ("#/$defs/gr%C3%B6%C3%9Fe", {"$defs": {"größe": D}}),
        ("#/properties/w/anyOf/0", {}),
        ("#box", {"$defs": {"a": {"$anchor": "box", **D}}}),
        ("box.json", {"$defs": {"a": {"$id": "box.json", **D}}}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_references_in_every_spelling(shared_client: Client, path: str, reference: str, more: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"w": {"anyOf": [D]}, "v": {"$ref": reference}}, "required": ["v"]}
    text = output(path, ask(shared_client, path, **formatted(path, schema | more)))
    assert json.loads(text)["v"] == {"x": 7}


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/n", "$defs": {"n": {"allOf": [{"$ref": "#/$defs/n"}]}}},
        {"type": "object", "properties": {"v": {"$ref": "#"}}, "required": ["v"]},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    ],
)
def test_an_endless_reference_is_refused_at_once(shared_client: Client, path: str, schema: Any) -> None:
    answer = ask(shared_client, path, **formatted(path, schema))
    assert answer.status_code == 400 and '\\"$ref\\"' in answer.text and "never ends" in answer.text, answer.text


@pytest.mark.parametrize("path", TEXTS)
def test_true_is_any_json_and_false_is_refused_as_it_is(shared_client: Client, path: str) -> None:
    if not path.startswith("/api/"):  # where a format is an object
        text = output(path, ask(shared_client, path, tokens=3, **formatted(path, True)))
        assert re.match(r'[\s\[{"\d\-tfn]', text)
        answer = ask(shared_client, path, **formatted(path, False))
        assert answer.status_code == 400 and "false allows no value" in answer.text
    text = output(path, ask(shared_client, path, tokens=3, **formatted(path, {})))
    assert re.match(r'[\s\[{"\d\-tfn]', text)


LOOK_AROUND = r"^(?!\.)[a-z]+$"


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize(
    ("part", "keyword"),
    [
        ({"type": "string", "pattern": LOOK_AROUND, "maxLength": 3}, "pattern"),
        ({"type": "array", "items": {"enum": [1]}, "maxItems": 2, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "patternProperties": {LOOK_AROUND: {}}, "maxProperties": 0}, "patternProperties"),
        ({"$ref": "https://example.com/x.json", "enum": [1]}, "$ref"),
        ({"not": {"$id": "n", "enum": [2]}, "$ref": "n"}, "not"),
    ],
)
def test_only_a_strict_format_refuses_what_no_grammar_expresses(
    shared_client: Client, caplog: pytest.LogCaptureFixture, path: str, part: Any, keyword: str
) -> None:
    schema = {"type": "object", "properties": {"a": part, "b": {"enum": [1]}}, "required": ["b"]}
    if path == "/v1/messages":  # Anthropic's formats are always strict
        answer = ask(shared_client, path, **formatted(path, schema))
        assert answer.status_code == 400 and keyword in answer.text
        return
    with caplog.at_level(logging.WARNING):
        answer = ask(shared_client, path, tokens=30, **formatted(path, schema))
    assert output(path, answer).lstrip().startswith("{")
    assert keyword in answer.json()["warnings"][0] and keyword in caplog.text
    if path.startswith("/v1/"):
        answer = ask(shared_client, path, **formatted(path, schema, strict=True))
        assert answer.status_code == 400 and keyword in answer.text


def test_the_first_event_of_a_stream_has_the_warnings(shared_client: Client) -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "maxItems": 1, "uniqueItems": True}
    for path in ("/v1/chat/completions", "/v1/responses", "/api/chat"):
        answer = ask(shared_client, path, **formatted(path, schema), stream=True)
        lines = [line for line in answer.text.split("\n") if "{" in line]
        assert ["warnings" in json.loads(line.removeprefix("data: ")) for line in lines] == [True] + [False] * (
            len(lines) - 1
        )


FORMAT_PLACES = {path: next(iter(formatted(path, {}))) for path in TEXTS}


@pytest.mark.parametrize("path", [*TEXTS, "/v1/completions", "/infill"])
@pytest.mark.parametrize("other", TEXTS)
def test_a_schema_where_another_api_has_it_is_refused(shared_client: Client, path: str, other: str) -> None:
    """It would be ignored, and the client would get prose."""
    [(name, value)] = formatted(other, {"type": "object"}).items()
    if name == FORMAT_PLACES.get(path):
        return
    body = {"model": MODEL, **TEXTS.get(path, {"prompt": "x", "input_prefix": "x", "input_suffix": "y"}), name: value}
    answer = shared_client.post(path, body)
    assert answer.status_code == 400 and f"{name} is not supported by this server" in answer.text, answer.text
    if path in FORMAT_PLACES:
        assert f"use {FORMAT_PLACES[path]}" in answer.text
    for neutral in ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}, {"format": ""}):
        if name in neutral and path.startswith("/v1/"):
            assert ask(shared_client, path, tokens=2, **neutral).status_code == 200 if path in TEXTS else True


@pytest.mark.parametrize("path", TEXTS)
def test_schemas_in_a_wrapper_are_refused(shared_client: Client, path: str) -> None:
    for wrapped in ({"schema": {"type": "object"}}, {"name": "x", "json_schema": {"type": "object"}}):
        answer = ask(shared_client, path, **formatted(path, wrapped))
        assert answer.status_code == 400 and "holds a schema inside of" in answer.text, answer.text
    named = {"type": "object", "properties": {"schema": {"enum": [1]}}, "required": ["schema"]}
    assert json.loads(output(path, ask(shared_client, path, **formatted(path, named)))) == {"schema": 1}


@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_a_schema_beside_another_type_of_format(shared_client: Client, kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    for path, form in (
        ("/v1/responses", {"text": {"format": {"type": kind, "schema": schema}}}),
        ("/v1/chat/completions", {"response_format": {"type": kind, "schema": schema}}),
        ("/v1/chat/completions", {"response_format": {"type": kind, "json_schema": {"name": "x", "schema": schema}}}),
    ):
        answer = ask(shared_client, path, **form)
        if kind == "text":
            assert answer.status_code == 400 and "text with a schema" in answer.text
        else:
            assert json.loads(output(path, answer)) == {"a": 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/api/chat"])
@pytest.mark.parametrize("name", ["input_schema", "inputSchema"])
def test_parameters_where_another_api_has_them_are_refused(shared_client: Client, path: str, name: str) -> None:
    function = {"name": "f", name: {"type": "object", "properties": {"a": {}}}}
    tool = {"type": "function", **(function if path == "/v1/responses" else {"function": function})}
    answer = ask(shared_client, path, tools=[tool])
    assert answer.status_code == 400 and name in answer.text and "use parameters" in answer.text


@pytest.mark.parametrize(
    ("path", "more"),
    [("/api/generate", {"messages": [USER]}), ("/api/generate", {"tools": [{"type": "function"}]})]
    + [("/api/generate", {"context": [1, 2]})]
    + [("/api/chat", {"prompt": "x"}), ("/api/chat", {"system": "x"}), ("/api/chat", {"functions": [{}]})],
)
def test_fields_of_ollamas_other_route_are_refused(shared_client: Client, path: str, more: dict[str, Any]) -> None:
    answer = ask(shared_client, path, **more)
    assert answer.status_code == 400 and "is not supported by this server; use" in answer.text, answer.text


def test_errors_speak_of_objects(shared_client: Client) -> None:
    answer = ask(shared_client, "/v1/chat/completions", chat_template_kwargs=[1])
    assert answer.status_code == 400 and "chat_template_kwargs must be an object, got [1]" in answer.text


def tools_of(path: str, *functions: dict[str, Any]) -> dict[str, Any]:
    """Return function tools, and a choice that requires a call, in the form of an API."""
    if path == "/v1/messages":
        tools: list[Any] = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in functions]
        return {"tools": tools, "tool_choice": {"type": "any"}}
    if path == "/v1/responses":
        return {"tools": [{"type": "function", **tool} for tool in functions], "tool_choice": "required"}
    return {"tools": [{"type": "function", "function": tool} for tool in functions], "tool_choice": "required"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("template", [HERMES, HERMES.replace("<tool_call>", "<tool_call><function=")])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "pattern": LOOK_AROUND, "maxLength": 3},
        {"$ref": "https://example.com/schema.json"},
        {"type": "object", "patternProperties": {"(?=a)": {}}, "maxProperties": 0},
        {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x", "y"]},
    ],
)
def test_a_tool_that_no_grammar_expresses_blocks_no_call(
    client: Client, set_template: Callable[[str], None], path: str, template: str, part: Any
) -> None:
    set_template(template)
    odd = {"name": "mail", "parameters": {"type": "object", "properties": {"to": part}, "required": ["to"]}}
    now = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    answer = ask(client, path, tokens=4, **tools_of(path, odd, now))
    assert answer.status_code == 200, answer.text
    expected = not isinstance(part.get("properties"), dict)
    assert ("warnings" in answer.json()) is expected
    if expected:
        assert "parameters of mail" in answer.json()["warnings"][0]


# ---- Choices of tools

F, G = ({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg")


@pytest.mark.parametrize(
    ("given", "choice", "names"),
    [
        ({"type": "function", "function": {"name": "g"}}, ToolChoice("required", "g"), "fg"),
        ({"type": "function", "name": "g"}, ToolChoice("required", "g"), "fg"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [G]}}, ToolChoice("required"), "g"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]},
            ToolChoice("required"),
            "g",
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [F, G]}}, ToolChoice(), "fg"),
    ],
)
def test_both_forms_of_tool_choices_in_both_apis(given: Any, choice: ToolChoice, names: str) -> None:
    body: Any = chat.ChatRequest.model_validate({"messages": [USER], "tools": [F, G], "tool_choice": given})
    prompt: Any = body.to_request(0.0).prompt
    assert (prompt.tool_choice, "".join(tool["function"]["name"] for tool in prompt.tools)) == (choice, names)
    flat = [{"type": "function", **tool["function"]} for tool in (F, G)]
    body = responses.ResponsesRequest.model_validate({"input": "x", "tools": flat, "tool_choice": given})
    prompt = body.to_request([USER], 0.0).prompt
    assert (prompt.tool_choice, "".join(tool["function"]["name"] for tool in prompt.tools)) == (choice, names)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_choice_without_a_name_is_named(client: Client, set_template: Callable[[str], None], path: str) -> None:
    set_template(HERMES)
    kind = "tool" if path == "/v1/messages" else "function"
    fields = tools_of(path, F["function"]) | {"tool_choice": {"type": kind}}
    answer = ask(client, path, **fields)
    assert answer.status_code == 400 and "tool_choice" in answer.text and "is missing" in answer.text, answer.text


PATCH = {"type": "custom", "custom": {"name": "p"}}
UNCLEAR = [
    (
        {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "function", "name": "h"}]}},
        "'h'; the tools are f",
    ),
    ({"type": "allowed_tools"}, "tools is missing or empty"),
    ({"type": "allowed_tools", "mode": "required", "tools": []}, "tools is missing or empty"),
    ({"type": "allowed_tools", "allowed_tools": {}}, "tools is missing or empty"),
    ({"type": "allowed_tools", "tools": [{"type": "function"}]}, "allows ''; the tools are f"),
    ({"type": "allowed_tools", "tools": [{"type": "custom", "name": "f"}]}, "'f' as a custom tool; its type is 'func"),
    ({"type": "custom", "custom": {"name": "f"}}, "names 'f' as a custom tool; its type is 'function'"),
    ({"type": "custom", "name": "f"}, "names 'f' as a custom tool; its type is 'function'"),
    ({"type": "function", "function": {"name": "p"}}, "names 'p' as a function tool; its type is 'custom'"),
]


@pytest.mark.parametrize(("choice", "message"), UNCLEAR)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/api/chat"])
def test_unclear_choices_are_refused(shared_client: Client, path: str, choice: Any, message: str) -> None:
    tools = [F, G, PATCH]
    if path == "/v1/responses":
        tools = [{"type": tool["type"], **tool[str(tool["type"])]} for tool in tools]  # type: ignore[dict-item]
    answer = ask(shared_client, path, tools=tools, tool_choice=choice)
    assert answer.status_code == 400 and message in answer.json()["error"]["message" if path[1] == "v" else slice(None)]


def test_tools_have_the_body_of_their_type(shared_client: Client) -> None:
    for path in ("/v1/chat/completions", "/api/chat"):
        for tool in (PATCH | {"type": "function"}, F | {"type": "custom"}):
            answer = ask(shared_client, path, tools=[tool])
            assert answer.status_code == 400 and f"{tool['type']} tool without {tool['type']}" in answer.text


def test_a_call_may_be_required_in_ollamas_api(client: Client, set_template: Callable[[str], None]) -> None:
    set_template(HERMES)
    for choice in ("required", {"type": "function", "function": {"name": "g"}}):
        answer = ask(client, "/api/chat", tools=[G], tool_choice=choice).json()
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "g"


# ---- Bodies

BODY = json.dumps({"model": MODEL, "prompt": "the ant", "max_tokens": 2, "options": {"num_predict": 2}}).encode()


def deflated(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
@pytest.mark.parametrize(
    ("encoding", "encode"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", deflated), ("identity", bytes)]
    + [("deflate, gzip", lambda data: gzip.compress(zlib.compress(data)))],
)
def test_compressed_bodies(shared_client: Client, path: str, encoding: str, encode: Callable[[bytes], bytes]) -> None:
    for body in (BODY, b"\xef\xbb\xbf" + BODY):
        headers = JSON | {"Content-Encoding": encoding}
        assert shared_client.send("POST", path, content=encode(body), headers=headers).status_code == 200


@pytest.mark.parametrize(("encoding", "status"), [("compress", 415), ("gzip", 400), ("deflate", 400)])
def test_bodies_that_cannot_be_decoded(shared_client: Client, encoding: str, status: int) -> None:
    answer = shared_client.send("POST", "/v1/completions", content=BODY, headers=JSON | {"Content-Encoding": encoding})
    assert answer.status_code == status and encoding in answer.json()["error"]["message"]
    cut = gzip.compress(BODY)[:-9]
    answer = shared_client.send("POST", "/v1/completions", content=cut, headers=JSON | {"Content-Encoding": "gzip"})
    assert answer.status_code == 400 and "truncated" in answer.text


def test_a_compression_bomb_is_too_large(make_client: Callable[..., Client]) -> None:
    client = make_client(max_body=10_000)
    for encoding, encode in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        bomb = encode(b" " * 50_000_000 + BODY)
        bomb = encode(bomb) if len(bomb) > 9000 else bomb
        headers = JSON | {"Content-Encoding": f"{encoding}, {encoding}"}
        answer = client.send("POST", "/v1/completions", content=bomb, headers=headers)
        assert answer.status_code == 413 and "--max-body" in answer.json()["error"]["message"]
    assert client.send("POST", "/v1/completions", content=BODY, headers=JSON).status_code == 200


@pytest.mark.parametrize(("encoding", "library"), [("zstd", "zstandard"), ("zstd", "backports.zstd"), ("br", "brotli")])
def test_encodings_of_other_libraries(make_client: Callable[..., Client], encoding: str, library: str) -> None:
    module, client = pytest.importorskip(library), make_client(max_body=10_000)
    headers = JSON | {"Content-Encoding": encoding}
    for body, status in ((BODY, 200), (b" " * 1_000_000, 413)):
        answer = client.send("POST", "/v1/completions", content=module.compress(body), headers=headers)
        assert answer.status_code == status
    cut = module.compress(BODY)[:-3]
    assert client.send("POST", "/v1/completions", content=cut, headers=headers).status_code == 400


def models(module: Any) -> Iterator[type[BaseModel]]:
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, schemas.Schema):
            yield kind


MODULES = [anthropic, infill, ollama, schemas, chat, completions, responses, utilities]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_whole_numbers_may_be_written_with_a_point(module: Any) -> None:
    for kind in models(module):
        for name, field in kind.model_fields.items():
            whole = int in (field.annotation, *get_args(field.annotation)) or "Int" in str(field.annotation)
            if whole and float not in get_args(field.annotation):
                try:
                    kind.__pydantic_validator__.validate_assignment(kind.model_construct(), name, 4.0)
                except ValueError as error:
                    assert "frozen" in str(error), (kind, name, error)  # raised behind the check of the value


def test_whole_numbers_with_a_point_are_the_same_request(shared_client: Client, engine: Engine) -> None:
    expected = engine.generate(["the ant"], SamplingParams(4, temperature=1.0, seed=3, top_k=5))[0].text
    fields = {"temperature": 1, "seed": 3.0, "top_k": 5.0, "n": 1.0}
    assert shared_client.chat(max_tokens=4.0, **fields)["choices"][0]["message"]["content"] == expected
    body = {"model": MODEL, "stream": False, "prompt": "the ant"}
    options = {"num_predict": 4.0, "temperature": 1, "seed": 3.0, "top_k": 5.0}
    assert shared_client.post("/api/generate", body | {"options": options}).json()["response"] == expected
    for field in ("max_tokens", "seed"):
        answer = shared_client.post("/v1/completions", {"model": MODEL, "prompt": "x", field: 4.5})
        assert answer.status_code == 400 and "whole number" in answer.text
    assert shared_client.post("/detokenize", {"tokens": [5.0, 6]}).status_code == 200


# ---- Earlier calls that were cut

CUT = '{"path": "a.txt", "text": "Lorem'
WITH_OBJECT = HERMES.replace("call.function.arguments | tojson", "call.function.arguments | items | list | tojson")


def history(path: str) -> dict[str, Any]:
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "c", "name": "write", "arguments": CUT}
        return {"input": [USER, call, {"type": "function_call_output", "call_id": "c", "output": "error"}, USER]}
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": "c", "name": "write", "input": CUT}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "error"}
        return {"messages": [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]}
    function = {"name": "write", "arguments": CUT}
    call = {"id": "c", "type": "function", "function": function}
    result = {"role": "tool", "content": "error"} | ({} if path == "/api/chat" else {"tool_call_id": "c"})
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result, USER]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_a_cut_call_does_not_end_the_conversation(
    client: Client, set_template: Callable[[str], None], caplog: pytest.LogCaptureFixture, path: str
) -> None:
    for template in (HERMES, WITH_OBJECT):
        set_template(template)
        answer = ask(client, path, tokens=2, **history(path))
        assert answer.status_code == 200, answer.text
        assert "an earlier call of write" in answer.json()["warnings"][0] and "write" in caplog.text


WITHOUT_CALLS = HERMES.replace("{% for call in message.tool_calls %}", "{% for call in [] %}")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_calls_that_a_template_drops_are_reported(
    client: Client, set_template: Callable[[str], None], path: str
) -> None:
    for template in (WITHOUT_CALLS, HERMES):
        set_template(template)
        answer = ask(client, path, tokens=2, **history(path)).json()
        dropped = [warning for warning in answer["warnings"] if "the model does not see earlier tool calls" in warning]
        assert len(dropped) == (template == WITHOUT_CALLS)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
@pytest.mark.parametrize("name", ["parameters", "input", "args"])
def test_arguments_of_another_name_are_refused(shared_client: Client, path: str, name: str) -> None:
    """They would be ignored, and the model would read a call without arguments."""
    call = {"type": "function", "function": {"name": "f", name: {"a": 1}}}
    answer = ask(shared_client, path, messages=[USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER])
    assert answer.status_code == 400 and f"{name} is not supported by this server; use arguments" in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/messages",
            {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "args": {"a": 1}}]}]},
        ),
        ("/v1/messages", {"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "input": "{}"}]}),
        ("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]}),
    ],
)
def test_calls_in_the_form_of_another_api_are_refused(shared_client: Client, path: str, body: dict[str, Any]) -> None:
    answer = ask(shared_client, path, **body)
    assert answer.status_code == 400 and re.search("; use|needs call_id, name and arguments", answer.text), answer.text


def test_cut_arguments_are_text_where_the_template_allows_it(
    client: Client, set_template: Callable[[str], None]
) -> None:
    shown = {}
    for template in (HERMES, WITH_OBJECT):
        set_template(template)
        answer = client.post("/tokenize", {"model": MODEL, **history("/v1/chat/completions")})
        assert answer.status_code == 200, answer.text
        shown[template] = client.post("/detokenize", {"model": MODEL, "tokens": answer.json()["tokens"]}).json()
    assert "Lorem" in shown[HERMES]["prompt"] and "Lorem" not in shown[WITH_OBJECT]["prompt"]
    assert "[]" in shown[WITH_OBJECT]["prompt"]
