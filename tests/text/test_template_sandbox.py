from __future__ import annotations

import threading
import time

import pytest

from agentrt.errors import ModelError, PromptError
from agentrt.text.template_sandbox import SandboxedTemplate

NINES = "range(99999)"


@pytest.mark.parametrize(
    "source",
    [
        f"{{% for a in {NINES} %}}{{% for b in {NINES} %}}{{% endfor %}}{{% endfor %}}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=['ab']) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=['ab']) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set n = namespace(i=9) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}{{ n.i }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
        "{{ ('b' * 9999).join('a' * 9999) }}",
        f"{{{{ {NINES} | join('b' * 9999) }}}}",
        "{{ 'a' | indent(10 ** 9) }}",
        f"{{% for a in {NINES} %}}{{{{ 'x' * 9999 }}}}{{% endfor %}}",
    ],
)
def test_a_template_without_end_or_measure_is_stopped(source: str) -> None:
    template = SandboxedTemplate(source)
    begun = time.thread_time()
    with pytest.raises(PromptError, match="the model's chat template"):
        template.render({}, seconds=0.5)
    assert time.thread_time() - begun < 5


def test_the_limit_works_in_any_thread_and_leaves_the_others_alone() -> None:
    endless = SandboxedTemplate(f"{{% for a in {NINES} %}}{{% for b in {NINES} %}}{{% endfor %}}{{% endfor %}}")
    honest = SandboxedTemplate("{% for a in range(2000) %}{{ a % 10 }}{% endfor %}")
    errors: list[BaseException] = []

    def stray() -> None:
        try:
            endless.render({}, seconds=0.3)
        except PromptError as error:
            errors.append(error)

    threads = [threading.Thread(target=stray) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert len(honest.render({}, seconds=0.3)) == 2000
    for thread in threads:
        thread.join()
    assert len(errors) == 3


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include 'file' %}",
        "{% import 'os' as os %}",
    ],
)
def test_internals_and_changes_are_out_of_reach(source: str) -> None:
    messages = [{"role": "user"}]
    try:
        text = SandboxedTemplate(source).render({"messages": messages})
    except PromptError:
        text = ""
    assert text == ""
    assert messages == [{"role": "user"}]


def test_what_templates_of_the_hub_use_is_there() -> None:
    source = """
{%- generation %}{{ {'b': '<é>', 'a': [1]} | tojson }}{% endgeneration %}
{%- for x in [3, 1, 2] | sort %}
    {%- if loop.first %}{% continue %}{% endif %}
    {%- if x == 3 %}{% break %}{% endif %}
    {{- x }}/{{ loop.length }}
{%- endfor %}
{%- for k, v in {'k': 'v'}.items() %}{{ k ~ v ~ loop.last }}{% endfor %}
{%- for x in items | selectattr('n', 'gt', 1) %}{{ x.n }}{% endfor %}
{{- items | map(attribute='n') | join(', ') }}{{ {'a': 1} | tojson(indent=2) }}{{ strftime_now('%Y') | length }}{{ '%02d' % 7 }}{{ '{:>3}'.format(7) }}"""
    rendered = SandboxedTemplate(source).render({"items": [{"n": 1}, {"n": 2}]})
    assert rendered == '{"b": "<é>", "a": [1]}2/3kvTrue21, 2{\n  "a": 1\n}407  7'


def test_the_templates_own_words_are_told() -> None:
    with pytest.raises(PromptError, match="refuses these messages: roles must alternate"):
        SandboxedTemplate("{{ raise_exception('roles must alternate') }}").render({})
    with pytest.raises(PromptError, match="fails on these messages: UndefinedError"):
        SandboxedTemplate("{{ a.b.c }}").render({})
    with pytest.raises(ModelError, match="cannot be compiled"):
        SandboxedTemplate("{% for %}")
