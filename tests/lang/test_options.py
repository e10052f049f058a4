"""Which options a run and a gen take, whose they are, and which seeds follow from them."""

from __future__ import annotations

import json

import pytest

import agentrt as sgl  # noqa: F401  (a program written for sgl: text before a gen stays as it is)
from agentrt.backends.scripted import ScriptedBackend
from agentrt.errors import UserError
from agentrt.lang.expressions import gen
from agentrt.lang.program import function
from agentrt.request import SamplingParams


@function
def numbered(s, number):
    s += "A long prompt that all of them share. " + f"Number {number}:"
    s += gen("a")


def test_a_program_whose_arguments_are_called_n_stop_temperature_receives_them():
    @function
    def program(s, n, stop, temperature, backend="mine", stream=None):
        s += "Q" + gen("a", max_tokens=3)
        return n, stop, temperature, backend, stream

    default = ScriptedBackend("x")
    bound = program.bind(temperature="hot")
    from agentrt import backend as backends

    backends.set_default_backend(default)
    try:
        assert program.run(n=5, stop="END", temperature="hot", stream=1).ret_value == (5, "END", "hot", "mine", 1)
        assert bound.run(7, "END").ret_value == (7, "END", "hot", "mine", None)
        (state,) = program.run_batch([{"n": 1, "stop": 2, "temperature": 3, "backend": 4}])
        assert state.ret_value == (1, 2, 3, 4, None)
    finally:
        backends.set_default_backend(None)
    assert all(request.sampling.stop == () for request in default.requests)


def test_sampling_can_be_given_as_one_object_and_both_names_of_max_tokens_work():
    @function
    def program(s):
        s += "Q" + gen("a") + gen("b", max_tokens=2) + gen("c", max_new_tokens=3)

    backend = ScriptedBackend("abcdefgh")
    program.run(backend=backend, sampling=SamplingParams(temperature=0.5, top_p=0.9, max_tokens=4))
    assert [(r.sampling.max_tokens, r.sampling.top_p, r.sampling.temperature) for r in backend.requests] == [
        (4, 0.9, 0.5), (2, 0.9, 0.5), (3, 0.9, 0.5),
    ]  # fmt: skip
    program.run(backend=backend, max_tokens=7)
    assert backend.requests[-3].sampling.max_tokens == 7
    program.run(backend=backend, max_new_tokens=6)
    assert backend.requests[-3].sampling.max_tokens == 6
    program.run(backend=backend)
    assert backend.requests[-3].sampling.max_tokens == 128


def test_an_option_that_means_nothing_is_refused():
    with pytest.raises(UserError, match="temprature"):
        gen("a", temprature=1)
    with pytest.raises(UserError, match="temprature"):
        numbered.run(1, temprature=1)
    with pytest.raises(UserError, match="same option"):
        gen("a", max_tokens=1, max_new_tokens=2)


@function
def drawn(s):
    s += "Q" + gen("a")
    forks = s.fork(3)
    forks += gen("b")
    forks.join()
    s += gen("c", seed=77)
    return s["a"], s["b"], s["c"]


def says_its_seed(text, request):
    return str(request.sampling.seed)


def test_the_same_seed_gives_the_same_output_whatever_else_runs_and_each_fork_its_own():
    backend = ScriptedBackend(says_its_seed)
    alone = drawn.run(backend=backend, seed=5).ret_value
    together = numbered.run_batch([(n,) for n in range(20)], backend=backend, generator_style=True)
    beside = drawn.run(backend=backend, seed=5).ret_value
    list(together)
    other = drawn.run(backend=backend, seed=6).ret_value
    assert alone == beside
    assert alone[2] == "77"
    assert len({alone[0], *alone[1]}) == 4
    assert other[0] != alone[0]
    unseeded = {drawn.run(backend=backend).ret_value[0] for _ in range(3)}
    assert len(unseeded) == 3


def test_reading_a_state_does_not_change_its_seeds():
    @function
    def looks(s, much):
        s += "Q"
        if much:
            s.text(), s.sync(), s.token_ids(), s.messages()
        s += gen("a")
        return s["a"]

    backend = ScriptedBackend(says_its_seed)
    assert looks.run(True, backend=backend, seed=1).ret_value == looks.run(False, backend=backend, seed=1).ret_value


def test_what_only_sglangs_surface_asks_for_is_accepted_with_one_warning():
    with pytest.warns(UserWarning, match="num_api_spec_tokens"):

        @function(num_api_spec_tokens=64)
        def program(s):
            s += "Q"
            forks = s.fork(2, position_ids_offset=[0, 1])
            forks += gen("a")
            forks.join("concate_and_append")

    with pytest.warns(UserWarning, match=r"accepted|appends") as caught:
        state = program.run(backend=ScriptedBackend("x"))
    assert sorted(str(w.message).split()[0] for w in caught) == ["join('concate_and_append')", "position_ids_offset"]
    assert state.text() == "Qxx"
    assert json.dumps(state.recording.to_json())
