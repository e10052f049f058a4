"""Tools and structural tags: free text and calls in one text, every call an offered one, and checked again at the end."""

import json

import pytest

import agentrt.grammar as grammar
from agentrt.errors import GrammarError

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}, {"name": "get_news"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NEWS = '<tool_call>\n{"name": "get_news", "arguments": {}}\n</tool_call>'


def takes(compiled, text):
    cursor = compiled.cursor()
    return all(map(cursor.advance, text.encode())) and cursor.accepting


@pytest.mark.parametrize(
    ("choice", "parallel", "good", "bad"),
    [
        ("required", True, [CALL, NEWS, f"{CALL}\n{NEWS}"], ["", "hello", f"hello {CALL}", CALL[:-3], CALL.replace("weather", "whether"), CALL.replace('"Rome"', "3")]),
        ("required", False, [CALL, NEWS], [f"{CALL}\n{NEWS}"]),
        ("get_news", True, [NEWS], [CALL, f"{NEWS}\n{NEWS}", ""]),
        ("auto", True, ["", "hello <tool", CALL, f"Sure. {CALL}\n{NEWS}"], ["<tool_call>", "x <tool_call>\nhello", f"{CALL} and more"]),
        ("auto", False, ["hello", f"Sure: {NEWS}"], [f"{CALL}\n{NEWS}"]),
    ],
)
def test_tools_in_hermes_form(choice, parallel, good, bad, byte_tokens):
    compiled = grammar.compile(grammar.tools_spec(TOOLS, tool_choice=choice, parallel=parallel), byte_tokens)
    for text in good:
        assert takes(compiled, text), text
        assert compiled.verify(text) == []
    for text in bad:
        assert not takes(compiled, text), text


def test_other_families_forms(byte_tokens):
    call = '{"name": "get_news", "parameters": {}}'
    bare = grammar.compile(grammar.tools_spec(TOOLS, begin="", end="", separator="; ", trigger="", arguments_key="parameters"), byte_tokens)
    assert all(takes(bare, text) for text in (call, f"{call}; {call}", "hello {there}", ""))
    assert not takes(bare, "{hello}")
    assert bare.verify(f"{call}; {call}") == []
    listed = dict(open="[CALLS][", begin="", end="", separator=", ", close="]", trigger="[CALLS]")
    many = grammar.compile(grammar.tools_spec(TOOLS, arguments_key="parameters", **listed), byte_tokens)
    assert all(takes(many, text) for text in (f"[CALLS][{call}]", f"so: [CALLS][{call}, {call}]", "text"))
    assert not takes(many, f"[CALLS][{call}")


def test_a_call_or_an_answer_that_follows_a_schema(byte_tokens):
    spec = grammar.tools_spec(TOOLS, answer_schema=json.dumps({"type": "array", "items": {"type": "integer"}}))
    compiled = grammar.compile(spec, byte_tokens)
    assert takes(compiled, "[1, 2]")
    assert takes(compiled, CALL)
    assert not takes(compiled, "hello")
    assert compiled.verify('["x"]') != []


def test_what_only_the_end_can_check_is_found_in_its_call(byte_tokens):
    loose = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}, "additionalProperties": False}
    compiled = grammar.compile(grammar.tools_spec([{"name": "tag", "parameters": loose}], tool_choice="required"), byte_tokens)
    assert compiled.checked
    assert [e.pointer for e in compiled.ledger if e.keyword == "uniqueItems"] == ["/0/parameters/properties/tags"]
    calls = ['<tool_call>\n{"name": "tag", "arguments": {"tags": ' + tags + "}}\n</tool_call>" for tags in ("[1, 2]", "[1, 1]")]
    assert takes(compiled, "\n".join(calls))
    violations = compiled.verify("\n".join(calls))
    assert len(violations) == 1
    assert violations[0].startswith("call 1 (tag): /tags")


def test_a_bad_tool_is_named_and_two_tools_share_no_definitions(byte_tokens):
    with pytest.raises(GrammarError) as caught:
        grammar.compile(grammar.tools_spec([{"name": "a"}, {"name": "b", "parameters": {"$ref": "#/none"}}]), byte_tokens)
    assert caught.value.pointer.startswith("/1/parameters")
    one, two = ({"type": "object", "properties": {"v": {"$ref": "#/$defs/v"}}, "required": ["v"], "additionalProperties": False, "$defs": {"v": {"type": kind}}} for kind in ("integer", "string"))
    spec = grammar.tools_spec([{"name": "i", "parameters": one}, {"name": "s", "parameters": two}], tool_choice="required")
    compiled = grammar.compile(spec, byte_tokens)
    write = '<tool_call>\n{"name": "%s", "arguments": {"v": %s}}\n</tool_call>'
    assert takes(compiled, write % ("i", "1"))
    assert takes(compiled, write % ("s", '"x"'))
    assert not takes(compiled, write % ("i", '"x"'))


def test_structural_tags(byte_tokens):
    tags = [{"begin": "<n>", "end": "</n>", "json_schema": {"type": "integer"}}, {"begin": "<w>", "end": "</w>", "regex": "[a-z]+"}]
    free = grammar.compile(grammar.structural_spec(tags), byte_tokens)
    assert all(takes(free, text) for text in ("", "x < y", "a <n>12</n> b <w>hi</w> c"))
    assert not any(takes(free, text) for text in ("<n>", "<n>x</n>", "<w></w>"))
    once = grammar.compile(grammar.structural_spec(tags, at_least_one=True, stop_after_first=True), byte_tokens)
    assert takes(once, "a <n>12</n>")
    assert not takes(once, "a")
    assert not takes(once, "<n>12</n> b")
    for bad, words in [([], "no tags"), ([{"end": "x", "regex": "a"}], "no 'begin'"), ([{"begin": "<a>"}], "needs one of"), ([*tags, {"begin": "<n>x", "regex": "a"}], "occurs in")]:
        with pytest.raises(GrammarError, match=words):
            grammar.compile(grammar.structural_spec(bad), byte_tokens)


def test_schemas_inside_a_lark_grammar_are_normalised_too(byte_tokens):
    compiled = grammar.compile(grammar.lark_spec('start: "<" doc ">"\ndoc: %json {"not": {"type": ["string", "object", "array"]}}'), byte_tokens)
    assert takes(compiled, "<12>")
    assert not takes(compiled, '<"x">')
    with pytest.raises(GrammarError, match="no way to") as caught:
        grammar.compile(grammar.lark_spec('start: %json {"type": "array", "uniqueItems": true}'), byte_tokens)
    assert caught.value.keyword == "uniqueItems"
