"""The automaton's masks are those of outlines-core's own token index, and of trying every token."""

import numpy as np
import outlines_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.errors import GrammarError
from agentrt.grammar import GrammarCache, check_schema, compile_ahead, json_schema_spec
from agentrt.grammar import regex_syntax as syntax
from agentrt.grammar.automaton_store import AutomatonStore
from agentrt.grammar.killable import PatternCompiler, TooManyStatesError
from agentrt.grammar.regex_fsm import FsmMatcher, TokenFsm, automaton_of_choices, byte_automaton
from agentrt.grammar.regex_worker import SENTINEL
from agentrt.grammar.vocabulary import vocabulary_of
from agentrt.request import GrammarSpec

PATTERNS = ["yes|no|maybe", "(?:ab|abcd)(?:e|)", r"\d{4}-\d{2}(?:-foobar)?", '\\{"name": "[a-z_]{1,8}"(?:, "city": "[^"]*")?\\}', "é[à-ü]+|漢*", "(a|b)*abb"]


def bits(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def fsm_of(pattern, tokenizer):
    node = syntax.whole(syntax.parse(pattern))
    return TokenFsm(byte_automaton(syntax.write(node), syntax.size(node), 20), vocabulary_of(tokenizer))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_those_of_outlines_cores_index(pattern, trained_tokens):
    """The token index over the real vocabulary, with the sentinel cut off, gives the same tokens in every state reached."""
    fsm = fsm_of(pattern, trained_tokens)
    by_bytes: dict[bytes, list[int]] = {}
    for i in range(trained_tokens.vocab_size):
        if trained_tokens.token_bytes(i):
            by_bytes.setdefault(trained_tokens.token_bytes(i), []).append(i)
    mark = trained_tokens.vocab_size
    vocabulary = outlines_core.Vocabulary(mark + 1, by_bytes | {SENTINEL.encode(): [mark]})
    written = syntax.write(syntax.whole(syntax.parse(pattern)))
    index = outlines_core.Index(f"(?:{written}){SENTINEL}", vocabulary)
    seen, stack = set(), [(fsm.automaton.start, index.get_initial_state())]
    while stack and len(seen) < 300:
        pair = stack.pop()
        if pair in seen:
            continue
        seen.add(pair)
        ours = bits(fsm.mask(pair[0]))
        theirs = set(index.get_allowed_tokens(pair[1]) or []) - {mark + 1}
        assert (ours - {0, 1} | ({mark} if ours & {0, 1} else set())) == {t for t in theirs if t == mark or _alive(fsm, pair[0], t)}
        for token in sorted(ours - {0, 1})[:12]:
            following = fsm.automaton.walk(pair[0], trained_tokens.token_bytes(token))
            stack.append((following, index.get_next_state(pair[1], token)))
    assert len(seen) > 3


def _alive(fsm, state, token):
    """Whether the token's bytes lead anywhere; the index also keeps ways that only the sentinel's bytes could end."""
    return fsm.automaton.walk(state, fsm.vocabulary.token_bytes(token)) >= 0


@pytest.mark.parametrize(("pattern", "states"), [("-?(0|[1-9][0-9]{0,18})", 21), ("a[0-9]{0,200}", 202), ("[a-c]x?[a-z]{0,60}", None)])
def test_bounded_repeats_cost_a_state_each(pattern, states, byte_tokens):
    """outlines-core also prepares for matches that begin anywhere, which takes 2**n states unless a first sentinel rules that out."""
    fsm = fsm_of(pattern, byte_tokens)
    assert len(fsm.automaton) == states or (states is None and len(fsm.automaton) < 200)
    assert (fsm.automaton.table[fsm.automaton.start] >= 0).any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text("abé ", min_size=1, max_size=6), min_size=1, max_size=8, unique=True), st.data())
def test_choices_accept_exactly_themselves(trained_tokens, choices, data):
    fsm = TokenFsm(automaton_of_choices([c.encode() for c in choices]), vocabulary_of(trained_tokens))
    matcher, taken = FsmMatcher(fsm), b""
    while not matcher.finished:
        mask = np.zeros(fsm.vocabulary.words, dtype=np.int32)
        matcher.fill(mask)
        allowed = sorted(bits(mask) - {0, 1})
        viable = [c.encode() for c in choices if c.encode().startswith(taken)]
        assert matcher.accepting == (taken in viable)
        assert allowed, "the prefix tree has no dead ends"
        if matcher.accepting and data.draw(st.booleans()):
            break
        token = data.draw(st.sampled_from(allowed))
        assert matcher.advance(token)
        taken += trained_tokens.token_bytes(token)
    assert taken.decode() in choices


