"""One render instead of two per answer, for templates that provably only append.

Why one is enough. A template is a deterministic program that reads messages and writes text. While
it has not looked further than message i, it cannot know whether message i is the last one; so what
it has written by then it writes for every conversation that begins like this one. The messages are
handed over in a sequence that notes when each is first read and how much was written by then
(`_Watched`). What the template writes after its loop is the same for every conversation if it
depends on nothing but `add_generation_prompt` and constants; that, and that nothing before depends
on `add_generation_prompt` or looks ahead through `loop`, is read off the template's syntax tree
(`is_plain`). Whatever is not proven so goes the long way (chat.py), which asks again per answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from dflash_ext.data.formats import Conversation, Message
from dflash_ext.data.templates import Renderer

_GENERATION = "add_generation_prompt"
_LOOKS_BACK = frozenset(
    {"index", "index0", "first", "previtem", "changed", "cycle", "depth", "depth0"}
)
# What may stand behind the loop.
_TAIL_NODES = (
    nodes.If,
    nodes.Output,
    nodes.TemplateData,
    nodes.Const,
    nodes.Name,
    nodes.Add,
    nodes.Concat,
    nodes.And,
    nodes.Or,
    nodes.Not,
    nodes.Compare,
    nodes.Operand,
    nodes.Test,
)


class _Gaze:
    """How far the template has read, and how much it had written then."""

    def __init__(self, count: int) -> None:
        self.written = 0
        self.starts: list[int] = [0] * (count + 1)
        """Characters written when message i was reached; at the end, when there was none left."""
        self.reached = 0
        self.lost = False
        """It knows more than the next message: nothing is proven."""
        self.iterated = False


class _Watched(Sequence[Message]):
    """The messages from `offset` on, as a sequence that notes what is learned of them."""

    __slots__ = ("_gaze", "_messages", "_offset")

    def __init__(self, messages: list[Message], gaze: _Gaze, offset: int = 0) -> None:
        self._messages, self._gaze, self._offset = messages, gaze, offset

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and key >= 0 and key + self._offset <= self._gaze.reached:
            return self._messages[key + self._offset]
        if (
            isinstance(key, slice)
            and key.stop is None
            and key.step is None
            and (key.start or 0) >= 0
        ):
            return _Watched(self._messages, self._gaze, self._offset + (key.start or 0))
        self._gaze.lost = True
        return self._messages[self._offset :][key]

    def __iter__(self) -> Iterator[Message]:
        gaze, count = self._gaze, len(self._messages)
        gaze.lost |= gaze.iterated  # a second look at a message comes after the first at the last
        gaze.iterated = True
        for i in range(self._offset, count):
            gaze.starts[i], gaze.reached = gaze.written, max(i, gaze.reached)
            yield self._messages[i]
        gaze.starts[count] = gaze.written

    def __len__(self) -> int:
        self._gaze.lost = True
        return len(self._messages) - self._offset

    def __bool__(self) -> bool:
        if self._offset > self._gaze.reached:
            self._gaze.lost = True
        return self._offset < len(self._messages)

    def __contains__(self, value: object) -> bool:
        self._gaze.lost = True
        return value in self._messages[self._offset :]

    def __eq__(self, other: object) -> bool:
        self._gaze.lost = True
        return self._messages[self._offset :] == other

    __hash__ = None  # type: ignore[assignment]  # like a list's

    def __repr__(self) -> str:
        raise TypeError("a list would show its messages here")

    def __reversed__(self) -> Iterator[Message]:
        self._gaze.lost = True
        return reversed(self._messages[self._offset :])


@dataclass(frozen=True)
class Shown:
    """A conversation's text and where its parts lie in it."""

    text: str
    starts: list[int]
    """Where each message begins, and where the last one ends."""
    header: str
    """What a generation prompt adds: text[: starts[i]] + header is the prompt of message i."""
    footer: str
    """What ends every text: text[: starts[i + 1]] + footer is the text up to message i."""


