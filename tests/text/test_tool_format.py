"""Each family's calls, read whole and in pieces of any size, come out as they were written; and their grammars hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.errors import GrammarError, UserError
from agentrt.text.tool_format import (
    FORMATS,
    ArgumentsGrown,
    CallBegun,
    Choice,
    Event,
    Said,
    format_named,
    guess_format,
    read_whole,
)

TOOLS = [
    {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"}},
            "required": ["text"],
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]


def written(family: str, calls: list[tuple[str, dict]]) -> str:
    """Calls as the family's models write them, by another road than the reader's."""
    dump = json.dumps
    hermes = [dump({"name": n, "arguments": a}) for n, a in calls]
    if family == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in hermes)
    if family == "smollm2":
        return f"<tool_call>[{', '.join(hermes)}]</tool_call>"
    if family == "mistral":
        return f"[TOOL_CALLS] [{', '.join(hermes)}]"
    if family == "llama3_json":
        return "; ".join(dump({"name": n, "parameters": a}) for n, a in calls)
    if family == "pythonic":
        return "[" + ", ".join(f"{n}({', '.join(f'{k}={dump(v)}' for k, v in a.items())})" for n, a in calls) + "]"
    blocks = []
    for name, arguments in calls:
        inside = "".join(f"<parameter={k}>\n{v if isinstance(v, str) else dump(v)}\n</parameter>\n" for k, v in arguments.items())
        blocks.append(f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>")
    return "\n".join(blocks)


def read(events: list[Event]) -> tuple[str, list[tuple[str, object]]]:
    said = "".join(e.text for e in events if isinstance(e, Said))
    names = [e.name for e in events if isinstance(e, CallBegun)]
    assert [e.index for e in events if isinstance(e, CallBegun)] == list(range(len(names)))
    grown = ["".join(e.text for e in events if isinstance(e, ArgumentsGrown) and e.index == n) for n in range(len(names))]
    return said, [(name, json.loads(arguments)) for name, arguments in zip(names, grown, strict=True)]


texts = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda text: "</parameter>" not in text)
arguments = st.fixed_dictionaries(
    {"text": texts}, optional={"count": st.integers(), "deep": st.dictionaries(texts, st.lists(texts | st.booleans() | st.none(), max_size=2), max_size=2)}
)
calls_of_any = st.lists(st.tuples(st.just("look_up"), arguments) | st.just(("now", {})), min_size=1, max_size=3)


@pytest.mark.parametrize("family", sorted(FORMATS))
@settings(max_examples=25, deadline=None)
@given(calls=calls_of_any, cuts=st.lists(st.integers(0, 400), max_size=40), before=st.sampled_from(["", "I'll look.\n\n", "a < b <tool "]))
def test_calls_come_out_as_they_were_written(family, calls, cuts, before):
    before = "" if family in ("llama3_json", "pythonic") else before  # these tell a call by its first character
    text = before + written(family, calls)
    assert read(read_whole(FORMATS[family].reader(TOOLS), text)) == (before.rstrip(), calls)
    reader, events = FORMATS[family].reader(TOOLS), []
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    for start, end in zip([0, *ends], ends, strict=False):
        events += reader.feed(text[start:end])
    assert read([*events, *reader.finish()]) == (before.rstrip(), calls)


@pytest.mark.parametrize("family", sorted(FORMATS))
@given(text=st.text(max_size=40).filter(lambda t: not t.lstrip().startswith(("{", "[")) and "<tool_call>" not in t and "[TOOL_CALLS]" not in t))
@settings(max_examples=25, deadline=None)
def test_text_without_a_call_comes_out_whole(family, text):
    reader = FORMATS[family].reader(TOOLS)
    events = [event for char in text for event in reader.feed(char)] + reader.finish()
    assert all(isinstance(event, Said) for event in events)
    said = "".join(event.text for event in events if isinstance(event, Said))
    assert said == text or (not text.strip() and not said)


def test_what_was_cut_keeps_the_calls_that_were_begun():
    for family in FORMATS:
        text = written(family, [("look_up", {"text": "abc"}), ("now", {})])
        for end in range(len(text)):
            events = read_whole(FORMATS[family].reader(TOOLS), text[:end])
            begun = [event.index for event in events if isinstance(event, CallBegun)]
            assert begun == list(range(len(begun)))
            assert not [e for e in events if isinstance(e, Said) and ("look_up" in e.text or "TOOL_CALLS]" in e.text)]


def test_a_mark_that_never_becomes_a_call_is_text():
    assert read_whole(FORMATS["hermes"].reader(TOOLS), "1 < 2 and <tool_cal") == [Said("1 < 2 and"), Said(" <tool_cal")]


@pytest.mark.parametrize("family", ["pythonic", "qwen3_coder"])
def test_what_a_form_cannot_enforce_is_refused_by_name(family):
    tool = {"name": "f", "parameters": {"type": "object", "properties": {}, "minProperties": 1}}
    with pytest.raises(GrammarError, match="minProperties"):
        FORMATS[family].grammar([tool], Choice("required"))
    if family == "qwen3_coder":
        tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}}}
        with pytest.raises(GrammarError, match="pattern"):
            FORMATS[family].grammar([tool], Choice("required"))


@pytest.mark.parametrize("family", sorted(FORMATS))
def test_a_turn_that_calls_betrays_its_family(family):
    turn = written(family, [("look_up", {"text": "a"})])
    assert guess_format(f"<|im_start|>assistant\n{turn}<|im_end|>").name == family
    assert guess_format("<|im_start|>assistant\n<|im_end|>").name == "hermes"


def test_an_answer_in_braces_that_is_no_call_is_text():
    assert read(read_whole(FORMATS["llama3_json"].reader(TOOLS), '{"city": "Oslo"}')) == ('{"city": "Oslo"}', [])


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="hermes"):
        format_named("elvish")


def accepts(spec, tokenizer, text: str) -> bool:
    """Whether a grammar lets the text through, whole."""
    from agentrt.grammar import compile

    cursor = compile(spec, tokenizer).cursor()
    return all(cursor.advance(token_id) for token_id in tokenizer.encode(text)) and cursor.accepting


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FORMATS))
def test_a_familys_grammar_takes_its_calls_and_no_others(family):
    from agentrt.text import load_tokenizer

    tokenizer, form = load_tokenizer("smollm2-135m"), FORMATS[family]
    closed = [tool | {"parameters": tool["parameters"] | {"additionalProperties": False}} for tool in TOOLS]
    one, two = [("look_up", {"text": "a b", "count": 3})], [("look_up", {"text": "a"}), ("now", {})]
    wrong = [("look_up", {"count": 3})]
    for tool in ("auto", "required", "look_up"):
        spec = form.grammar(closed, Choice(tool))
        assert accepts(spec, tokenizer, written(family, one)), tool
        assert accepts(spec, tokenizer, written(family, two)) == (tool != "look_up")
        assert not accepts(spec, tokenizer, written(family, wrong))
        assert not accepts(spec, tokenizer, written(family, [("gone", {})]))
        assert accepts(spec, tokenizer, "Just a text, (really).") == (tool == "auto")
    alone = form.grammar(closed, Choice("auto", parallel=False))
    assert accepts(alone, tokenizer, written(family, one))
    assert not accepts(alone, tokenizer, written(family, two))
    answer = form.grammar(closed, Choice("auto", answer_schema='{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'))
    assert accepts(answer, tokenizer, '{"ok": true}')
    assert accepts(answer, tokenizer, written(family, one))
    assert not accepts(answer, tokenizer, "Just a text.")


@pytest.mark.model
@pytest.mark.slow
def test_a_call_without_its_frame_is_a_call():
    from agentrt.text import load_tokenizer

    tokenizer, form = load_tokenizer("smollm2-135m"), FORMATS["hermes"]
    spec = form.grammar(TOOLS, Choice("auto"))
    bare = '{"name": "look_up", "arguments": {"text": "a"}}'
    assert read(read_whole(form.reader(TOOLS), bare)) == ("", [("look_up", {"text": "a"})])
    for text, allowed in (
        (bare, True),
        (f"{bare}\n{bare}", False),
        (f"{bare} and more", False),
        ('{"name": "look_up", "arguments": {"count": 1}}', False),
        ('{"name": "Anna", "age": 31}', True),
        ('{"name": "look_up"}', True),
        ("So: " + bare, True),  # told of, not made
        (f"Hm.\n<tool_call>\n{bare}\n</tool_call>", True),
        ('{"a": 1} <tool_call>\n' + bare + "\n</tool_call>", True),
    ):
        assert accepts(spec, tokenizer, text) == allowed, text
        if allowed and not text.startswith(('{"name": "look_up", "arg', "Hm", '{"a')):
            assert read(read_whole(form.reader(TOOLS), text)) == (text, [])


FENCED = [
    '```json\n{"name": "look_up", "arguments": {"text": "a"}}\n```',
    '```json\n{\n  "name": "look_up",\n  "arguments": {"text": "a"}\n}\n```',
    '```\n{"name":"look_up","arguments":{"text": "a"}}```',
    '{\n "name": "look_up",\n "arguments": {"text": "a"}\n}',
]
NO_CALL = [
    '```json\n{"name": "Anna", "age": 31}\n```',
    '```json\n[1, 2]\n```',
    '```python\nlook_up("a")\n```',
    'As JSON:\n```json\n{"name": "look_up", "arguments": {"text": "a"}}\n```',
    '```json\n{"name": "look_up", "age": 1}\n```',
    "```js",
    '```json\n{"name": "look_',
]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_in_a_fence_is_a_call_and_other_fences_are_text(size):
    for text in FENCED + NO_CALL:
        reader = FORMATS["hermes"].reader(TOOLS)
        events = [event for at in range(0, len(text), size) for event in reader.feed(text[at : at + size])] + reader.finish()
        assert read(events) == (("", [("look_up", {"text": "a"})]) if text in FENCED else (text, [])), text


@pytest.mark.model
@pytest.mark.slow
def test_a_call_in_a_fence_is_constrained():
    from agentrt.grammar import compile
    from agentrt.text import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m")
    spec = FORMATS["hermes"].grammar(TOOLS, Choice("auto"))
    compiled = compile(spec, tokenizer)
    for text in FENCED + NO_CALL:
        assert accepts(spec, tokenizer, text), text
        assert compiled.verify(text) == []
    for text in (FENCED[0] + " and more", FENCED[0].replace('"a"', "3"), FENCED[1].replace("text", "test"), FENCED[0][:-3]):
        assert not accepts(spec, tokenizer, text), text
