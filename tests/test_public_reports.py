"""Faults that users of other projects have reported, tried on this one. Tests name the reports.

More of them are tested where their code is: requests in `serving/test_reported_requests.py`, byte order marks and
pointers of Git LFS in `test_text_files.py`, texts in TOML in `test_settings.py`, damaged GGUF files in
`targets/test_gguf.py`, orders of draft vocabularies in `drafters/eagle3` and `formats/test_speculators.py`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from blockdraft.chat_text import encode_chat
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target, load_target_text
from blockdraft.types import Grammar, SamplingParams
from blockdraft_train.data.chats import ChatEncoder
from blockdraft_train.data.records import ChatRecord, parse_record, read_records
from blockdraft_train.data.settings import RecordSettings

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Why not."}]
END = frozenset({2})  # <|im_end|>


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


@pytest.fixture
def tokenizer(tiny_target_dir: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_target_text(tiny_target_dir).tokenizer
    assert tokenizer is not None
    return tokenizer


def learned(tokenizer: PreTrainedTokenizerBase, template: str, chat: list[dict[str, str]]) -> str:
    """Text of the tokens that training data supervise."""
    tokenizer.chat_template = template
    ids, mask = ChatEncoder(tokenizer, END).chat(chat)
    return str(tokenizer.decode([token for token, inside in zip(ids, mask, strict=True) if inside]))


def test_the_text_of_a_stop_token_is_not_shown(target: Target) -> None:
    """vllm-project/vllm#2538 and #3150: neither shown, nor is text before it lost, if the token is not special."""
    assert target.tokenizer is not None
    letters = [target.tokenizer(letter)["input_ids"][-1] for letter in "ab"]
    end, first = letters[1], SamplingParams(max_new_tokens=1, logit_bias={letters[0]: 100.0}, ignore_eos=True)
    with Engine(target, load_drafter("none", target=target)) as engine:
        [begin] = engine.generate(["Hi"], first)
        assert begin.text == "a"
        params = SamplingParams(max_new_tokens=5, stop_token_ids=(end,), logit_bias={end: 100.0})
        [completion] = engine.generate(["Hi"], params)
        assert (completion.text, completion.finish_reason, completion.token_ids) == ("", "stop", [end])
        chunks = list(engine.stream("Hi", params))
        assert "".join(chunk.text for chunk in chunks) == ""


@pytest.mark.parametrize(
    ("generation", "config", "ends"), [([4, 5], 4, {2, 4, 5}), (None, [6, 7], {2, 6, 7}), (5, None, {2, 5})]
)
def test_ends_of_all_files_end(
    tmp_path: Path, tiny_target_dir: Path, generation: Any, config: Any, ends: set[int]
) -> None:
    """Blaizzy/mlx-vlm#2112, QwenLM/Qwen3#927, NVIDIA/TensorRT-Model-Connect#640: one file does not replace another."""
    shutil.copytree(tiny_target_dir, tmp_path / "target")
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        file = tmp_path / "target" / name
        raw = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(raw | {"eos_token_id": value}))
    assert load_target_text(tmp_path / "target").eos_token_ids == ends


def test_one_token_begins_a_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """sgl-project/sglang#888, deepseek-ai/DeepSeek-R1#151: the template's token is not doubled by the tokenizer's."""
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    template = "{{ bos_token }}" + CHATML
    for ids in (
        encode_chat(tokenizer, CHAT, chat_template=template),
        ChatEncoder(tokenizer, END).prompt([*CHAT, CHAT[0]])
        if not setattr(tokenizer, "chat_template", template)
        else [],
    ):
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "größer als <b> \U0001f600"}'),
        ("{{ messages | tojson(indent=1) }}", "größer als <b> \U0001f600"),
        ("{{ strftime_now('%Y') }}", "20"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}ok", "ok"),
    ],
)
def test_functions_of_chat_templates(tokenizer: PreTrainedTokenizerBase, template: str, text: str) -> None:
    """huggingface/transformers#31100, oobabooga/textgen#6675, abetlen/llama-cpp-python#1486."""
    chat = [{"role": "user", "content": "größer als <b> \U0001f600"}]
    assert text in str(tokenizer.decode(encode_chat(tokenizer, chat, chat_template=template)))


