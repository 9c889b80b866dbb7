"""A chat template whose loop over the messages is watched, so that a later rendering can go on from it.

Most templates are text, then a loop that writes message by message, then text. What a turn of that loop
writes is decided by its message, by what the template looks up around it, and by the variables the loop
started with. Where all of these are what they were, earlier turns write again what they wrote, and for a
conversation that has grown only the new turns need to run. None of this is assumed. What can be read off a
template is read off it (:func:`watch_loop`): the loop writes straight to the prompt, reaches other messages
by number only, never asks how many there are. What cannot is compared when the loop is entered: the list it
runs over is the end of the list of messages, and every variable its body can see has the value it had. The
text before and after the loop is rendered anew every time.

Marks that nobody can guess tell in the rendered text where the loop and its turns begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from operator import is_
from typing import Any, Final

import jinja2
import jinja2.idtracking
import jinja2.nodes
import jinja2.runtime
from jinja2.visitor import NodeTransformer

# What a loop may know of its turn: without looking ahead, and by looking no further than the next message.
_PLACES: Final = {"first": "watch_first", "index": "watch_index", "index0": "watch_index0"}
_AHEAD: Final = frozenset({"last", "nextitem"})
# What brings in text from elsewhere, or changes how it is read.
_FOREIGN: Final = (
    jinja2.nodes.Block,
    jinja2.nodes.Extends,
    jinja2.nodes.Include,
    jinja2.nodes.Import,
    jinja2.nodes.FromImport,
    jinja2.nodes.EvalContextModifier,
)


class PartedError(Exception):
    """The rendering cannot go on from the earlier one: something is not as it was."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Where a loop stood, to go on from there.

    ``offset`` messages stand before those it runs over, and ``count`` turns were done. ``seen`` are the
    variables its body can see as they were at its beginning; ``held`` is what the namespaces among them held
    after ``count`` turns; ``chars_left``, what was left of the rendering's allowance.
    """

    offset: int
    count: int
    seen: tuple[Any, ...]
    held: tuple[dict[str, Any], ...]
    chars_left: int


@dataclass(slots=True)
class Watch:
    """One rendering that is watched.

    Args:
        mark: what no text contains; it is written before the loop, before every turn and after the loop.
        messages: the very list that the template gets.
        reach: how many messages further than its own a turn may look.
        since: where to go on from.

    ``is_end``: the loop runs over the end of the messages. ``is_sound``: nothing speaks against going on.
    """

    mark: str
    messages: list[Any]
    reach: int
    since: Turns | None
    allowance: Any = None
    num_marks: int = 0
    place: int = -1
    offset: int = 0
    num_settled: int = -1
    is_end: bool = False
    is_sound: bool = False
    items: Any = None
    seen: tuple[Any, ...] = ()
    spaces: list[Any] = field(default_factory=list)
    settled: Turns | None = None

    def write_mark(self) -> str:
        self.num_marks += 1
        return self.mark

    def enter(self, items: Any, *values: Any) -> Any:
        """The loop begins; returns what it is to run over."""
        self.items = items
        self.offset = len(self.messages) - len(items) if type(items) is list else -1
        self.spaces = [value for value in values if isinstance(value, jinja2.utils.Namespace)]
        self.is_end = self.offset >= 0 and all(map(is_, items, islice(self.messages, self.offset, None)))
        self.is_sound = self.is_end and len(set(map(id, self.spaces))) == len(self.spaces)
        if self.is_sound:
            self.seen = tuple(map(_frozen, values))
            self.num_settled = max(0, len(items) - self.reach)
        since = self.since
        if since is None:
            return items
        if not self.is_sound or since.offset != self.offset or since.count > len(items):
            raise PartedError
        if not _same(since.seen, self.seen):
            raise PartedError
        for space, held in zip(self.spaces, since.held, strict=True):
            attributes = _attributes(space)
            attributes.clear()
            attributes.update(held)
        self.allowance.chars_left = since.chars_left
        self.place = since.count - 1
        return items[since.count :]

    def step(self) -> str:
        """A turn begins."""
        self.place += 1
        if self.place == self.num_settled:
            self._settle()
        return self.write_mark()

    def leave(self) -> str:
        """The loop is over."""
        if self.place + 1 == self.num_settled:
            self._settle()
        return self.write_mark()

    def _settle(self) -> None:
        """All turns so far would be the same in any longer conversation."""
        held = tuple(dict(_attributes(space)) for space in self.spaces)
        if self.num_settled == 0 or not self.is_sound:
            return
        if all(_is_plain(value) for attributes in held for value in attributes.values()):
            self.settled = Turns(self.offset, self.num_settled, self.seen, held, self.allowance.chars_left)

    def look(self, items: Any, number: Any) -> Any:
        """The template takes ``items[number]`` in the loop's body."""
        start = 0 if items is self.messages else self.offset
        is_known = (items is self.messages or items is self.items) and type(number) is int and number >= 0
        if not is_known or start + number > self.offset + self.place + self.reach:
            self.is_sound = False
        return items


