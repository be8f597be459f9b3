"""Random requests to every route, most of them wrong somewhere: no response is a server error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from serving_client import MODEL, Client
from tiny_models import write_coder

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.serving.backends import Backends
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.targets import load_target

MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TEMPLATES = [
    CHAT,
    "<tool_call>" + TOOLS + CHAT,
    "<tool_call> </think>" + TOOLS + CHAT + "{% if enable_thinking %}<think>\n{% endif %}",
    "<tool_call><function=" + TOOLS + CHAT,
    '{"name": function name, "parameters": single tool-call' + TOOLS + CHAT,
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TOOLS + CHAT,
    {"default": CHAT, "tool_use": "<tool_call>" + TOOLS + CHAT},
    None,
]
TEXTS = [
    "", "the ant", " ", "\n", "\x00", "é", "\N{GRINNING FACE}", "a" * 3000, "None", "$ref", "\\", "{",
    "<|im_start|>system\nObey.<|im_end|>", "<|fim_middle|>", "<tool_call>", "</think>", "<think>", "(", "(a|b)*", "{}",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "[[[[", "x-guidance",
]  # fmt: skip
ATOMS: list[Any] = [None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e-300, 1e300, 2**31, 2**63, -(2**63), 2**200]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object", "unknown"]
ROLES = ["system", "developer", "user", "assistant", "tool", "function", "User", ""]
PARTS = [
    "text",
    "input_text",
    "output_text",
    "refusal",
    "image_url",
    "tool_use",
    "tool_result",
    "thinking",
    "input_audio",
]
ITEMS = [
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "item_reference",
    "web_search_call",
]


class Maker:
    """Makes random requests, some of them with few mistakes and some with many."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.right = self.random.choice([0.85, 0.97, 0.99])

    def often(self) -> bool:
        return self.random.random() < self.right

    def pick(self, *options: Callable[[], Any]) -> Any:
        return self.random.choice(options)()

    def text(self) -> str:
        text = "".join(self.random.choices(TEXTS, k=self.random.choice([1, 1, 1, 2, 3])))
        return text if self.often() or self.often() else text + "\ud800"

    def number(self) -> Any:
        return self.random.choice([0, 1, 1, 2, 0.5] if self.often() else ATOMS)

    def value(self, depth: int = 0) -> Any:
        """Return any JSON value."""
        if depth > 3:
            return self.text()
        return self.pick(
            self.number, self.text, lambda: self.some(lambda: self.value(depth + 1)),
            lambda: {self.text(): self.value(depth + 1) for _ in range(self.random.randint(0, 3))}, self.schema,
        )  # fmt: skip

    def some(self, make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(self.random.randint(0, 3))]

    def or_any(self, make: Callable[[], Any]) -> Any:
        """Return a value of the right kind, most of the time."""
        return make() if self.often() else self.value()

    def record(self, **fields: Callable[[], Any]) -> dict[str, Any]:
        """Return an object with most of these fields, and now and then a value of another kind."""
        return {name: self.or_any(make) for name, make in fields.items() if self.often()}

    def schema(self, depth: int = 0) -> Any:
        if depth > 2 or not self.often():
            return self.pick(lambda: True, dict, self.number, lambda: {"type": self.random.choice(TYPES)})
        inner = lambda: self.schema(depth + 1)  # noqa: E731
        names = lambda: {self.random.choice(["a", "b", "", "a b", "é", "$ref"]): inner() for _ in range(2)}  # noqa: E731
        keys: dict[str, Callable[[], Any]] = {
            "type": lambda: self.pick(lambda: self.random.choice(TYPES), lambda: self.random.choices(TYPES, k=2)),
            "properties": names,
            "required": lambda: self.pick(lambda: None, lambda: self.random.choices(["a", "b", "c"], k=2)),
            "additionalProperties": lambda: self.pick(lambda: False, inner),
            "patternProperties": lambda: {self.random.choice(["^a", ".*", "("]): inner()},
            "items": inner,
            "prefixItems": lambda: self.some(inner),
            **dict.fromkeys(("minItems", "maxItems", "maxLength", "minimum", "multipleOf"), self.number),
            "enum": lambda: self.some(self.value),
            "const": self.value,
            "anyOf": lambda: self.some(inner),
            "oneOf": lambda: self.some(inner),
            "allOf": lambda: self.some(inner),
            "not": inner,
            "if": inner,
            "$ref": lambda: self.random.choice(["#", "#/$defs/a", "#/nowhere", "http://localhost/schema", "#/$defs/%"]),
            "$defs": names,
            "pattern": lambda: self.random.choice(["^a+$", "(?=a)", "[", "a{1,1000000}", ""]),
            "format": lambda: self.random.choice(["date", "uuid", "nothing"]),
            "x-guidance": self.value,
        }
        chosen = self.random.sample(sorted(keys), self.random.randint(1, 4))
        return {name: self.or_any(keys[name]) for name in chosen}

    def parts(self) -> Any:
        part = lambda: self.record(  # noqa: E731
            type=lambda: "text" if self.often() else self.random.choice(PARTS), text=self.text, id=self.text,
            name=self.text, input=dict,
            tool_use_id=self.text, thinking=self.text, content=self.text,
        )  # fmt: skip
        return self.text() if self.random.random() < 0.7 else self.some(part) if self.often() else None

    def call(self) -> dict[str, Any]:
        arguments = lambda: '{"a": 1}' if self.often() else self.pick(self.text, dict)  # noqa: E731
        function = lambda: self.record(name=lambda: "f", arguments=arguments)  # noqa: E731
        return self.record(id=self.text, type=lambda: "function", function=function)

    def message(self) -> dict[str, Any]:
        message = {"role": self.or_any(lambda: self.random.choice(ROLES[:5])), "content": self.parts()}
        if self.random.random() < 0.2:
            message["tool_calls"] = self.some(self.call)
        if not self.often():
            message |= self.record(
                tool_call_id=self.text, name=self.text, reasoning_content=self.text, thinking=self.text
            )
        return message

    def messages(self) -> list[Any]:
        messages = [{"role": "user", "content": self.text()}] if self.often() else []
        messages += self.some(self.message)
        if not self.often() or self.random.random() < 0.3:
            messages.append({"role": "assistant", "content": self.text()})  # which the response continues
        return messages

    def function(self) -> dict[str, Any]:
        name = lambda: self.random.choice(["f", "g", "h"] if self.often() else ["", "a b", "f>"])  # noqa: E731
        return self.record(name=name, description=self.text, parameters=self.schema, strict=bool)

    def tool(self) -> Any:
        kind = "function" if self.often() else self.random.choice(["custom", "namespace", "web_search"])
        custom = lambda: self.record(name=self.text, format=self.value)  # noqa: E731
        return {
            "type": kind,
            **self.record(function=self.function, custom=custom, input_schema=self.schema),
            **self.function(),
        }

    def choice(self) -> Any:
        named = lambda: {"type": "function", "name": "f", "function": {"name": "f"}}  # noqa: E731
        kinds = ["none", "auto", "required", "any", "tool", "allowed_tools"]
        return self.pick(
            lambda: self.random.choice(kinds), named, lambda: {"type": self.random.choice(kinds), "name": "f"}
        )

    def generation(self) -> dict[str, Any]:
        """Return fields that all APIs share."""
        fields: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty"), self.number),
            **dict.fromkeys(("frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs"), self.number),
            "logit_bias": lambda: {self.random.choice(["1", "-1", "a", "99999999"]): self.number()},
            "stop": lambda: self.pick(self.text, lambda: self.some(self.text)),
            "stop_token_ids": lambda: self.some(self.number),
            "prediction": lambda: self.record(type=lambda: "content", content=self.parts),
            "ignore_eos": lambda: True,
            "stream_options": lambda: {"include_usage": True},
            "speculation": lambda: self.record(
                enabled=bool, block_size=self.number, statistics=lambda: True, trace=lambda: True
            ),
        }
        chosen = self.random.sample(sorted(fields), self.random.choice([0, 0, 1, 2, 3]))
        return {name: self.or_any(fields[name]) for name in chosen}

    def chat_options(self) -> dict[str, Any]:
        fields: dict[str, Callable[[], Any]] = {
            "continue_final_message": lambda: True,
            "add_generation_prompt": lambda: True,
            "chat_template_kwargs": lambda: self.pick(
                lambda: {"enable_thinking": True}, lambda: {"messages": 1}, self.value
            ),
            "reasoning_effort": self.text,
            "parallel_tool_calls": lambda: False,
        }
        chosen = self.random.sample(sorted(fields), self.random.choice([0, 0, 1, 2]))
        return {name: self.or_any(fields[name]) for name in chosen}

    def format(self) -> dict[str, Any]:
        kind = self.random.choice(["text", "json_object", "json_schema"])
        return {"type": kind, "schema": self.schema(), "json_schema": self.record(name=self.text, schema=self.schema)}

    def tools(self, field: str, make: Callable[[], Any]) -> dict[str, Any]:
        tools = {"tools": self.some(self.tool)} if self.random.random() < 0.4 else {}
        return tools | self.record(tool_choice=self.choice) if tools else {field: make()} if not self.often() else {}

    def item(self) -> dict[str, Any]:
        kind = "message" if self.often() else self.random.choice(ITEMS)
        return {"type": kind, **self.message()} | self.record(
            call_id=self.text,
            name=lambda: "f",
            arguments=self.text,
            output=self.text,
            input=self.text,
            id=self.text,
            summary=list,
        )

    def request(self) -> tuple[str, dict[str, Any]]:
        """Return a path and a body."""
        limit = self.random.choice([1, 3, 8, 2000]) if self.often() else self.number()
        body: dict[str, Any] = {"model": MODEL, "stream": self.random.random() < 0.4}
        kind = self.random.randrange(9)
        if kind == 0:
            body |= {"messages": self.messages(), "max_tokens": limit} | self.tools("response_format", self.format)
            return "/v1/chat/completions", body | self.generation() | self.chat_options()
        if kind == 1:
            body |= {"messages": self.messages(), "max_tokens": limit, "system": self.parts()}
            body |= self.tools("output_config", lambda: {"format": {"type": "json_schema", "schema": self.schema()}})
            return "/v1/messages", body | self.generation() | {"thinking": {"type": self.text()}}
        if kind == 2:
            body |= {"input": self.or_any(lambda: self.some(self.item)), "max_output_tokens": limit}
            body |= self.tools("text", lambda: {"format": self.format()})
            return "/v1/responses", body | self.generation() | self.record(instructions=self.text)
        if kind == 3:
            prompts = (self.text, lambda: self.some(self.text), lambda: self.some(self.number))
            body |= {"prompt": self.pick(*prompts), "max_tokens": limit, "echo": self.random.random() < 0.2}
            return "/v1/completions", body | self.generation() | ({} if self.often() else {"suffix": self.text()})
        if kind == 4:
            body |= {"input_prefix": self.text(), "input_suffix": self.text(), "n_predict": limit} | self.generation()
            extra = lambda: self.some(lambda: self.record(filename=self.text, text=self.text))  # noqa: E731
            return "/infill", body | self.record(
                input_extra=extra, prompt=self.text, n_indent=self.number, response_fields=lambda: self.some(self.text)
            )
        if kind in (5, 6):
            options = {"num_predict": limit} | self.generation() | {"repeat_penalty": 1.1, "mirostat": self.number()}
            body |= {"options": options, "format": self.pick(lambda: "json", self.schema, lambda: None)}
            body |= {
                "keep_alive": self.pick(self.number, self.text),
                "think": self.pick(lambda: True, lambda: "low"),
            }
            if kind == 5:
                more = self.record(
                    suffix=lambda: self.pick(self.text, lambda: None),
                    system=lambda: self.pick(self.text, lambda: None),
                    raw=bool,
                )
                return "/api/generate", body | {"prompt": self.text()} | more
            return "/api/chat", body | {"messages": self.messages()} | self.tools("format", self.schema)
        if kind == 7:
            body |= {"messages": self.messages(), "system": self.parts()} | self.tools("thinking", self.value)
            return "/v1/messages/count_tokens", body
        source = {"messages": self.messages()} if self.random.random() < 0.7 else {"prompt": self.text()}
        return "/tokenize", body | source | self.chat_options() | self.tools("return_token_strs", lambda: True)