@pytest.mark.parametrize("template", ["{{ nothing | tojson }}", "{{ nothing.more }}", "{{ 1 / 0 }}", "{% if %}"])
def test_any_failure_of_a_template_is_named(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """sgl-project/sglang#20700: a TypeError of a filter was an internal error."""
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match="refused by the chat template"):
        ChatEncoder(tokenizer, END).prompt(CHAT[:1])


def test_a_marked_response_ends_where_it_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """huggingface/transformers#47325: a response of the first token alone must not mark all that follows."""
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        "{% endgeneration %}{% else %}{{ '<|im_start|>' + message.content }}{% endif %}{% endfor %}"
    )
    chat = [{"role": "assistant", "content": "A"}, CHAT[0], {"role": "assistant", "content": " "}, CHAT[0]]
    assert learned(tokenizer, template, chat) == "A "


def test_templates_without_marks(tokenizer: PreTrainedTokenizerBase) -> None:
    """marin-community/marin#7237, huggingface/transformers#34172: their responses are learned all the same."""
    assert learned(tokenizer, CHATML, CHAT) == "Why not.<|im_end|>"


def test_text_of_the_generation_prompt_is_not_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    """NVIDIA-NeMo/Automodel#3739: empty thoughts that the template writes before each response."""
    template = CHATML.replace("'assistant\\n'", "'assistant\\n'").replace(
        "<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think></think>' }}"
    )
    template = template.replace(
        "message.role + '\\n' + message.content",
        "message.role + '\\n' + ('<think></think>' if message.role == 'assistant' else '') + message.content",
    )
    assert learned(tokenizer, template, CHAT) == "Why not.<|im_end|>"


@pytest.mark.parametrize("tools", ['[{"name": "f"}]', [{"type": "function", "function": {"name": "f"}}], [], None])
def test_forms_of_tools_in_data(tools: Any) -> None:
    """NVIDIA-NeMo/Automodel#2324: a list as text is read, an empty one is none."""
    record = parse_record({"messages": CHAT, "tools": tools}, RecordSettings())
    assert record == ChatRecord(CHAT, [{"type": "function", "function": {"name": "f"}}] if tools else None)


def test_objects_of_different_keys_in_data(tmp_path: Path) -> None:
    """huggingface/datasets#7160, #7162 and #8069: missing fields and empty objects stay what they are."""
    calls: list[dict[str, Any]] = [{}, {"a": 1}, {"b": {"c": None}}, {"a": "text"}]
    chats = [
        [*CHAT, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": call}]}]
        for call in calls
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    records = [record for _, record in read_records([str(tmp_path / "a.jsonl")], RecordSettings())]
    found = [record.messages[-1]["tool_calls"][0]["function"]["arguments"] for record in records if record != ""]  # type: ignore[union-attr]
    assert found == calls


OBJECT_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"content": "hi"}], r"messages\.0\.role is missing"),
        ([{"role": "user"}], r"messages\.0\.content is missing; a message of role user needs one"),
        ([{"role": "system", "content": "a"}, {"role": "system"}, CHAT[0]], r"messages\.1\.content is missing"),
        ([CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, CHAT[0]], "not a JSON object; give one"),
        ([CHAT[0], {"role": "assistant", "content": "", "tool_calls": ["f"]}, CHAT[0]], "not a list of calls"),
        ([CHAT[0], {"role": "assistant", "content": "", "tool_calls": 5}, CHAT[0]], "not a list of calls"),
        ([{"role": None, "content": "x"}], r"messages\.0\.role is missing"),
        ([CHAT[0], "hi"], "is a dict of role and content|give an object"),
        ([{"role": "user", "content": b"hi"}], r"messages\.0\.content must be a text, or a list of parts"),
        ([{"role": "user", "content": 5}], r"messages\.0\.content must be a text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "must be a text, or a list of parts"),
        ([{"role": "user", "content": [{"type": "image", "text": "a caption"}]}], "must be a text, or a list of parts"),
        ([CHAT[0], {**CHAT[1], "reasoning_content": b"x"}, CHAT[0]], r"messages\.1\.reasoning_content must be a text"),
        (
            [CHAT[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "kwargs": {}}}]}],
            "'kwargs' and no",
        ),
        (
            [CHAT[0], {"role": "assistant", "tool_calls": [OBJECT_CALL]}, CHAT[0]],
            "hold tool_calls, which the chat temp",
        ),
    ],
)
def test_malformed_messages_in_python_are_named(target: Target, chat: Any, message: str) -> None:
    with Engine(target) as engine, pytest.raises(UsageError, match=message):
        engine.generate([chat], SamplingParams(max_new_tokens=2))


