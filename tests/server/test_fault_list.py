"""The list of faults that engines of this kind have shown in public, and which test of ours holds each one; and what is nowhere in the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
CHECKOUT = TESTS.parent

KNOWN, TINY, OPERATING = "server/test_known_faults.py", "server/test_known_faults_tiny.py", "server/test_operating.py"
BAD = (KNOWN, "test_a_bad_request_is_a_400_and_the_next_one_succeeds")

FAULTS = {
    "an empty prompt, a list of empty prompts, a tokenizer without BOS": BAD,
    "logit_bias with an id beyond the vocabulary": BAD,
    "a regex that does not compile, an invalid schema, an empty schema string": BAD,
    "a pathological regex or schema": (KNOWN, "test_a_hostile_schema_is_bounded_and_disturbs_nobody"),
    "recursive $ref": (KNOWN, "test_what_others_drop_holds_or_is_refused"),
    "an escape in a pattern that the engine lacks": (KNOWN, "test_a_pattern_that_cannot_be_enforced_is_checked_or_refused_and_never_dropped"),
    "required without properties, uniqueItems, multipleOf": (KNOWN, "test_what_others_drop_holds_or_is_refused"),
    "a prompt longer than the context": (KNOWN, "test_a_prompt_beyond_the_context_names_both_numbers"),
    "echo with max_tokens 0": (KNOWN, "test_echo_of_a_prompt_with_scores_generates_nothing"),
    "logprobs under a grammar": (KNOWN, "test_scores_under_a_grammar_are_finite"),
    "58 tools with 100 kB of schemas": (KNOWN, "test_many_tools_with_large_schemas_work"),
    "a greedy answer cold, warm, and among others": (KNOWN, "test_greedy_is_the_same_cold_warm_and_among_others"),
    "the whole prompt is cached": (KNOWN, "test_greedy_is_the_same_cold_warm_and_among_others"),
    "an abort in mid-prefill, then the same prefix": (KNOWN, "test_an_abort_in_mid_prefill_leaves_nothing_wrong"),
    "a tiny pool, many requests, constant eviction": (TINY, "test_a_tiny_pool_under_constant_eviction_equals_the_reference_and_starves_nobody"),
    "prefixes that part inside a page": (TINY, "test_prefixes_that_part_inside_a_page_reuse_whole_pages_and_answer_right"),
    "a long mixed load, then idle": ("server/test_soak.py", "test_ten_seconds_of_everything_leak_nothing"),
    "a deep queue aborted at once": (KNOWN, "test_a_deep_queue_aborted_at_once_leaks_nothing"),
    "the client hangs up in mid-stream": (OPERATING, "test_a_client_that_hangs_up_frees_its_slots"),
    "fits the context but not the pool": (TINY, "test_what_fits_the_context_but_not_the_pool_is_a_400_with_both_numbers"),
    "one running request exhausts the pool": (TINY, "test_one_running_request_that_exhausts_the_pool_is_preempted_and_the_others_go_on"),
    "long-prefix-match scheduling under load": (TINY, "test_a_chain_of_better_matches_starves_nobody"),
    "a tool call streamed up to max_tokens": (KNOWN, "test_calls_cut_by_max_tokens_end_with_length"),
    "two tool calls streamed": (KNOWN, "test_two_streamed_calls_have_indices_and_ids_of_their_own"),
    "a reasoning model with json_schema": ("server/test_units.py", "test_over_http_a_reasoning_model_gives_thoughts_and_then_json"),
    "a stop string split over tokens": (KNOWN, "test_a_stop_string_split_over_tokens_never_leaks"),
    "a stop inside a forced run": (KNOWN, "test_a_stop_inside_a_forced_run_never_leaks"),
    "JSON mode with a weak model": (KNOWN, "test_json_mode_with_a_weak_model_never_runs_on_in_blanks"),
    "a retry after 503": (OPERATING, "test_a_full_queue_is_a_503_every_time"),
    "the engine is stopped in mid-step": (OPERATING, "test_an_engine_that_is_silent_is_told_of_and_forgiven"),
    "the engine dies": (OPERATING, "test_a_dead_engine_fails_what_is_pending_and_says_so"),
    "a chat template that loops": (TINY, "test_a_hostile_chat_template_is_a_400_and_the_next_request_succeeds"),
    "a chat template that reaches for attributes": (TINY, "test_a_hostile_chat_template_is_a_400_and_the_next_request_succeeds"),
    "pickle, eval, torch.load": ("server/test_fault_list.py", "test_nothing_that_runs_what_it_reads_is_anywhere_in_the_code"),
    "binding to every interface by default": (OPERATING, "test_it_binds_to_this_machine_alone_unless_told"),
    "tenants that share a prefix": (KNOWN, "test_salts_keep_tenants_apart"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_has_a_test(fault):
    path, name = FAULTS[fault]
    tree = ast.parse((TESTS / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path} has no {name}"


#: Who may pickle: processes of ours that talk over pipes which nobody else holds.
OWN_PIPES = {"agentrt/backends/hosts.py", "agentrt/grammar/killable.py", "agentrt/grammar/regex_worker.py"}


RUNS_WHAT_IT_READS = ("pickle", "marshal", "shelve", "dill", "cloudpickle")


def test_nothing_that_runs_what_it_reads_is_anywhere_in_the_code():
    found = []
    for path in [*CHECKOUT.glob("agentrt/**/*.py"), *CHECKOUT.glob("kernels/**/*.py")]:
        name, text = path.relative_to(CHECKOUT).as_posix(), path.read_text()
        if not any(word in text for word in (*RUNS_WHAT_IT_READS, "eval", "exec", "torch.load", "os.system")):
            continue
        for node in ast.walk(ast.parse(text)):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [(name, module) for module in imported if module.split(".")[0] in RUNS_WHAT_IT_READS and name not in OWN_PIPES]
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                found += [(name, called)] if called in ("eval", "exec", "torch.load", "os.system") else []
    assert found == []
