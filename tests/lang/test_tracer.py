"""What a program's text is before a model is asked: traces and prefixes, which run a body once."""

from __future__ import annotations

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import ScriptedBackend
from agentrt.lang.expressions import gen, select, system, user
from agentrt.lang.program import function


def test_trace_works_with_roles_with_blocks_and_var_scope_and_runs_the_body_once():
    ran = []

    @function
    def program(s, topic):
        ran.append(topic)
        s += system("Be brief.")
        with s.user():
            s += "About " + topic
        with s.assistant(), s.var_scope("whole"):
            s += gen("a", max_tokens=5)
            s += " and "
            s += select("b", ["x", "y"])
        s += user(f"You said {s['a']}")

    traced = program.trace("cats")
    assert ran == ["cats"]
    assert traced.complete
    assert traced.variables == ["whole", "a", "b"]
    kinds = [type(node).__name__ for node in traced.nodes]
    assert kinds == [
        "RoleBegin", "Text", "RoleEnd", "RoleBegin", "Text", "RoleEnd", "RoleBegin", "ScopeBegin", "Gen", "Text", "Select",
        "ScopeEnd", "RoleEnd", "RoleBegin", "Text", "RoleEnd",
    ]  # fmt: skip
    assert [type(node).__name__ for node in traced.prefix][-1] == "ScopeBegin"


def test_run_runs_the_body_once_and_prefix_extraction_only_when_asked():
    ran = []

    @function
    def program(s, topic):
        ran.append(topic)
        s += "A constant beginning of some length. About " + topic
        s += gen("a")

    backend = ScriptedBackend("x")
    program.run("cats", backend=backend)
    assert ran == ["cats"]
    tokens = program.cache(backend=backend)
    assert len(ran) == 2
    assert tokens == len(backend.tokenizer.encode("A constant beginning of some length. About "))
    assert backend.requests[-1].sampling.max_tokens == 0


def test_a_trace_says_where_the_body_decides_by_what_is_unknown():
    @function
    def program(s):
        s += "Q" + gen("a")
        if s["a"] == "yes":
            s += "more" + gen("b")

    traced = program.trace()
    assert not traced.complete
    assert "'a'" in traced.why
    assert traced.variables == ["a"]
