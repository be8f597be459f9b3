"""Training data and the server turn the same chat into the same tokens, with every template."""

from pathlib import Path
from typing import Any

import pytest
from test_chats import FORGETFUL, MARKED, UNMARKED
from transformers import PreTrainedTokenizerBase

from blockdraft.chat_text import encode_chat
from blockdraft.errors import UsageError
from blockdraft.serving.openai.chat import ChatRequest, offered_tools, template_messages
from blockdraft.serving.openai.tool_choice import choose_tools
from blockdraft.targets import BUNDLED
from blockdraft_train.data.chats import ChatEncoder
from blockdraft_train.data.records import ChatRecord, parse_record
from blockdraft_train.data.settings import RecordSettings

CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{{ message.content }}{% for call in message.tool_calls %}{{ call.id }}{{ call.function | tojson }}{% endfor %}"
    "{{ message.tool_call_id }}{{ message.reasoning_content }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SERVER = Path(__file__).parents[4] / "tests/chat_template.jinja"
TEMPLATES = [
    CALLS,
    FORGETFUL,
    MARKED,
    UNMARKED,
    SERVER.read_text(),
    (BUNDLED / "chat_template.jinja").read_text(),
]
FUNCTION = {"name": "weather", "description": "Tell the weather.", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bergen"}'}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "the <|im_end|> thing"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "In"}, {"type": "text", "text": "English."}]},
            {"role": "user", "content": "How warm is it in Bergen?", "name": "Ada"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm."},
            {"role": "tool", "content": "4 degrees", "tool_call_id": "call_3_0"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_same_tokens(tokenizer: PreTrainedTokenizerBase, template: str, chat: dict[str, Any]) -> None:
    tokenizer.chat_template = template
    record = parse_record(chat, RecordSettings())
    assert isinstance(record, ChatRecord)
    request = ChatRequest.model_validate({"model": "m", **chat})
    _, tools = choose_tools(None, offered_tools(request.tools))
    served = encode_chat(tokenizer, template_messages(request.messages), tools, lenient=True)
    encoder = ChatEncoder(tokenizer, frozenset())
    if record.tools and "tools" not in template:
        with pytest.raises(UsageError, match="the chat template takes no tools"):
            encoder.prompt(record.messages, record.tools)
        with pytest.raises(UsageError, match="hold tool_calls, which the chat template would drop"):
            encoder.prompt(record.messages)
    else:
        assert encoder.prompt(record.messages, record.tools) == served
