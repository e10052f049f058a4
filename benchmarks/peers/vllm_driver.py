"""vLLM's CPU build for `compare.py`: its engine in this process, compiled as it does by default, with its prefix cache on."""

from __future__ import annotations

import os

from driver import Ask, Setting, Told, natively_bfloat16, serve

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


class VLLM:
    def __init__(self, setting: Setting) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, setting.kv_bytes >> 30))
        import vllm

        self._vllm = vllm
        dtype = "bfloat16" if natively_bfloat16() else "float32"
        self._engine = vllm.LLM(
            setting.folder,
            dtype=dtype,
            max_model_len=setting.context,
            max_num_seqs=64,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.4,  # of the machine's memory, which others use too; the KV store has the size that was set
            disable_log_stats=True,
        )
        self.about = f"vLLM {vllm.__version__}, {dtype}"
        self._computed = self._passes = 0
        self._count_passes()

    def _count_passes(self) -> None:
        executor = self._engine.llm_engine.engine_core.engine_core.model_executor
        execute = executor.execute_model

        def counted(scheduled, *more, **named):
            self._computed += scheduled.total_num_scheduled_tokens
            self._passes += scheduled.total_num_scheduled_tokens > 0
            return execute(scheduled, *more, **named)

        executor.execute_model = counted

    def answer(self, ask: Ask) -> Told:
        computed, passes = self._computed, self._passes
        prompts = [{"prompt_token_ids": ids} for ids in ask.prompts]
        outputs = self._engine.generate(prompts, [self._sampling(ask, number) for number in range(len(prompts))], use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return Told(answers, computed=self._computed - computed, passes=self._passes - passes)

    def _sampling(self, ask: Ask, number: int):
        if not ask.schemas:
            return self._vllm.SamplingParams(max_tokens=ask.max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        from vllm.sampling_params import StructuredOutputsParams

        schema = StructuredOutputsParams(json=ask.schemas[number])
        return self._vllm.SamplingParams(max_tokens=ask.max_tokens, temperature=0, structured_outputs=schema)


if __name__ == "__main__":
    serve(VLLM)
