"""A chat template ends, whatever it does: in a prompt, or in an error that says which limit it was beyond."""

import threading
import time

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from decodax.io import chat, sandbox
from decodax.io.chat import render_chat
from decodax.io.messages import ChatTemplateError

CHAT = [{"role": "system", "content": " S<y>s "}, {"role": "user", "content": "hé"},
        {"role": "assistant", "content": "ok", "tool_calls": [{"a": 1}]}]

DOUBLE = "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
LONG = "{% set a = 'a' * 900000 %}"

ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that take nothing": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}"
                               "{% endfor %}",
    "a recursive loop": "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}"
                        "{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
                                       "{{ f(60) }}",
    "a macro without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a block without an end": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "work without loops": LONG + "{% for i in range(99999) %}{% for j in range(99999) %}{% set b = a[1:] %}{% endfor %}"
                                 "{% endfor %}"}

LARGE = {
    "output": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "text": "{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}",
    "a variable": "{% set x %}{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endset %}",
    "a doubled variable": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}"
                          "{% endset %}{% set ns.x = y %}{% endfor %}",
    **{name: DOUBLE % pair for name, pair in {
        "+": ("'a'", "ns.x + ns.x"), "~": ("'a'", "ns.x ~ ns.x"), "*": ("3", "ns.x * ns.x"), "**": ("3", "ns.x ** 9"),
        "lists": ("[1]", "[ns.x, ns.x]"), "tuples": ("1", "(ns.x, ns.x)"), "dictionaries": ("1", "{1: ns.x, 2: ns.x}"),
        "calls": ("1", "dict(a=ns.x, b=ns.x)"), "namespaces": ("1", "namespace(a=ns.x, b=ns.x)"),
        "sums of lists": ("[1]", "[ns.x] + [ns.x]")}.items()},
    **{name: LONG + "{{ " + code + " }}" for name, code in {
        "times": "'a' * 10 ** 12", "list times": "[a] * 10 ** 12", "center": "'a'.center(10 ** 12)",
        "center of a constant": "'a'|center(1000000000000)", "zfill": "'a'.zfill(10 ** 12)",
        "tabs": "'\t'.expandtabs(10 ** 10)", "replace": "a.replace('a', a)", "replace nothing": "a.replace('', a)",
        "the filter replace": "a|replace('a', a)", "join": "a.join(a)", "the filter join": "a|join(a)",
        "join of many": "''.join([a] * 900000)", "%": "'%1000000000000d' % 1", "%*": "'%*d' % (10 ** 11, 1)",
        "% of many": "('%(a)s' * 99999) % {'a': a}", "format": "'{:>1000000000000}'.format(1)",
        "format by an argument": "'{:>{w}}'.format(1, w=10 ** 11)", "format of many": "('{0}' * 99999).format(a)",
        "format_map": "('{a}' * 99999).format_map({'a': a})", "the filter format": "'%1000000000000d'|format(1)",
        "indent": "('\n' * 900000)|indent(10 ** 6)", "tojson": "([1] * 900000)|tojson(indent=10 ** 9)",
        "map": "(['a'] * 900000)|map('center', 900000)|join", "wordwrap": "a|wordwrap(1, wrapstring=a)",
        "batch": "[1]|batch(10 ** 10, 'x')|list", "slice": "[1]|slice(10 ** 9)|list",
        "bytes": "(1).to_bytes(10 ** 11, 'big')", "translate": "a.translate({97: a})",
        "sum": "([[1] * 9] * 90000)|sum(start=[])", "string": "([[1] * 900] * 9000)|string"}.items()},
    "the template": "a" * 2_000_000}

FAILING = {"zero": "{{ 1 / 0 }}", "types": "{{ 1 + 'a' }}", "digits": "{{ 9 ** 99999 }}", "files": "{% include 'x' %}",
           "depth": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "garbage": "{{ lipsum(10 ** 9) }}",
           "comparison": DOUBLE % ("[1]", "[ns.x, ns.x]") + "{{ ns.x == ns.x }}"}


@pytest.mark.parametrize("template", [*ENDLESS.values(), *LARGE.values(), *FAILING.values()],
                         ids=[*ENDLESS, *LARGE, *FAILING])
