"""agentrt for `compare.py`, in the thread mode, since this process is its own already."""

from __future__ import annotations

from driver import Ask, Setting, Told, serve

import agentrt


class Agentrt:
    def __init__(self, setting: Setting) -> None:
        from agentrt.hub import resolve_model

        shape = resolve_model(setting.folder).config
        token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 4
        self._engine = agentrt.Engine(
            setting.folder,
            dtype=setting.dtype,
            threads=setting.threads,
            max_context=setting.context,
            kv_tokens=setting.kv_bytes // token,
            process=False,
        )
        self.about = f"agentrt {agentrt.__version__}, {self._engine.facts.dtype}"

    def answer(self, ask: Ask) -> Told:
        before = self._engine.stats()
        completions = self._engine.generate(ask.prompts, [_sampling(ask, number) for number in range(len(ask.prompts))])
        after = self._engine.stats()
        computed, passes = (after[name] - before.get(name, 0) for name in ("computed_tokens", "steps"))
        return Told([list(completion.token_ids) for completion in completions], computed=computed, passes=passes)


def _sampling(ask: Ask, number: int) -> agentrt.SamplingParams:
    if ask.schemas:
        return agentrt.SamplingParams(max_tokens=ask.max_tokens, temperature=0, json_schema=ask.schemas[number])
    return agentrt.SamplingParams(max_tokens=ask.max_tokens, temperature=0, ignore_eos=True)


if __name__ == "__main__":
    serve(Agentrt)