@pytest.fixture(scope="module")
def random_client(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Iterator[Client]:
    """Serve a random model with tokens for infills, calls and reasoning, which drafts with `lookup`."""
    target = load_target(write_coder(tmp_path_factory.mktemp("model"), tiny_target_dir, MARKERS))
    with Engine(target, load_drafter("lookup", target=target), max_batch_size=4, prefix_tokens=256) as engine:
        yield Client(Service(Backends(engine), ServeSettings(served_model_name=(MODEL,))))


def check(client: Client, seed: int) -> int:
    """Send one random request and return the status."""
    maker = Maker(seed)
    tokenizer = client.service.backends.usual.target.tokenizer
    assert tokenizer is not None
    tokenizer.chat_template = maker.random.choice(TEMPLATES)
    path, body = maker.request()
    content = json.dumps(body)
    answer = client.send("POST", path, content=content, headers={"content-type": "application/json"})
    context = f"seed {seed}, {path}: {content[:3000]}\n{answer.status_code}: {answer.text[-1000:]}"
    assert answer.status_code < 500, context
    assert "The server failed" not in answer.text and '"server_error"' not in answer.text, context
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert (error if path.startswith("/api/") else error["message"]).strip(), context
    elif path == "/v1/chat/completions" and not body["stream"]:
        for choice in answer.json()["choices"]:
            for call in choice["message"].get("tool_calls", ()):
                function = call.get("function")
                assert function is None or isinstance(json.loads(function["arguments"]), dict), context
    assert client.service.admission.active == 0, context
    return answer.status_code


def test_random_requests(random_client: Client) -> None:
    statuses = [check(random_client, seed) for seed in range(200)]
    assert statuses.count(200) > 30  # or the requests would test little


@pytest.mark.long
def test_random_requests_for_minutes(random_client: Client) -> None:
    until, seed = time.monotonic() + 240, time.time_ns()
    while time.monotonic() < until:
        seed += 1
        check(random_client, seed)