def test_an_endless_or_exponential_template_ends_in_an_error(template, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    begin = time.monotonic()
    with pytest.raises(ChatTemplateError, match=r"chat template(, line 1)?: ."):
        render_chat(template, CHAT)
    assert time.monotonic() - begin < 10


def test_the_limits_hold_on_any_thread(monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    found = []

    def run(template):
        try:
            found.append(render_chat(template, CHAT))
        except ChatTemplateError as error:
            found.append(str(error))

    threads = [threading.Thread(target=run, args=(ENDLESS["work without loops"],)) for _ in range(3)]
    threads.append(threading.Thread(target=run, args=("{{ messages|length }}",)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == ["3", *["chat template: takes longer than 0.5 s"] * 3]


def test_limits_grow_with_the_messages():
    long = [{"role": "user", "content": "x" * 2_000_000}]
    template = "{% for m in messages %}{{ m.content ~ m.content }}{{ m.content|replace('x', 'yy') }}{% endfor %}"
    assert len(render_chat(template, long)) == 8_000_000
    many = [{"role": "user", "content": "x"}] * 3000
    loops = "{% for m in messages %}{% for i in range(300) %}{% endfor %}{% endfor %}done"
    assert render_chat(loops, many) == "done"


CONSTRUCTS = r"""
{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ m.role ~ ': ' ~ m['content'] }}{% else %}none{% endfor %}
{% for m in messages if m.role == 'user' %}{{ loop.index0 }}/{{ loop.length }} {{ m.content|trim }}{% endfor %}
{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages|tojson }}{{ tools|tojson(indent=2) }}
{% set a, b = 1, [2, 3] %}{{ a }}{{ b }}{{ (a, b) }}{{ {'x': a, 'y': [b]} }}{{ {'x': a}|tojson }}
{{ dict(a=1)|items|list }}
{% macro f(x, y=2) %}[{{ x }},{{ y }},{{ varargs }},{{ kwargs }}]{% endmacro %}{{ f(1) }}{{ f(1, 3, 4, z=5) }}
{% macro g() %}{{ caller('q') }}{% endmacro %}{% call(x) g() %}<{{ x }}>{% endcall %}
{% generation %}{{ 1 }}{% endgeneration %}
{% for x in [[1, [2, []]], 3] recursive %}{{ loop.depth }}:{{ loop(x) if x is iterable else x }}{% endfor %}
{% set ns = namespace(items=[]) %}{% for m in messages %}{% set ns.items = ns.items + [m.role] %}{% endfor %}
{{ ns.items|join(', ') }}
{{ nothing }}|{{ none }}|{{ 1.5 }}|{{ 3 // 2 }}{{ 3 / 2 }}{{ 2 ** 3 }}{{ 7 % 3 }}{{ -3 }}{{ 'ab' * 3 }}{{ [1] * 2 }}
{{ '%s-%d' % ('a', 3) }}
{{ messages|map(attribute='role')|list }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ messages|rejectattr('role', 'in', ['user'])|map(attribute='content')|join('|') }}{{ range(5)|batch(2)|list }}
{{ [1,1]|unique|list }}
{{ [3,1,2]|sort }}{{ [1,2,3]|sum }}{{ 'abc'|upper|replace('B','x') }}{{ 'x'|center(5) }}{{ 'a\nb'|indent(2) }}
{{ [1,2,3]|slice(2)|list }}
{{ 'abc'.upper().replace('A', 'b') }}{{ 'a,b'.split(',') }}{{ '{}-{a}'.format(1, a=2) }}{{ '{:>5}'.format('x') }}
{{ ', '.join(['a','b']) }}
{% set x %}captured {{ 1 + 1 }}{% endset %}{{ x|trim }}{% set y | upper %}low{% endset %}
{{ y }}{% filter upper %}abc {{ x }}{% endfilter %}
{% if messages[0].role == 'system' and messages|length > 1 or not messages %}yes{% elif 'a' in 'abc' %}in{% endif %}
{{ 1 < 2 < 3 }}
{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}
{% with z = 5 %}{{ z }}{% endwith %}{% block b %}block{{ 2 }}{% endblock %}{{ self.b() }}{{ cycler('a','b').next() }}
{{ 'a' ~ 1 ~ none ~ q }}{{ (1, 2) in [(1, 2)] }}{{ '<b>'|e ~ 'x' }}{{ ('<b>'|safe) ~ '<' }}{{ q|default('d') }}
{{ messages[5] }}{{ 5|string + 'a' }}
{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{{ loop.cycle('x', 'y') }}{{ loop.previtem }}{% endfor %}
{%- for m in messages -%}{{- m.content -}}{%- endfor -%}
{{ raise_exception('no') }}"""


@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], []], ids=["three", "two", "none"])
def test_a_bounded_template_writes_what_an_unbounded_one_does(messages):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                          extensions=[chat._Generation, loopcontrols])
    plain.filters["tojson"], plain.globals["raise_exception"] = chat._to_json, chat._raise
    given = dict(messages=messages, tools=[{"a": [1, {"b": None}]}], add_generation_prompt=True)
    lines = CONSTRUCTS.strip("\n").split("\n")
    for template in [*lines, "\n".join(lines[:-1])]:
        try:
            wanted = plain.from_string(template).render(documents=None, **given)
        except jinja2.TemplateError as error:
            with pytest.raises(ChatTemplateError, match=str(error)):
                render_chat(template, messages, tools=given["tools"])
        else:
            assert render_chat(template, messages, tools=given["tools"]) == wanted
