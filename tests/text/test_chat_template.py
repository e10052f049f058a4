from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrt.errors import PromptError
from agentrt.text import Tokenizer
from agentrt.text.chat_template import ChatTemplate

CONTROL = ("<|im_start|>", "<|im_end|>", "</s>", "[INST]", "<|im_end|>|>")
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}

#: Each does something else to contents on their way.
TEMPLATES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content | trim + '<|im_end|>' }}{% endfor %}",
    "{% for m in messages %}<|im_start|>{{ m.content.strip() }}{{ m.content | tojson }}<|im_end|>{% endfor %}",
    "{% for m in messages %}<|im_start|>{{ m.content | replace('\n', '') | replace(' ', '') }}<|im_end|>{% endfor %}",
    "<|im_start|>{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>",
    "<|im_start|>{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endfor %}<|im_end|>",
    "<|im_start|>{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}<|im_end|>",
    "<|im_start|>{{ messages | tojson(ensure_ascii=True) }}{{ tools | tojson if tools }}<|im_end|>",
    "<|im_start|>{{ messages | map(attribute='content') | join('') }}<|im_end|>",
)

SPELLED = st.lists(
    st.sampled_from([*CONTROL, "<|im_", "end|>", "<|", "|>", "<", "</s", ">", "[IN", "ST]", "</think>", " ", "\n", "é\ue123", "\\ue123", "x"]), max_size=7
).map("".join)


@settings(max_examples=300, deadline=None)
@given(contents=st.lists(SPELLED, min_size=1, max_size=3), source=st.sampled_from(TEMPLATES), with_tools=st.booleans())
@pytest.mark.slow
def test_no_text_becomes_a_control_token_whatever_the_template_does(contents: list[str], source: str, with_tools: bool) -> None:
    template = ChatTemplate(source, NAMED, CONTROL)
    messages = [{"role": "user", "content": content} for content in contents]
    tools = [{"function": {"name": "f", "description": contents[0]}}] if with_tools and template.knows_tools else None
    pieces = template.render(messages, tools=tools)
    innocent = template.render([m | {"content": "x"} for m in messages], tools=[{"function": {"name": "f"}}] if tools else None)
    assert [p.text for p in pieces if p.control] == [p.text for p in innocent if p.control]
    plain = ChatTemplate(source, NAMED, []).render(messages, tools=tools)  # with nothing to guard
    assert "".join(p.text for p in pieces) == "".join(p.text for p in plain)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(content=SPELLED)
def test_chat_ids_have_the_templates_control_tokens_only(byte_level: Any, sentencepiece: Any, content: str) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        ids = tokenizer.encode_chat([{"role": "user", "content": content}])
        assert [tokenizer.table.control[i] for i in ids if i in tokenizer.control_ids] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
        if not tokenizer.rewrites_text:
            expected = f"<|im_start|>user\n{content.strip()}<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(ids, skip_special=False) == expected


def test_messages_in_all_their_forms(byte_level: Any) -> None:
    tokenizer = byte_level()
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}, {"role": "assistant", "content": None}], add_generation_prompt=False) == (
        "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    )
    assert tokenizer.render_chat([{"role": "developer", "content": "x"}]).startswith("<|im_start|>system\nx")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ("hello", "must be a list"),
        ([{"content": "x"}], "message 0 has the role None"),
        ([{"role": "<|im_end|>", "content": "x"}], "must be a word"),
        (["hello"], "message 0 is a str"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 3}], "message 1 has a int as content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; this model reads text only"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "tool call without a function's name"),
        ([{"role": "user", "content": "x", "extra": object()}], "not JSON"),
    ],
)
def test_malformed_messages_are_refused_by_number(byte_level: Any, messages: Any, words: str) -> None:
    with pytest.raises(PromptError, match=re.escape(words)):
        byte_level().encode_chat(messages)


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
TOOL_CHAT = [
    {"role": "user", "content": "Weather in Paris and Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {"id": "2", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "2", "content": "rain"},
]


def test_a_template_without_tools_is_told_in_words(byte_level: Any) -> None:
    rendered = byte_level().render_chat([{"role": "system", "content": "Be brief."}, *TOOL_CHAT], tools=[WEATHER])
    system, user, assistant, results, ask = rendered.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\nYou can call the functions below")
    assert json.loads(re.search(r"<tools>\n(.*)\n</tools>", system)[1]) == WEATHER  # type: ignore[index]
    assert user == "user\nWeather in Paris and Rome?<|im_end|>\n"
    calls = re.findall(r"<tool_call>\n(.*)\n</tool_call>", assistant)
    assert [json.loads(call)["arguments"] for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert results == "user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    assert ask == "assistant\n"


def test_a_template_that_refuses_a_system_message_gets_it_from_the_user(byte_level: Any) -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer = byte_level(source)
    assert tokenizer.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]) == "<user>Be brief.\n\nHi"
    with pytest.raises(PromptError, match="refuses these messages: never"):
        byte_level("{{ raise_exception('never') }}").render_chat([{"role": "system", "content": "x"}])


def test_a_model_without_a_template_gets_a_transcript(byte_level: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|>"}]
    assert byte_level(None).render_chat(chat) == "Be brief.\n\nUser: Hi <|im_end|>\nAssistant:"
    trained = byte_level(None, add_bos_token=True)
    assert trained.encode_chat(chat)[0] == trained.bos_id
    assert byte_level(None).chat_template.is_fallback


@pytest.mark.model
def test_the_default_models_template(small_model: Tokenizer) -> None:
    assert small_model.render_chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert small_model.encode_chat([{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]) == [
        *[1, 9690, 198, 67, 2, 198],
        *[1, 4093, 198, 26843, 2, 198],
        *[1, 520, 9531, 198],
    ]


@pytest.mark.model
@pytest.mark.slow
def test_the_tool_calling_models_template(tool_model: Tokenizer) -> None:
    rendered = tool_model.render_chat(TOOL_CHAT, tools=[WEATHER])
    system, rest = rendered.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools")
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in system
    assert rest == (
        "<|im_start|>user\nWeather in Paris and Rome?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tool_model.encode_chat([{"role": "user", "content": "<|im_end|>"}])
    assert [i for i in ids if i in tool_model.control_ids] == [151644, 151645, 151644, 151645, 151644]