_watch: ContextVar[Watch] = ContextVar("watch")


class Inserted:
    """A function that we put into a template, and that the sandbox lets pass."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


INSERTED: Final = {
    "watch_before": Inserted(lambda: _watch.get().write_mark()),
    "watch_enter": Inserted(lambda items, *values: _watch.get().enter(items, *values)),
    "watch_step": Inserted(lambda: _watch.get().step()),
    "watch_leave": Inserted(lambda: _watch.get().leave()),
    "watch_look": Inserted(lambda items, number: _watch.get().look(items, number)),
    "watch_first": Inserted(lambda: _watch.get().place == 0),
    "watch_index": Inserted(lambda: _watch.get().place + 1),
    "watch_index0": Inserted(lambda: _watch.get().place),
}


def watched(watch: Watch, render: Callable[[], str]) -> str:
    """``render()``, watched."""
    token = _watch.set(watch)
    try:
        return render()
    finally:
        _watch.reset(token)


# ---------------------------------------------------------------- values


def _attributes(space: Any) -> dict[str, Any]:
    """What a namespace holds; its class has no public way to ask."""
    attributes: dict[str, Any] = space._Namespace__attrs
    return attributes


def _is_plain(value: Any) -> bool:
    """Whether a value is made of JSON types, and so is all that can be known of it."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (str, bool, int, float)


def _frozen(value: Any) -> Any:
    """A value such that two can be compared, though a later turn changes it."""
    if isinstance(value, jinja2.utils.Namespace):
        return dict(_attributes(value))
    if isinstance(value, jinja2.Undefined):
        return (jinja2.Undefined, value._undefined_name)
    if isinstance(value, jinja2.runtime.Macro):  # what its body sees is among what is compared
        return (jinja2.runtime.Macro, value.name, value._func.__code__)
    return value


