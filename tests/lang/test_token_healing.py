"""Token healing: on for plain text, off in chats and for programs that import agentrt as sgl; what was fed is never touched."""

from __future__ import annotations

import types

from agentrt.backends.remote import OpenAI
from agentrt.backends.scripted import ScriptedBackend
from agentrt.lang.expressions import assistant, gen, user
from agentrt.lang.program import function


@function
def plain(s):
    s += "He went to a" + gen("a") + "!" + gen("b", token_healing=False)


@function
def chat(s):
    s += user("Q") + assistant("so ab" + gen("a"))


def test_the_last_token_of_the_text_is_left_for_the_answer_to_complete():
    backend = ScriptedBackend("bc.")
    state = plain.run(backend=backend)
    first, second = backend.requests
    whole = backend.tokenizer.encode("He went to a")
    assert (list(first.prompt_ids), first.prompt_tail) == (whole[:-1], b" a")
    assert state["a"] == "bc."
    assert state.text() == "He went to abc.!bc."
    assert second.prompt_tail == b""
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert backend.tokenizer.decode(second.prompt_ids) == "He went to abc.!"


def test_streams_and_stops_do_not_show_the_completed_bytes():
    backend = ScriptedBackend("bc. d")
    state = plain.run(backend=backend, stop=".", stream=True)
    assert "".join(state.text_iter("a")) == "bc"
    state.sync()
    assert backend.tokenizer.decode(backend.requests[1].prompt_ids).startswith("He went to abc")


def test_it_is_off_inside_chats_by_request_and_where_a_backend_cannot():
    backend = ScriptedBackend("x")
    chat.run(backend=backend)
    plain.run(backend=backend, token_healing=False)
    assert all(request.prompt_tail == b"" for request in backend.requests)
    remote = OpenAI("m")
    assert not remote.capabilities.healing
    remote.close()


def test_it_is_off_for_programs_whose_module_imports_agentrt_as_sgl():
    import agentrt

    backend = ScriptedBackend("x")
    known = types.FunctionType(plain.func.__code__, {**plain.func.__globals__, "sgl": agentrt}, "known")
    function(known).run(backend=backend)
    assert backend.requests[0].prompt_tail == b""


def test_one_token_alone_is_not_left_out():
    @function
    def short(s):
        s += "a" + gen("a")

    backend = ScriptedBackend("x")
    short.run(backend=backend)
    assert list(backend.requests[0].prompt_ids) == backend.tokenizer.encode("a")
