"""A chat template cannot run away, cannot grow without bound, and cannot reach out."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ostinato.errors import TemplateError
from ostinato.ports import SystemClock
from ostinato.prompt.sandbox import Limits, SandboxedTemplate

LIMITS = Limits(timeout_s=0.2, max_chars=1_000_000)


class FixedClock:
    """A moment, and seconds that pass with every look."""

    def __init__(self, now_s: float = 0.0, step_s: float = 0.0) -> None:
        self.now_s = now_s
        self.step_s = step_s
        self.looks = 0

    def now(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        self.looks += 1
        return self.looks * self.step_s


def render(source: str, limits: Limits = LIMITS, clock: Any = None, **variables: Any) -> str:
    return SandboxedTemplate(source, clock=clock or SystemClock(), limits=limits).render(variables)


DOUBLING = (
    "{% set ns = namespace(x='aaaaaaaaaa') %}{% for i in range(60) %}STEP{% endfor %}{{ ns.x | length }}"
)
NESTING = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
        "{{ range(99999) | map('tojson') | list | length }}" * 50,
        "{% for i in range(99999) %}{% for j in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    ],
)
def test_time_is_bounded(source: str) -> None:
    with pytest.raises(TemplateError, match=r"did not end within 0\.2 s"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 100000000000 }}",
        "{{ [1] * 100000000000 }}",
        "{{ 100000000000 * 'a' }}",
        DOUBLING.replace("STEP", "{% set ns.x = ns.x ~ ns.x %}"),
        DOUBLING.replace("STEP", "{% set ns.x = ns.x + ns.x %}"),
        DOUBLING.replace("STEP", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
        DOUBLING.replace("STEP", "{% set ns.x = ns.x | replace('a', 'aa') %}"),
        DOUBLING.replace("STEP", "{% set ns.x = ns.x.replace('a', 'aa') %}"),
        DOUBLING.replace("STEP", "{% set ns.x = [ns.x, ns.x] | join %}"),
        DOUBLING.replace("STEP", "{% set ns.x = ns.x.join(['a', 'b', 'c']) %}"),
        DOUBLING.replace("STEP", "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
        DOUBLING.replace("STEP", "{% set ns.x = '{0}{0}'.format(ns.x) %}"),
        DOUBLING.replace("STEP", "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}"),
        NESTING + "{{ ns.x }}",
        NESTING + "{{ ns.x | tojson }}",
        NESTING + "{{ ns.x ~ 'a' }}",
        NESTING + "{{ ns.x | string }}",
        NESTING + "{{ ns.x | join }}",
        "{{ range(99999) | map('center', 90000) | join }}",
        "{{ ','.join(range(99999) | map('center', 90000)) }}",
        "{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
    ],
)
def test_size_is_bounded(source: str) -> None:
    with pytest.raises(TemplateError, match="builds more than 1000000 characters"):
        render(source, Limits(timeout_s=30, max_chars=1_000_000))


def test_all_strings_together_are_bounded() -> None:
    with pytest.raises(TemplateError, match="too many long strings"):
        render("{{ range(99999) | map('center', 90000) | list | length }}", Limits(timeout_s=30))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ 'a' | center(1000000000) }}", "calls center with a number above"),
        ("{{ 'a'.ljust(1000000000) }}", "calls ljust with a number above"),
        ("{{ 'a' | indent(width=1000000000) }}", "calls indent with a number above"),
        ("{{ [1] | slice(10000000000) | list }}", "calls slice with a number above"),
        ("{{ [1] | tojson(indent=1000000000) }}", "calls tojson with a number above"),
        ("{{ '%1000000000d' % 1 }}", "too wide"),
        ("{{ '%*d' % (1000000000, 1) }}", "too wide"),
        ("{{ '%1000000000d' | format(1) }}", "too wide"),
        ("{{ '{:1000000000}'.format(1) }}", "too wide"),
        ("{{ '{:{w}}'.format(1, w=1000000000) }}", "too wide"),
        ("{{ '{x:1000000000}'.format_map({'x': 1}) }}", "too wide"),
        ("{{ 10 ** (10 ** 10) }}", "a number that is too large"),
        ("{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
         "a number that is too large"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recurses too deeply"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ [].append(1) }}", "unsafe"),
        ("{{ {}.update(a=1) }}", "unsafe"),
        ("{{ namespace(_a=1) }}", "private name '_a'"),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", "private name '_a'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
        ("{% include 'x' %}", "no loader"),
        ("{{ raise_exception('no way') }}", "refuses this conversation: no way"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ 'a' + 1 }}", "fails: TypeError"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("{{ {}['x'] + 'a' }}", "refuses"),
        ("{% if %}", r"not valid Jinja: .* \(line 1\)"),
        ("a\n{{ b", r"not valid Jinja: .* \(line 2\)"),
        ("{% generation %}", "not valid Jinja"),
    ],
)  # fmt: skip
def test_refused_by_name(source: str, says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        render(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ x | tojson }}", '{"b": "é<&>\'", "a": [1, 2.5, null]}'),
        ("{{ x | tojson(indent=1) }}", '{\n "b": "é<&>\'",\n "a": [\n  1,\n  2.5,\n  null\n ]\n}'),
        ("{{ x | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":[1,2.5,null],"b":"é<&>\'"}'),
        ("{{ x | tojson(ensure_ascii=true) }}", '{"b": "\\u00e9<&>\'", "a": [1, 2.5, null]}'),
        ("{% generation %}a{{ x.b }}{% endgeneration %}b", "aé<&>'b"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% for i in [1, 2] %}{{ loop.last ~ loop.length ~ loop.previtem | default('-') }}{% endfor %}",
         "False2-True21"),
        ("{% macro f(a, b=2) %}{{ a ~ b ~ caller() }}{% endmacro %}{% call f(1) %}c{% endcall %}", "12c"),
        ("{% set ns = namespace(self=1) %}{{ ns.self }}", "1"),
        ("{{ dict(a=1).a ~ dict.fromkeys(['k'], 2).k }}", "12"),
        ("{{ '%s is **%05.1f** 100%%' | format('x', 2) }}", "x is **002.0** 100%"),
        ("{{ '{0:>4}|{b}'.format(1, b='*') }}", "   1|*"),
        ("{{ ['a', 'b'] | join(', ') ~ ', '.join(['c']) }}", "a, bc"),
        ("{{ 1000000 | default(2000000) + 1 }}", "1000001"),
        ("{{ none }}{{ undefined }}{{ true }}{{ [1, 'a'] }}", "NoneTrue[1, 'a']"),
    ],
)  # fmt: skip
def test_the_language_is_transformers(source: str, expected: str) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    x = {"b": "é<&>'", "a": [1, 2.5, None]}
    assert render(source, x=x) == expected == _compile_jinja_template(source).render(x=x)


def test_the_date_comes_from_the_clock() -> None:
    noon = FixedClock(now_s=1_767_268_800.0)  # 2026-01-01T12:00:00Z
    assert render("{{ strftime_now('%d %b %Y') }}", clock=noon) == "01 Jan 2026"


def test_the_time_limit_is_the_clocks() -> None:
    loop = "{% for i in range(1000) %}{% endfor %}done"
    assert render(loop, clock=FixedClock(step_s=0.0)) == "done"
    with pytest.raises(TemplateError, match="did not end"):
        render(loop, clock=FixedClock(step_s=0.001))


def test_renderings_in_several_threads_have_their_own_limits() -> None:
    template = SandboxedTemplate(
        "{% for i in range(n) %}{{ 'a' }}{% endfor %}",
        clock=SystemClock(),
        limits=Limits(timeout_s=30, max_chars=500),
    )
    outcomes: dict[int, str] = {}

    def work(n: int) -> None:
        try:
            outcomes[n] = template.render({"n": n})
        except TemplateError as error:
            outcomes[n] = str(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 100, 499, 501, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(outcomes[n]) for n in (1, 100, 499)] == [1, 100, 499]
    assert all("more than 500 characters" in outcomes[n] for n in (501, 5000))
