"""The final check: formats, exact multiples, ECMA patterns, and never an exception."""

import pytest

from agentrt.grammar import compile, json_schema_spec
from agentrt.grammar.acceptance import walks
from agentrt.grammar.formats import FORMATS
from agentrt.grammar.verify import verifier_of

FORMAT_CASES = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-1-01"]),
    "time": (["23:59:60Z", "01:29:60+01:30", "12:00:00.5-05:00"], ["23:58:60Z", "12:00:60+00:30", "24:00:00Z", "12:00:00"]),
    "date-time": (["2024-02-29T12:00:00Z", "1998-12-31T15:59:60.123-08:00"], ["2024-02-30T12:00:00Z", "2024-02-29 12:00:00Z", "1998-12-31T22:59:60Z"]),
    "duration": (["P4DT12H30M5S", "P2W", "PT0S"], ["P", "P1D2W", "PT1D", "4D"]),
    "email": (["a.b@example.com", '"a b"@example.com', "x@[127.0.0.1]", "x@[IPv6:::1]"], ["a..b@example.com", "a@", "@x", "a b@x.y"]),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::", "::1", "1:2:3:4:5:6:7:8", "1::d6:192.168.0.1"], ["1::2::3", ":1", "1:2:3:4:5:6:7", "12345::"]),
    "hostname": (["a.example", "xn--ihqwcrb4cv8a8dqg056pqjye"], ["-a", "a_b", "a..b", "x" * 64, "xn--x"]),
    "uri": (["http://a/b?c#d", "urn:x:y", "http://[::1]:80/"], ["//a/b", "a b:c", "http://[::1", "\\\\x"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380"]),
    "json-pointer": (["", "/a~1b/~0"], ["a", "/~2"]),
    "regex": (["^a+$", "(?=x)"], ["a(", r"\a"]),
}


@pytest.mark.parametrize("name", FORMAT_CASES)
def test_formats_are_checked_and_where_exact_enforced(name, byte_tokens):
    good, bad = FORMAT_CASES[name]
    schema = {"type": "string", "format": name}
    compiled = compile(json_schema_spec(schema), byte_tokens)
    assert compiled.checked == (not FORMATS[name].exact)
    for text in good:
        assert verifier_of(schema).violations(text) == [], text
        assert walks(compiled, text, schema), text
    for text in bad:
        assert verifier_of(schema).violations(text) != [], text
        if FORMATS[name].exact:
            assert not walks(compiled, text, schema), text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"multipleOf": 0.01}, 19.99, 19.995),
        ({"multipleOf": 0.0001}, 0.0075, 0.00751),
        ({"multipleOf": 0.123456789}, 0.123456789, 1e308),
        ({"pattern": r"^\p{Letter}+$"}, "é", "1"),
        ({"pattern": r"^\d+$"}, "12", "٤"),
        ({"pattern": "^a$"}, "a", "a\n"),
        ({"properties": {"pattern": {"type": "string"}}, "patternProperties": {r"^\d$": {"type": "null"}}}, {"1": None}, {"1": 2}),
    ],
)
def test_where_jsonschema_alone_is_wrong_or_fails(schema, good, bad):
    assert verifier_of(schema).violations(good) == []
    assert verifier_of(schema).violations(bad) != []


def test_a_judge_never_raises_and_never_passes_what_it_cannot_read():
    assert verifier_of({"type": "object"}).verdict('{"a": NaN}') != []
    assert verifier_of({}).verdict('{"cut') != []
    assert verifier_of({"items": {"$ref": "#"}}).verdict("[" * 5000 + "]" * 5000) != []
    line = verifier_of({"properties": {"a": {"items": {"type": "integer"}}}}).violations({"a": [1, "x"]})[0]
    assert line.startswith("/a/1: ")