def test_every_state_reaches_the_end(byte_tokens):
    """`x` may go on with what can never end; such ways are cut away."""
    node = syntax.Alt((syntax.literal("ab"), syntax.Seq((syntax.literal("x"), syntax.Chars(())))))
    automaton = byte_automaton(syntax.write(node), 3, 20)
    assert automaton.walk(automaton.start, b"x") == -1
    assert automaton.chain(automaton.start) == (b"ab", automaton.walk(automaton.start, b"ab"))


def test_rollback_takes_back_exactly_what_was_taken(trained_tokens):
    matcher = FsmMatcher(fsm_of(PATTERNS[3], trained_tokens))
    masks, ids = [], trained_tokens.encode('{"name": "bob", "city": "Rome"}')
    for token in ids:
        mask = np.zeros(matcher._fsm.vocabulary.words, dtype=np.int32)
        matcher.fill(mask)
        masks.append(mask)
        assert matcher.advance(token)
    assert matcher.finished
    for count in range(1, len(ids) + 1):
        matcher.rollback(1)
        mask = np.zeros_like(masks[0])
        matcher.fill(mask)
        assert (mask == masks[-count]).all()


def test_a_pattern_that_explodes_is_killed_and_the_next_one_works():
    compiler = PatternCompiler()
    with pytest.raises(GrammarError, match="needs more than"):
        compiler.compile("[ab]*a[ab]{24}", 50_000, 1.0)
    table, accepting, start = compiler.compile("ab", 50_000, 30.0)
    assert table.shape[1] == 256
    assert accepting.sum() == 1
    assert table[start, ord("a")] >= 0
    with pytest.raises(TooManyStatesError, match="limit is 10"):
        compiler.compile("a{30}", 10, 30.0)
    compiler.close()


def test_the_store_gives_back_what_it_was_given_and_stays_small(tmp_path):
    automaton = byte_automaton("(?:a|b)+c", 4, 20)
    spec = GrammarSpec("regex", "(?:a|b)+c")
    store = AutomatonStore(tmp_path, max_bytes=1)
    path = store.save(spec, automaton)
    again = store.load(spec)
    assert again is not None
    assert (again.table == automaton.table).all()
    assert (again.columns == automaton.columns).all()
    assert again.start == automaton.start
    store.save(GrammarSpec("regex", "x"), byte_automaton("x", 1, 20))
    assert store.load(spec) is None, "the older file went when the folder was over its bound"
    path.write_bytes(b"not a table")
    assert store.load(spec) is None, "a broken file counts as absent"


def test_a_full_disk_leaves_nothing_half_kept(tmp_path, monkeypatch):
    def full(file, **_):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("agentrt.grammar.automaton_store.np.savez_compressed", full)
    with pytest.raises(OSError, match="no space"):
        AutomatonStore(tmp_path).save(GrammarSpec("regex", "x"), byte_automaton("x", 1, 20))
    assert list(tmp_path.iterdir()) == []


def test_a_schema_compiled_ahead_takes_the_automaton_without_being_asked(tmp_path, monkeypatch, byte_tokens):
    monkeypatch.setenv("AGENTRT_HOME", str(tmp_path))
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    told = compile_ahead([closed, {"type": "object"}])
    assert told[0][1] is not None
    assert told[1][1] is None
    assert "open to properties" in told[1][0] or "any JSON" in told[1][0]
    spec = json_schema_spec(closed)
    assert GrammarCache().compile(spec, byte_tokens).engine == "fsm"
    monkeypatch.setenv("AGENTRT_HOME", str(tmp_path / "elsewhere"))
    assert GrammarCache().compile(spec, byte_tokens).engine == "llguidance"


def test_what_check_says_is_what_happens():
    report = check_schema({"type": "object", "properties": {"a": {"uniqueItems": True, "type": "array"}}, "additionalProperties": False})
    assert ("/properties/a", "uniqueItems", "CHECKED") in [row[:3] for row in report.rows]
    assert "held back" in report.summary[0]
    assert not report.regular
    refused = check_schema({"$ref": "http://localhost:1/x"})
    assert refused.rows[0][:3] == ("/", "$ref", "REJECTED")
    assert "refused" in refused.summary[0]
    assert check_schema(dict[str, int]).error == ""
    assert check_schema({"enum": ["a", "b"]}).states > 2
