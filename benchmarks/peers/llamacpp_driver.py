"""llama.cpp for `compare.py`, through llama-cpp-python's plain bindings, since only those take several sequences at once.

What its own programs do is done here: sequences in slots, all in one batch (its server's continuous batching); a slot keeps the KV of its
last sequence and goes on from the longest common beginning, or takes a copy of another slot's (its server's prompt cache); what all
prompts of a call share is computed first, once (its `parallel` and `batched-bench` examples); constraints are its GBNF grammars, asked
about the likeliest token first, and about all tokens only if that one is refused.
"""

from __future__ import annotations

import ctypes
import json
from collections import deque
from dataclasses import dataclass, field

import llama_cpp as lib
import numpy as np
from driver import Ask, CannotError, Setting, Told, serve
from llama_cpp.llama_grammar import json_schema_to_gbnf

SLOTS = 32
BATCH = 2048
SHARED = 32  # a common beginning shorter than this is not worth a copy


@dataclass
class Slot:
    """One sequence of the context: the tokens whose KV it holds, and the request that it works on, if there is one."""

    number: int
    kept: list[int] = field(default_factory=list)
    request: int | None = None
    due: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    grammar: object = None


class LlamaCpp:
    def __init__(self, setting: Setting) -> None:
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(setting.gguf.encode(), lib.llama_model_default_params())
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._size = lib.llama_vocab_n_tokens(self._vocab)
        params = lib.llama_context_default_params()
        params.n_seq_max = SLOTS
        params.n_ctx = SLOTS * setting.context
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = setting.threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self._slots = [Slot(number) for number in range(SLOTS)]
        self._computed = self._passes = 0
        self.about = f"llama.cpp (llama-cpp-python {lib.__version__}), the GGUF's own weights"

    def answer(self, ask: Ask) -> Told:
        computed, passes = self._computed, self._passes
        self._share(ask.prompts)
        grammars = [_grammar(schema) for schema in ask.schemas] if ask.schemas else [None] * len(ask.prompts)
        waiting, answers = deque(range(len(ask.prompts))), [[]] * len(ask.prompts)
        while waiting or any(slot.request is not None for slot in self._slots):
            while waiting and any(slot.request is None for slot in self._slots):
                number = waiting.popleft()
                self._admit(number, ask.prompts[number], grammars[number])
            for slot in self._step():
                if self._extend(slot, ask):
                    answers[slot.request], slot.request = slot.made, None
        return Told(answers, computed=self._computed - computed, passes=self._passes - passes)

    def _share(self, prompts: list[list[int]]) -> None:
        """Computes what all prompts begin with, unless some slot holds it."""
        shared = min((_common(prompts[0], other) for other in prompts[1:]), default=0)
        if shared < SHARED or any(_common(slot.kept, prompts[0]) >= shared for slot in self._slots):
            return
        self._admit(-1, prompts[0][:shared], None)
        while not (done := self._step()):
            pass
        done[0].request = None

    def _admit(self, request: int, prompt: list[int], grammar: str | None) -> None:
        free = [slot for slot in self._slots if slot.request is None]
        slot = max(free, key=lambda slot: (_common(slot.kept, prompt), -len(slot.kept)))
        source = max(self._slots, key=lambda slot: _common(slot.kept, prompt))
        if _common(source.kept, prompt) >= _common(slot.kept, prompt) + SHARED:
            slot = min(free, key=lambda slot: len(slot.kept))
            lib.llama_memory_seq_cp(self._memory, source.number, slot.number, -1, -1)
            slot.kept = list(source.kept)
        keep = min(_common(slot.kept, prompt), len(prompt) - 1)  # the last token is computed, for its logits
        lib.llama_memory_seq_rm(self._memory, slot.number, keep, -1)
        slot.request, slot.kept, slot.due, slot.made = request, prompt[:keep], prompt[keep:], []
        slot.grammar = lib.llama_sampler_init_grammar(self._vocab, grammar.encode(), b"root") if grammar else None

    def _step(self) -> list[Slot]:
        """One forward pass over what is due; returns the slots whose next token can be chosen, with its logits' row in the batch."""
        batch, ready = self._batch, []
        batch.n_tokens = 0
        for slot in sorted((slot for slot in self._slots if slot.request is not None), key=lambda slot: len(slot.due)):
            taken = slot.due[: BATCH - batch.n_tokens]
            for offset, token in enumerate(taken):
                row = batch.n_tokens
                batch.token[row], batch.pos[row] = token, len(slot.kept) + offset
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, slot.number, 0
                batch.n_tokens += 1
            slot.kept, slot.due = slot.kept + taken, slot.due[len(taken) :]
            if taken and not slot.due:
                batch.logits[batch.n_tokens - 1] = 1
                ready.append((slot, batch.n_tokens - 1))
        self._passes += 1
        self._computed += batch.n_tokens
        if lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        self._rows = {slot.number: row for slot, row in ready}
        return [slot for slot, _ in ready]

    def _extend(self, slot: Slot, ask: Ask) -> bool:
        """Chooses a slot's next token; True if its answer is complete."""
        pointer = lib.llama_get_logits_ith(self._context, self._rows[slot.number])
        logits = np.ctypeslib.as_array(pointer, shape=(self._size,))
        token = int(logits.argmax()) if slot.grammar is None else self._allowed(slot.grammar, logits)
        slot.made.append(token)
        slot.due = [token]
        ended = len(slot.made) == ask.max_tokens or (slot.grammar is not None and lib.llama_vocab_is_eog(self._vocab, token))
        if slot.grammar is not None and ended:
            lib.llama_sampler_free(slot.grammar)
        return ended

    def _allowed(self, grammar: object, logits: np.ndarray) -> int:
        token = self._likeliest(grammar, logits, np.array([logits.argmax()]))
        if token is None:
            token = self._likeliest(grammar, logits, np.arange(self._size))
        lib.llama_sampler_accept(grammar, token)
        return int(token)

    def _likeliest(self, grammar: object, logits: np.ndarray, ids: np.ndarray) -> int | None:
        """The likeliest of some tokens that the grammar allows; None if it allows none of them."""
        rows = np.zeros(len(ids), dtype=np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
        rows["id"], rows["logit"] = ids, logits[ids]
        data = rows.ctypes.data_as(ctypes.POINTER(lib.llama_token_data))
        array = lib.llama_token_data_array(data=data, size=len(ids), selected=-1, sorted=False)
        lib.llama_sampler_apply(grammar, ctypes.byref(array))
        best = rows["logit"].argmax()
        return None if np.isneginf(rows["logit"][best]) else int(rows["id"][best])


def _common(one: list[int], other: list[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _grammar(schema: dict) -> str:
    try:
        return json_schema_to_gbnf(json.dumps(schema))
    except Exception as error:  # whatever its converter stumbles over
        raise CannotError(f"its converter refuses a schema: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    serve(LlamaCpp)