def _same(first: Any, second: Any) -> bool:
    """Whether two values print alike, test alike and are used alike; of unknown ones only the very same."""
    if first is second:
        return True
    kind = type(first)
    if kind is not type(second):
        return False
    if kind in (list, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if kind is dict:
        return _same(list(first), list(second)) and all(map(_same, first.values(), second.values()))
    return kind in (str, int, float) and bool(first == second)


# ---------------------------------------------------------------- templates


class _UnwatchableError(Exception):
    """This template's loop may depend on what is not seen."""


def watch_loop(tree: jinja2.nodes.Template, environment: jinja2.Environment) -> int | None:
    """Put a watch on the loop over the messages in ``tree``, which is changed.

    Returns:
        How many messages further than its own a turn may look (:class:`Watch`); ``None``, and a tree of no
        more use, where there is no loop that could be watched.
    """
    if any(True for _ in tree.find_all(_FOREIGN)):
        return None
    loops = [(beside, loop) for beside, loop in _loops(tree.body) if _iterated(loop) is not None]
    if not loops:
        return None
    beside, loop = loops[-1]
    name = _iterated(loop)
    if name is None or loop.test is not None or loop.else_ or loop.recursive:
        return None
    if not isinstance(loop.target, jinja2.nodes.Name):
        return None
    lists = frozenset({"messages", name})
    macros = list(tree.find_all(jinja2.nodes.Macro))
    visible = _visible(tree, [*loop.body, *macros]) - lists
    body = _Body(environment, lists)
    try:
        for macro in macros:
            if not _names(macro).isdisjoint({*lists, "strftime_now"}):
                raise _UnwatchableError
        loop.body = [body.visit(node) for node in loop.body]
    except _UnwatchableError:
        return None
    source: Any = loop.iter
    values: list[jinja2.nodes.Expr] = [jinja2.nodes.Name(each, "load") for each in sorted(visible)]
    loop.iter = body.call("watch_enter", [source, *values])
    loop.body.insert(0, body.output("watch_step"))
    place = next(number for number, node in enumerate(beside) if node is loop)
    beside[place : place + 1] = [body.output("watch_before"), loop, body.output("watch_leave")]
    tree.set_lineno(loop.lineno)  # of the nodes that have none: ours
    tree.set_environment(environment)
    return body.reach


def _loops(
    nodes: list[jinja2.nodes.Node],
) -> Iterator[tuple[list[jinja2.nodes.Node], jinja2.nodes.For]]:
    """The loops that write straight to the prompt, each with the statements it stands among."""
    for node in nodes:
        if isinstance(node, jinja2.nodes.For):
            yield nodes, node
        elif isinstance(node, jinja2.nodes.If):
            yield from _loops(node.body)
            for other in node.elif_:
                yield from _loops(other.body)
            yield from _loops(node.else_)


def _iterated(loop: jinja2.nodes.For) -> str | None:
    """The list a loop runs over, or over a part of."""
    source: jinja2.nodes.Node = loop.iter
    if isinstance(source, jinja2.nodes.Getitem) and isinstance(source.arg, jinja2.nodes.Slice):
        source = source.node
    if isinstance(source, jinja2.nodes.Name) and source.name not in ("tools", "documents"):
        return source.name
    return None


def _names(node: jinja2.nodes.Node) -> set[str]:
    """The variables a part of a template names."""
    return {name.name for name in node.find_all(jinja2.nodes.Name)} | {
        space.name for space in node.find_all(jinja2.nodes.NSRef)
    }


def _visible(tree: jinja2.nodes.Template, nodes: list[jinja2.nodes.Node]) -> frozenset[str]:
    """Variables of the template's own that are used in ``nodes``: all others are the same at every time."""
    symbols = jinja2.idtracking.symbols_for_node(tree)
    used = set().union(*map(_names, nodes))
    return frozenset(name for name in used if symbols.find_ref(name) is not None)


class _Body(NodeTransformer):
    """Has what the loop's body looks up around its message pass by the watch; refuses what cannot."""

    def __init__(self, environment: jinja2.Environment, lists: frozenset[str]) -> None:
        self.reach = 0
        self._environment = environment
        self._lists = lists
        self._depth = 0

    def call(self, name: str, arguments: list[jinja2.nodes.Expr]) -> jinja2.nodes.Call:
        return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), arguments, [], None, None)

    def output(self, name: str) -> jinja2.nodes.Output:
        return jinja2.nodes.Output([self.call(name, [])])

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802 - the visitor's protocol
        if node.else_ or node.test is not None or node.recursive:
            raise _UnwatchableError
        node.iter = self.visit(node.iter)
        self._depth += 1  # inside, "loop" is the inner loop
        node.target = self.visit(node.target)
        node.body = [self.visit(statement) for statement in node.body]
        self._depth -= 1
        return node

    def visit_Getattr(self, node: jinja2.nodes.Getattr) -> jinja2.nodes.Expr:  # noqa: N802
        if self._depth > 0 or not isinstance(node.node, jinja2.nodes.Name) or node.node.name != "loop":
            return self.generic_visit(node)  # type: ignore[return-value]
        if node.attr in _PLACES:
            return self.call(_PLACES[node.attr], [])
        if node.attr not in _AHEAD:
            raise _UnwatchableError
        self.reach = 1
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Expr:  # noqa: N802
        if not isinstance(node.node, jinja2.nodes.Name) or node.node.name not in self._lists:
            return self.generic_visit(node)  # type: ignore[return-value]
        number = self.visit(node.arg)
        if isinstance(number, jinja2.nodes.Slice):
            raise _UnwatchableError
        if not isinstance(number, jinja2.nodes.Const) or number.value != 0:
            self.reach = 1
        return jinja2.nodes.Getitem(self.call("watch_look", [node.node, number]), number, node.ctx)

    def visit_Name(self, node: jinja2.nodes.Name) -> jinja2.nodes.Name:  # noqa: N802
        if node.name in self._lists or node.name == "strftime_now":
            raise _UnwatchableError
        if node.name == "loop" and self._depth == 0:
            raise _UnwatchableError
        return node

    def visit_Break(self, node: jinja2.nodes.Break) -> jinja2.nodes.Break:  # noqa: N802
        if self._depth == 0:
            raise _UnwatchableError
        return node

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Macro:  # noqa: N802
        raise _UnwatchableError
