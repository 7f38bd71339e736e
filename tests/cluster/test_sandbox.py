"""The sandbox of chat templates: nothing that a template can print has an address of an object."""

from __future__ import annotations

import re
from copy import deepcopy

import jinja2
import pytest
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE
from transformers.utils.chat_template_utils import _compile_jinja_template

from cluster.chat_template import ERRORS, compile_template, render

MESSAGES = [{"role": "user", "content": "Once upon a time", "parts": [1, 2.5, True, None, ["x"], {"y": "z"}]}]
ADDRESS = re.compile(r"0x[0-9a-f]{4,}")
GLOBALS = (*DEFAULT_NAMESPACE, "raise_exception", "strftime_now")
VALUES = (
    "messages", "messages[0]", "messages[0].content", "messages[0].parts", "1", "1.5", "true", "none", "('a', 1)",
    "range(3)", "dict(a=1)", "cycler('a', 'b')", "joiner('-')", "namespace(a=1)", "'x'.encode()", "'x' | e",
    "messages[0].keys()", "messages[0].values()", "messages[0].items()", "messages | map('upper')",
    "strftime_now('%Y')",
    "range", "dict", "cycler", "joiner", "namespace", "lipsum", "raise_exception", "strftime_now", "nothing",
    "'x'.upper", "'{}'.format", "messages[0].get", "messages[0]['get']", "messages | reverse", "'x' | attr('upper')",
)  # fmt: skip
PRINTS = (
    "{{ V }}", "{{ [V] }}", "{{ {'a': V} }}", "{{ (V,) | string }}", "{{ '%s %r' % (V, V) }}", "{{ V ~ '' }}",
    "{{ '{} {!r}'.format(V, V) }}", "{{ V | pprint }}", "{{ [V] | join }}", "{{ V | list }}",
    "{{ raise_exception(V) }}",
    "{% set x = V %}{% for y in [x] %}{{ loop }}{{ loop.cycle }}{{ loop.changed }}{{ y }}{% endfor %}",
    "{% set ns = namespace(v=V) %}{{ ns }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(V, V, b=V) }}",
    "{{ {}[V] }}", "{{ V | tojson }}", "{{ V + V }}", "{{ [1].index(V) }}", "{{ V | dictsort }}",
    "{{ V.nothing.more }}",
)  # fmt: skip


def printed(template: str) -> str:
    """Returns the template's text, or its error's, which callers see as well."""
    try:
        return render(compile_template(template), deepcopy(MESSAGES), {"bos_token": "<s>"}, answer=True)
    except (*ERRORS, jinja2.TemplateError, RecursionError, OverflowError) as error:
        return str(error)


@pytest.mark.parametrize("value", VALUES)
def test_no_print_of_a_value_has_an_address(value: str) -> None:
    for template in PRINTS:
        source = template.replace("V", value)
        assert not ADDRESS.search(printed(source)), source


@pytest.mark.parametrize("value", VALUES)
def test_no_attribute_or_filter_of_a_value_has_an_address(value: str) -> None:
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    attributes = set().union(*(names(kind) for kind in (str, bytes, int, float, list, dict, tuple, range, set)))
    attributes |= {"next", "current", "reset", "items", "sep", "used", "name", "arguments", "index", "mro", "_inner"}
    for name in sorted(attributes):
        for source in (f"{{{{ {value}.{name} }}}}", f"{{{{ ({value})['{name}'] }}}}", f"{{{{ {value}.{name}() }}}}"):
            assert not ADDRESS.search(printed(source)), source
    for name in sorted(DEFAULT_FILTERS):
        for source in (f"{{{{ {value} | {name} }}}}", f"{{{{ [{value}] | map('{name}') | list }}}}"):
            assert not ADDRESS.search(printed(source)), source


@pytest.mark.parametrize(
    "source",
    [
        "{% block title %}x{% endblock %}{{ self }}{{ self.title }}{{ self['title'] }}",
        "{% block title %}{{ super }}{{ super.super }}{% endblock %}",
        "{% macro m() %}{{ caller }}{{ m }}{{ m.arguments }}{% endmacro %}{% call m() %}{{ m }}{% endcall %}",
        "{% for a in [[1]] recursive %}{{ loop }}{{ loop.depth }}{{ loop(a) if a is iterable else a }}{% endfor %}",
        "{{ messages | map(attribute='get') | list }}{{ messages | map('attr', 'get') | list }}",
        "{{ messages | groupby('role') }}{{ messages | batch(2) }}{{ messages | slice(2) }}{{ messages | unique }}",
        "{{ cycler.current }}{{ cycler.next }}{{ joiner.sep }}{{ dict.fromkeys }}{{ range.start }}{{ namespace.x }}",
        "{{ '{0.get} {0[get]} {1}'.format(messages[0], raise_exception) }}",
        "{{ 'x'.format_map }}{{ '{a}'.format_map({'a': range}) }}{{ ('x' | e).join }}",
    ],
)
def test_jinja_s_own_objects_have_no_address(source: str) -> None:
    assert not ADDRESS.search(printed(source))


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages if m.role in ['user'] %}{{ loop.index }}{{ m.content.upper() | trim }}{% endfor %}",
        "{{ messages | map(attribute='role') | join(',') }}"
        "{{ (messages | selectattr('role', 'equalto', 'user') | first).role }}",
        "{% if messages | map('upper') %}a generator is true{% endif %}{{ messages | reverse | list | length }}",
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}"
        "{{ c.current }}{% set j = joiner('-') %}{{ j() }}{{ j() }}",
        "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
        "{% macro m(x) %}<{{ x }}{{ caller() if caller else '' }}>{% endmacro %}"
        "{{ m('a') }}{% call m('b') %}c{% endcall %}",
        "{{ messages[0].items() | list | length }}{{ messages[0] | tojson }}{{ messages | groupby('role') | length }}",
        "{{ '{:>5}|{a}'.format('x', a=1) }}{{ 'a-b'.split('-') }}{{ 'abc'[::-1] }}{{ dict(a=1) }}"
        "{{ range is callable }}",
        "{% block t %}x{% endblock %}{{ self.t() }}{% for x in [1, 2] %}{{ loop.cycle('p', 'q') }}"
        "{{ loop.changed(x) }}{% endfor %}",
        "{% for a in [[1, [2]]] recursive %}{{ loop(a) if a is not number else a }}{% endfor %}"
        "{{ none }}{{ true }}{{ 1.5 }}",
        "{{ messages[0].parts | select('number') | list }}{{ messages[0].parts[5].y }}"
        "{{ messages[-1]['content'][:4] }}",
    ],
)
def test_templates_render_as_in_transformers(source: str) -> None:
    expected = _compile_jinja_template(source).render(messages=MESSAGES, add_generation_prompt=True)
    assert printed(source) == expected