def test_messages_as_other_libraries_make_them(tokenizer: PreTrainedTokenizerBase) -> None:
    """Fields that are None are absent, contents may be parts, and arguments may have another name."""
    parts = [{"type": "text", "text": "Why"}, "now?"]
    empty: dict[str, Any] = {"name": None, "tool_calls": None, "tool_call_id": None, "reasoning_content": None}
    pairs: list[tuple[Any, Any]] = [
        ([{"role": "user", "content": "Why\nnow?"}], [{"role": "user", "content": parts, **empty}]),
        ([{"role": "user", "content": "Why\nnow?"}], [{"role": "user", "content": tuple(parts)}]),
        ([CHAT[0], {"role": "assistant", "content": ""}], [CHAT[0], {"role": "assistant", "content": None, **empty}]),
        ([CHAT[0], {"role": "tool", "content": ""}], [CHAT[0], {"role": "tool"}]),
    ]
    for plain, given in pairs:
        assert encode_chat(tokenizer, given, chat_template=CHATML) == encode_chat(
            tokenizer, plain, chat_template=CHATML
        )
    template = CHATML.replace("message.content", "message.content + (message.tool_calls | default('') | tojson)")
    texts = set[str]()
    for name in ("arguments", "parameters", "input", "args"):
        for arguments in ({"a": 1}, '{"a": 1}'):
            call = {"id": "1", "type": "function", "function": {"name": "f", name: arguments}}
            chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}, CHAT[0]]
            texts.add(str(tokenizer.decode(encode_chat(tokenizer, chat, chat_template=template))))
    assert len(texts) == 1 and '"arguments": {"a": 1}' in texts.pop()


def test_data_loses_no_tools(tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture) -> None:
    """A template without tools or calls drops them, and the drafter would learn responses to other prompts."""
    call = {"role": "assistant", "content": "", "tool_calls": [OBJECT_CALL]}
    encoder = ChatEncoder(tokenizer, END)
    with pytest.raises(UsageError, match="the chat template takes no tools"):
        encoder.chat(CHAT, [{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(UsageError, match="hold tool_calls, which the chat template would drop"):
        encoder.chat([CHAT[0], call])
    for _ in range(2):
        encoder.chat([CHAT[0], {**CHAT[1], "reasoning_content": "Hm.", "topic": 3}])
    assert caplog.text.count("Fields of messages that the chat template drops: reasoning_content, topic.") == 1


@pytest.mark.parametrize("ends", [[2, -1], [2, 10**6], [2, 4294967295]])
def test_impossible_end_tokens_are_ignored(
    tmp_path: Path, tiny_target_dir: Path, caplog: pytest.LogCaptureFixture, ends: list[int]
) -> None:
    """Some conversions write -1 for a missing end token."""
    shutil.copytree(tiny_target_dir, tmp_path / "target")
    for name in ("generation_config.json", "config.json"):
        file = tmp_path / "target" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ends}))
    loaded = load_target(tmp_path / "target")
    assert loaded.eos_token_ids == {2} and caplog.text.count(f"[{ends[1]}] are no tokens of the model") == 1
    with Engine(loaded) as engine:
        params = SamplingParams(max_new_tokens=12, grammar=Grammar("json_schema", '{"enum": ["yes", "no"]}'))
        assert engine.generate(["Hello"], params)[0].text in ('"yes"', '"no"')


def test_help_texts_without_docstrings() -> None:
    """`python -OO` removes docstrings, from which the commands take their help."""
    for words in (["--help"], ["generate", "--help"]):
        texts = [
            subprocess.run([sys.executable, *flags, "-m", "blockdraft", *words], capture_output=True).stdout
            for flags in ([], ["-OO"])
        ]
        assert texts[0] == texts[1] and len(texts[0]) > 500
