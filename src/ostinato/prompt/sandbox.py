"""Jinja as chat templates know it, in a sandbox with a bound on time and on size.

A chat template is code out of a model's folder. It gets what transformers gives it (filters, globals, tags
and white-space rules), cannot reach Python's insides (Jinja's immutable sandbox), and cannot run away: every
turn of a loop, every call and every filter looks at the clock, and nothing it builds may outgrow the limit.
A single operation on data within the limit cannot be interrupted; it is short.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ..errors import TemplateError
from ..ports import Clock, local_strftime
from .watched import INSERTED, Inserted, Watch, watch_loop, watched

# Widths and counts above this serve no prompt, and make small programs build large things.
_MAX_COUNT = 100_000
_COUNTED = frozenset(
    {
        "batch",
        "center",
        "expandtabs",
        "indent",
        "ljust",
        "rjust",
        "round",
        "slice",
        "tojson",
        "wordwrap",
        "zfill",
    }
)
_MAX_INT_BITS = 1 << 16
_MAX_WORK_FACTOR = 16

# What template code can raise besides Jinja's own errors.
_TEMPLATE_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may take: seconds, and characters of any one string it builds.

    All strings it builds on the way may together have 16 times as many.
    """

    timeout_s: float = 5.0
    max_chars: int = 32 * 1024 * 1024


@dataclass(slots=True)
class _Allowance:
    """What is left of the limits."""

    clock: Clock
    limits: Limits
    deadline_s: float
    chars_left: int

    def check_time(self) -> None:
        if self.clock.monotonic() > self.deadline_s:
            raise TemplateError(f"the chat template did not end within {self.limits.timeout_s:g} s")

    def check_size(self, num_chars: int) -> None:
        if num_chars > self.limits.max_chars:
            raise TemplateError(f"the chat template builds more than {self.limits.max_chars} characters")

    def spend(self, value: Any) -> Any:
        """Account for a value just built."""
        if type(value) is str:  # nearly always, and many times per message
            num_chars = len(value)
            self.chars_left -= num_chars
            if num_chars <= self.limits.max_chars and self.chars_left >= 0:
                return value
        elif not isinstance(value, str | list | tuple):
            return value
        else:
            self.chars_left -= len(value)
        self.check_size(len(value))
        if self.chars_left < 0:
            raise TemplateError("the chat template builds too many long strings")
        return value


_allowance: ContextVar[_Allowance] = ContextVar("allowance")


