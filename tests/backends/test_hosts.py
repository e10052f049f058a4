"""What the worker's process is given, and how messages get there."""

from __future__ import annotations

import enum
import gc
import pickle
import threading
import weakref

import pytest

from agentrt import Request, SamplingParams, UserError
from agentrt.backends import hosts


class Level(enum.IntEnum):
    HIGH = 3


class Mark(enum.StrEnum):
    END = "."


class Share(float):
    pass


@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_how_threads_wait_is_ours_to_say_unless_somebody_did(chosen, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    given = hosts._environment()
    said = {name: given[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in given}
    assert said == (chosen or {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": hosts.SPINS})


def test_values_of_our_callers_own_classes_arrive_as_plain_ones():
    """The worker has no module of that name; what it cannot read would have made it deaf."""
    own = Request(
        prompt_ids=(Level.HIGH,),
        sampling=SamplingParams(max_tokens=Level.HIGH, stop=(Mark.END,), temperature=Share(0.5), logit_bias={Level.HIGH: Share(1)}),
        priority=Level.HIGH,
        cache_salt=Mark.END,
    )
    sent = hosts._pickled(("submit", own))
    assert __name__.encode() not in sent
    assert pickle.loads(sent) == ("submit", own)


def test_what_means_nothing_to_the_worker_is_refused_before_it_is_sent():
    class Tag:
        pass

    for nonsense in (Tag(), Tag):
        with pytest.raises(UserError, match=r"Tag means nothing to the engine's process"):
            hosts._pickled(("call", 1, "hold", (nonsense, 1.0)))


def test_a_stream_that_is_lost_in_the_middle_of_a_message_can_still_abort():
    """Its finalizer runs wherever memory is collected, so also where a message of the same thread is half written."""
    host, sent = hosts.ProcessHost.__new__(hosts.ProcessHost), []
    host._lock, host._outbox = threading.RLock(), []

    class Lost:
        def __init__(self):
            self.itself = self

    class Pipe:
        def send_bytes(self, message):
            sent.append(message)
            gc.collect()
            sent.append("whole")

    host._writer = Pipe()
    lost = Lost()
    weakref.finalize(lost, host.post, ("abort", "one"))
    del lost
    sending = threading.Thread(target=host.post, args=(("submit", "two"),), daemon=True)
    sending.start()
    sending.join(20)
    assert not sending.is_alive()
    assert sent == [pickle.dumps(("submit", "two"), -1), "whole", pickle.dumps(("abort", "one"), -1), "whole"]
    assert host._outbox == []


def test_a_library_that_panics_in_the_engines_thread_fails_what_waits(monkeypatch, tmp_path):
    class Panic(BaseException):
        """As pyo3's, which is no Exception."""

    def start(*_):
        raise Panic("on purpose")

    monkeypatch.setattr("agentrt.engine.worker.start", start)
    got, done = [], threading.Event()

    def receive(message):
        got.append(message)
        done.set()

    hosts.ThreadHost(None, tmp_path, receive)
    assert done.wait(60)
    assert got[0][0] == "failed"
    assert "on purpose" in str(got[0][1])