class AppendOnly:
    """Shows conversations with one render each, where that proves enough."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tails: dict[tuple[bool, bool], tuple[str, str] | None] = {}

    def show(self, conversation: Conversation) -> Shown | None:
        """The conversation, or None if its template or this one conversation needs the long way."""
        messages, tools = conversation.messages, conversation.tools
        key = (tools is not None, any(m["role"] == "tool" for m in messages))
        if key not in self._tails:
            self._tails[key] = self._tail(*key)
        tails = self._tails[key]
        if tails is None:
            return None
        header, footer = tails
        found = self._watch(messages, tools, generation=False)
        if found is None or found[0][found[1][-1] :] != footer:
            return None
        return Shown(*found, header, footer)

    def _tail(self, with_tools: bool, with_results: bool) -> tuple[str, str] | None:
        template = self._renderer.direct_template([] if with_tools else None)
        if template is None or not is_plain(*template, with_results=with_results):
            return None
        tails = []
        for generation in (True, False):
            tools = [{"type": "function", "function": {"name": "f"}}] if with_tools else None
            found = self._watch([{"role": "user", "content": "a"}], tools, generation=generation)
            if found is None:
                return None
            tails.append(found[0][found[1][-1] :])
        return tails[0], tails[1]

    def _watch(
        self, messages: list[Message], tools: list[Any] | None, *, generation: bool
    ) -> tuple[str, list[int]] | None:
        """(text, starts), or None if the template fails or looks further than it may."""
        gaze = _Gaze(len(messages))
        pieces = []
        watched = _Watched(messages, gaze)
        try:
            for piece in self._renderer.stream(watched, tools, generation=generation):
                pieces.append(piece)
                gaze.written += len(piece)
        except Exception:  # the long way finds out, and says, what is wrong
            return None
        if gaze.lost or not gaze.iterated:
            return None
        return "".join(pieces), gaze.starts


def is_plain(environment: Any, source: str, *, with_results: bool) -> bool:
    """Does what a template writes behind its last loop depend on nothing but constants and
    `add_generation_prompt`, and what stands before on no look ahead and not on that?

    with_results: for conversations in which tools speak; branches for them count only then.
    """
    body = [node for node in environment.parse(source).body if not _is_dead(node)]
    assigned = {
        name.name for node in body for name in node.find_all(nodes.Name) if name.ctx != "load"
    } | {macro.name for node in body for macro in node.find_all(nodes.Macro)}
    names = _derived(body)
    last = max((i for i, node in enumerate(body) if _holds_loop(node)), default=-1)
    main = body[last] if last >= 0 else None
    # Inside of something else there could be more behind it that knows how the messages ended.
    if not isinstance(main, nodes.For) or main.else_ or not _mentions(main.iter, names):
        return False
    before, behind = body[: last + 1], body[last + 1 :]
    foreign = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
    if any(node.find(foreign) for node in before):
        return False
    known = {*assigned, "messages", "tools", "documents", "loop"}
    for top in behind:
        for node in _and_all(top):
            if not isinstance(node, _TAIL_NODES):
                return False
            if isinstance(node, nodes.Name) and (node.ctx != "load" or node.name in known):
                return False
    return not any(
        _peeks(node, names, False, with_results=with_results)
        or any(name.name == _GENERATION for name in _and_all(node) if isinstance(name, nodes.Name))
        for node in before
    )


def _holds_loop(node: nodes.Node) -> bool:
    # Macros before the loop are only run where they are called.
    return not isinstance(node, nodes.Macro) and any(
        isinstance(n, nodes.For) for n in _and_all(node)
    )


def _and_all(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    yield from node.find_all(nodes.Node)


def _is_dead(node: nodes.Node) -> bool:
    """`{% if not add_generation_prompt is defined %}` … `{% endif %}`: it always is."""
    if not isinstance(node, nodes.If) or node.elif_ or node.else_:
        return False
    inner = node.test.node if isinstance(node.test, nodes.Not) else None
    return (
        isinstance(inner, nodes.Test)
        and inner.name == "defined"
        and isinstance(inner.node, nodes.Name)
        and inner.node.name == _GENERATION
    )


def _derived(body: list[nodes.Node]) -> set[str]:
    """Names that may stand for the messages or a part of them."""
    names = {"messages"}
    while True:
        more = set(names)
        for top in body:
            for node in _and_all(top):
                if isinstance(node, nodes.Assign) and _mentions(node.node, names):
                    more |= {n.name for n in _and_all(node.target) if hasattr(n, "name")}
                if isinstance(node, nodes.Macro):  # called with who knows what
                    more |= {argument.name for argument in node.args}
                if isinstance(node, nodes.With):
                    more |= {
                        n.name for t in node.targets for n in _and_all(t) if hasattr(n, "name")
                    }
                if isinstance(node, nodes.For) and _mentions(node.iter, names):
                    more |= {n.name for n in _and_all(node.target) if hasattr(n, "name")}
        if more == names:
            return names
        names = more


def _mentions(node: nodes.Node, names: set[str]) -> bool:
    return any(isinstance(n, nodes.Name) and n.name in names for n in _and_all(node))


def _peeks(node: nodes.Node, names: set[str], over: bool, *, with_results: bool) -> bool:
    """Is `loop` used to look ahead, where the innermost loop runs `over` messages?"""
    if isinstance(node, nodes.For):
        inner = _mentions(node.iter, names)
        parts = [(node.iter, over), *((n, inner) for n in (*node.body, *node.else_))]
        parts += [(node.test, inner)] if node.test is not None else []
        return any(_peeks(n, names, o, with_results=with_results) for n, o in parts)
    if over and isinstance(node, nodes.Getattr | nodes.Getitem) and _is_loop(node.node):
        field = node.attr if isinstance(node, nodes.Getattr) else node.arg
        field = field.value if isinstance(field, nodes.Const) else field
        return field not in _LOOKS_BACK
    if over and _is_loop(node):
        return True  # handed on as a whole
    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.If) and not with_results and _is_about_tools(node.test):
        children = [node.test, *node.elif_, *node.else_]
    return any(_peeks(child, names, over, with_results=with_results) for child in children)


def _is_loop(node: Any) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"


def _is_about_tools(test: nodes.Node) -> bool:
    """`….role == "tool"`, false for every message of a conversation without tool results."""
    if not isinstance(test, nodes.Compare) or len(test.ops) != 1 or test.ops[0].op != "eq":
        return False
    field = test.expr
    name = field.attr if isinstance(field, nodes.Getattr) else getattr(field, "arg", None)
    name = name.value if isinstance(name, nodes.Const) else name
    value = test.ops[0].expr
    return name == "role" and isinstance(value, nodes.Const) and value.value == "tool"