class SandboxedTemplate:
    """One compiled template.

    Args:
        source: the template's text.
        clock: for ``strftime_now`` and for the time limit.
        limits: what one rendering may take.

    ``reach`` is a number where its loop over the messages can be watched (:func:`watch_loop`).

    Raises:
        TemplateError: the text is not a Jinja template.
    """

    def __init__(self, source: str, *, clock: Clock, limits: Limits) -> None:
        self._clock = clock
        self._limits = limits
        self._environment = _Environment(clock)
        try:
            self.tree = self._environment.parse(source)
            self._template = self._compiled(self._environment.parse(source))
            watched_tree = self._environment.parse(source)
            self.reach = watch_loop(watched_tree, self._environment)
            self._watched = None if self.reach is None else self._compiled(watched_tree)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid Jinja: {error.message} (line {error.lineno})"
            ) from error

    def _compiled(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        environment = self._environment
        code = self._bounded(lambda: environment.compile(_Meter(environment).visit(tree)))
        return jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text for ``variables``, which must be made of JSON types.

        Raises:
            TemplateError: the template refuses, fails, or goes beyond the limits.
        """
        return self._guarded(lambda: self._template.render(variables))

    def render_watched(self, variables: Mapping[str, Any], watch: Watch) -> str:
        """The same with marks, and from where ``watch`` says; only where ``reach`` is a number.

        Raises:
            PartedError: it cannot go on from there.
            TemplateError: as above.
        """
        template = self._watched
        assert template is not None, "this template has no loop to watch"

        def render() -> str:
            watch.allowance = _allowance.get()
            return watched(watch, lambda: template.render(variables))

        return self._guarded(render)

    def _guarded(self, render: Callable[[], str]) -> str:
        try:
            text: str = self._bounded(render)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses this conversation: {error.message}") from error
        except RecursionError as error:
            raise TemplateError("the chat template recurses too deeply") from error
        except _TEMPLATE_FAULTS as error:
            raise TemplateError(f"the chat template fails: {type(error).__name__}: {error}") from error
        return text

    def _bounded(self, action: Callable[[], Any]) -> Any:
        limits = self._limits
        allowance = _Allowance(
            self._clock,
            limits,
            deadline_s=self._clock.monotonic() + limits.timeout_s,
            chars_left=limits.max_chars * _MAX_WORK_FACTOR,
        )
        token = _allowance.set(allowance)
        try:
            return action()
        finally:
            _allowance.reset(token)


# ---------------------------------------------------------------- bounds


def _tick() -> bool:
    _allowance.get().check_time()
    return True


def _weigh(value: Any) -> None:
    """Check the size of ``value`` written as text, without writing it: nested lists can share parts, and
    then take little memory but endless text."""
    check_size = _allowance.get().check_size
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        total += 1
        check_size(total)


def _join_parts(*parts: Any) -> str:
    """What ``~`` does."""
    for part in parts:
        _weigh(part)
    return _concat(map(str, parts))


def _concat(parts: Iterable[str]) -> str:
    """What Jinja joins the pieces of a body with."""
    allowance = _allowance.get()
    kept = []
    total = 0
    for part in parts:
        total += len(part)
        allowance.check_size(total)
        kept.append(part)
    text: str = allowance.spend("".join(kept))
    return text


def _finalize(value: Any) -> Any:
    if not isinstance(value, str):
        _weigh(value)
    return value


def _joinable(separator: Any, parts: Any) -> list[Any]:
    """``parts`` as a list that is short enough to be joined."""
    allowance = _allowance.get()
    width = len(separator) if isinstance(separator, str) else 0
    kept = []
    total = 0
    for part in parts:
        allowance.check_time()
        total += width + (len(part) if isinstance(part, str) else 1)
        allowance.check_size(total)
        kept.append(part)
    _weigh(kept)
    return kept


# A width or precision of six digits, or one that is given as an argument.
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|\d{6,})|\{[^{}:]*:[^{}]*(\{|\d{6,})")


def _check_arguments(name: str, subject: Any, given: tuple[Any, ...]) -> None:
    """Refuse, before it is done, what would build something vast out of little."""
    allowance = _allowance.get()
    allowance.check_time()
    if name in _COUNTED and any(isinstance(value, int) and abs(value) > _MAX_COUNT for value in given):
        raise TemplateError(f"the chat template calls {name} with a number above {_MAX_COUNT}")
    if not isinstance(subject, str):
        return
    if name in ("format", "format_map"):
        if _WIDE.search(subject):
            raise TemplateError(f"the chat template formats with {subject[:64]!r}, which is too wide")
        for value in given:
            _weigh(value)
    if name == "replace" and len(given) > 1 and isinstance(given[0], str) and isinstance(given[1], str):
        allowance.check_size(len(subject) + subject.count(given[0]) * len(given[1]))


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that keeps within the limits. Its subject comes first, or after what Jinja passes in."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def filter_function(*args: Any, **kwargs: Any) -> Any:
        passed, subject, given = args[:first], args[first], args[first + 1 :]
        if name == "join" and not isinstance(subject, str | jinja2.Undefined):
            subject = _joinable(kwargs.get("d", given[0] if given else ""), subject)
        elif name in ("string", "tojson", "pprint"):
            _weigh(subject)
        _check_arguments(name, subject, (*given, *kwargs.values()))
        return _allowance.get().spend(function(*passed, subject, *given, **kwargs))

    return filter_function


class _Meter(NodeTransformer):
    """Puts a look at the clock into every loop and macro, and a look at the size into every ``~``."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def _call(self, name: str, arguments: list[jinja2.nodes.Expr], lineno: int) -> jinja2.nodes.Call:
        function = jinja2.nodes.EnvironmentAttribute(name)
        call = jinja2.nodes.Call(function, arguments, [], None, None)
        call.set_lineno(lineno, override=True)
        call.set_environment(self._environment)
        return call

    def _tick_statement(self, lineno: int) -> jinja2.nodes.ExprStmt:
        return jinja2.nodes.ExprStmt(self._call("tick", [], lineno), lineno=lineno)

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802 - the visitor's protocol
        self.generic_visit(node)
        node.body.insert(0, self._tick_statement(node.lineno))
        if node.test is not None:
            node.test = jinja2.nodes.And(self._call("tick", [], node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, self._tick_statement(node.lineno))
        return node

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.CallBlock:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, self._tick_statement(node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return self._call("join_parts", node.nodes, node.lineno)


# ---------------------------------------------------------------- the environment


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_concat)
    tick = staticmethod(_tick)
    join_parts = staticmethod(_join_parts)

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            optimized=False,
            finalize=_finalize,
        )
        for name, function in INSERTED.items():  # reached by the nodes we insert, by no template text
            setattr(self, name, function)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format_text: local_strftime(clock.now(), format_text)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        # Chance comes in by argument or not at all.
        del self.globals["lipsum"]
        del self.filters["random"]
        self.filters["tojson"] = _tojson
        for name, function in self.filters.items():
            self.filters[name] = _metered(name, function)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        allowance = _allowance.get()
        if operator == "+":  # nearly always, and nothing can be too large before it is done
            return allowance.spend(left + right)
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    allowance.check_size(len(sequence) * count)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            factor = right if operator == "**" else 1
            extra = 0 if operator == "**" else right.bit_length()
            if left.bit_length() * abs(factor) + extra > _MAX_INT_BITS:
                raise TemplateError("the chat template computes a number that is too large")
        if operator == "%" and isinstance(left, str):
            _check_arguments("format", left, (right,))
        return allowance.spend(self.binop_table[operator](left, right))

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if obj is _tick:
            return _tick()
        if type(obj) is Inserted:
            return obj(*args)
        # The sandbox wraps str.format, and functools keeps what it wrapped.
        name, function = getattr(obj, "__name__", ""), getattr(obj, "__wrapped__", obj)
        subject = getattr(function, "__self__", None)
        if name == "join" and isinstance(subject, str) and args:
            args = (_joinable(subject, args[0]), *args[1:])
        _check_arguments(name, subject, (*args, *kwargs.values()))
        return _allowance.get().spend(super().call(context, obj, *args, **kwargs))


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: Jinja's own filter escapes what HTML would mistake."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationTag(Extension):
    """``{% generation %}``: transformers marks the assistant's tokens with it; it writes its body."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(lineno)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` for templates, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` for templates, which can hold nothing under a private name."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may say namespace(self=...)
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the private name {name!r}")
