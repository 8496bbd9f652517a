"""A Jinja sandbox in which every template ends within limits on time, size and number of steps.

Jinja's own sandbox keeps a template from Python's internals and from ranges of more than 100,000. It does not keep
nested loops, macros that call themselves twice, text that doubles, `10 ** 10 ** 10` or `"x".center(10 ** 12)` from
taking hours or all memory. Here the compiled template counts:

- a step for each pass of a loop and each call of a macro or block;
- the characters that it writes, also into variables and macros;
- the size of values. Results that may grow faster than their arguments (products, powers, joins, formats, paddings) are
  measured before they are computed; containers are measured when they are made, compared or turned into text.

Each of these also checks the clock. Nothing here depends on signals, threads or processes, so it works wherever the
template runs. A single operation is bounded by the sizes, so the time is exceeded only slightly.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

SECONDS = 10.0
"""Time limit in seconds; an ordinary template takes milliseconds."""

SIZE, GROWTH = 1_000_000, 16
"""Largest number of characters and entries that a template may make: a constant, plus a number per one given to it."""

STEPS = 1_000_000
"""Largest number of steps, in addition to one per character given to the template."""

SOURCE = 1_000_000
"""Largest number of characters of a template."""


class LimitError(jinja2.TemplateError):
    """A template exceeds a limit on its time, its number of steps or the size of its values."""


@dataclasses.dataclass
class Work:
    """The remaining budget of a running template.

    Attributes:
        size: maximum size of one value, in characters and entries.
        left: number of characters that may still be written.
        steps: number of steps that are left.
        end: time at which the template is stopped, in seconds of `time.monotonic`.
    """

    size: int = SIZE
    left: int = SIZE
    steps: int = STEPS
    end: float = float("inf")

    @classmethod
    def of(cls, given: Any) -> Work:
        """Returns the budget of a template that gets the variables `given`."""
        size = SIZE + GROWTH * measure(given)
        return cls(size, size, STEPS + measure(given), time.monotonic() + SECONDS)

    def look(self) -> None:
        """Checks the clock; raises LimitError if the template has used up its time."""
        if time.monotonic() > self.end:
            raise LimitError(f"takes longer than {SECONDS:g} s")

    def step(self) -> None:
        """Counts one step; raises LimitError if none is left."""
        self.look()
        self.steps -= 1
        if self.steps < 0:
            raise LimitError(f"loops more than {STEPS:,} times")

    def write(self, count: int) -> None:
        """Counts written characters; raises LimitError if there are too many."""
        self.left -= count
        if self.left < 0:
            raise LimitError(f"writes more than {self.size:,} characters")

    def hold(self, size: int) -> None:
        """Checks the size of a value; raises LimitError if it is too large."""
        self.look()
        if size > self.size:
            raise LimitError(f"makes a value of more than {self.size:,} characters or entries")


_work: contextvars.ContextVar[Work] = contextvars.ContextVar("work")


def work() -> Work:
    """Returns the budget of the running template. While a template is compiled, each constant expression has a new
    budget."""
    return _work.get(None) or Work()


def measure(value: Any, seen: dict[int, int] | None = None) -> int:
    """Returns the size of a value: its characters, digits and entries, including nested ones; shared parts count each
    time they occur."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 3
    inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else \
        value._Namespace__attrs.values() if isinstance(value, Namespace) else \
        value if isinstance(value, (list, tuple, set, frozenset)) else None
    if inner is None:
        return 1
    seen = {} if seen is None else seen
    if id(value) not in seen:
        seen[id(value)] = 0       # for a value that contains itself
        seen[id(value)] = 1 + sum(measure(v, seen) for v in inner)
    return seen[id(value)]


def bounded(value: Any) -> Any:
    """Returns the value, or raises LimitError if it is too large."""
    if not isinstance(value, (str, bool, float, type(None))):
        work().hold(measure(value))
    return value


def _number(values: Any, at: int, name: str, keywords: Mapping[str, Any]) -> int:
    found = keywords.get(name, values[at] if len(values) > at else 0)
    return found if isinstance(found, int) else 0


def _format(text: str, values: Any) -> int:
    """Returns an upper bound on the length of a format string filled with `values`."""
    widths = sum(min(int(n[:12]), 10 ** 12) for n in re.findall(r"\d+", text))
    if "*" in text or re.search(r"\{[^{}]*\{", text):      # a width among the values
        widths += max((abs(v) for v in values if isinstance(v, int)), default=0) * (text.count("*") + text.count("{"))
    return len(text) + widths + (text.count("%") + text.count("{")) * max(map(measure, values), default=0)


def _grown(name: str, value: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> int:
    """Returns an upper bound on the size of the result of a filter or method, if it may be far larger than its input;
    else 0."""
    text = value if isinstance(value, (str, bytes)) else ""
    match name:
        case "replace":
            old, new = (*args, *keywords.values(), "", "")[:2]
            if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
                return len(text) + text.count(old) * len(new)
        case "join" if isinstance(value, str) and args:        # the method: a separator and what it joins
            return measure(args[0]) * (1 + len(value)) if isinstance(args[0], (list, tuple, dict, str)) else 0
        case "join":
            return measure(value) * (1 + measure((*args, *keywords.values(), "")[0]))
        case "ljust" | "rjust" | "center" | "zfill":
            return len(text) + _number(args, 0, "width", keywords)
        case "expandtabs":
            return len(text) * (1 + _number(args, 0, "tabsize", keywords))
        case "indent":
            width = (*args, keywords.get("width", 4))[0]
            lines = value.count("\n") + 1 if isinstance(value, str) else 1
            return len(text) + lines * (width if isinstance(width, int) else measure(width))
        case "tojson":
            return measure(value) * (1 + _number(args, 1, "indent", keywords))
        case "wordwrap":
            return len(text) * (1 + measure(keywords.get("wrapstring", args[2] if len(args) > 2 else "")))
        case "translate":
            return len(text) * max(map(measure, args), default=1)
        case "sum" if len(args) > 1 or "start" in keywords:        # of lists: each sum is copied
            return measure(value) * (len(value) if isinstance(value, Sized) else 1) // 100
        case "batch" | "slice" | "to_bytes":
            return 1 + _number(args, 0, "length", keywords)
        case "format" | "format_map":
            values = (*args, *keywords.values())
            if isinstance(value, str):
                return _format(value, [*values, *(v for x in values if isinstance(x, Mapping) for v in x.values())])
    return 0


SHALLOW = frozenset({"length", "count", "first", "last", "list", "default", "d", "items", "selectattr", "rejectattr",
                     "select", "reject", "map", "int", "float", "abs", "round", "attr", "random", "reverse"})
"""Filters that use only the entries of a container, not the contents of these entries."""


def _filter(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter so that the sizes of its arguments and its result are checked."""
    first = 1 if hasattr(run, "jinja_pass_arg") else 0

    @functools.wraps(run)
    def measured(*args: Any, **keywords: Any) -> Any:
        if len(args) > first:
            value, rest = args[first], args[first + 1:]
            work().hold(_grown(name, value, rest, keywords))
            if name not in SHALLOW:
                bounded(value)
        made = run(*args, **keywords)
        if isinstance(made, (str, list, tuple)):
            work().hold(len(made))
        return _counted(made) if isinstance(made, Iterator) else made

    return measured


def _counted(made: Iterator[Any]) -> Iterator[Any]:
    """Yields the items of a filter's lazy result, and checks their total size."""
    total = 0
    for item in made:
        total += 1 + measure(item)
        work().hold(total)
        yield item


def _test(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a test that compares values, so that the sizes of its arguments are checked."""
    @functools.wraps(run)
    def measured(*args: Any) -> Any:
        return run(*map(bounded, args))

    return measured


class _Counting(NodeTransformer):
    """Adds counting of steps, written characters and sizes to a template's syntax tree."""

    def _count(self, name: str, count: int, node: nodes.Node) -> nodes.ExprStmt:
        call = nodes.Filter(nodes.Const(count), name, [], [], None, None)
        return nodes.ExprStmt(call).set_lineno(node.lineno)        # type: ignore[return-value]

    def _body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._count(STEP, 1, node))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _body

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._body(node)
        if node.test is not None:
            node.test = nodes.And(self._measured(nodes.Const(1), STEP), node.test).set_lineno(node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> Any:
        self.generic_visit(node)
        written = sum(len(x.data) for x in node.nodes if isinstance(x, nodes.TemplateData))
        return [self._count(WRITE, written, node), node] if written else node

    def _measured(self, node: Any, name: str) -> nodes.Expr:
        return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)      # type: ignore[return-value]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._measured(nodes.List(node.nodes).set_lineno(node.lineno), CONCAT)

    def _container(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else self._measured(node, BOUNDED)

    visit_List = visit_Tuple = visit_Dict = _container

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        own = lambda x: x if isinstance(x, nodes.Const) else self._measured(x, BOUNDED)
        node.expr = own(node.expr)
        for operand in node.ops:
            operand.expr = own(operand.expr)
        return node


# Names that no template can write.
STEP, WRITE, BOUNDED, CONCAT = "step!", "write!", "bounded!", "concat!"


class _Generator(CodeGenerator):
    """Compiles a template's syntax tree after `_Counting` has added the counters."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        super().visit_Template(_Counting().visit(node).set_environment(self.environment), frame)


@jinja2.pass_context
def _step(context: Any, count: int) -> bool:
    work().step()
    return True


@jinja2.pass_context
def _write(context: Any, count: int) -> None:
    work().write(count)


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> Any:
    """Returns the text that an expression writes, and counts its characters."""
    text = value if isinstance(value, str) else str(bounded(value))
    work().write(len(text))
    return text


def _concat(parts: list[Any]) -> str:
    work().hold(measure(parts))
    return str_join(parts)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment whose templates count their steps and sizes; `render` runs one of them."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any):
        super().__init__(finalize=_finalize, **options)
        self.globals.pop("lipsum", None)
        self.filters = {name: _filter(name, run) for name, run in self.filters.items()}
        self.filters |= {STEP: _step, WRITE: _write, BOUNDED: bounded, CONCAT: _concat}
        for name in ("==", "!=", "<", "<=", ">", ">=", "eq", "ne", "lt", "le", "gt", "ge", "equalto", "lessthan",
                     "greaterthan", "in"):
            self.tests[name] = _test(self.tests[name])     # type: ignore[arg-type]

    def add_filter(self, name: str, run: Callable[..., Any]) -> None:
        """Adds a function `run` to templates as the filter `name`; sizes of its arguments and its result are checked.
        """
        self.filters[name] = _filter(name, run)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = 0
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers:
            size = left.bit_length() * abs(right)
        elif operator == "*" and numbers:
            size = left.bit_length() + right.bit_length()
        elif operator == "*":
            size = max((len(a) * b for a, b in ((left, right), (right, left))
                        if isinstance(a, (str, bytes, list, tuple)) and isinstance(b, int)), default=0)
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            size = _format(left, [*values, *(v for x in values if isinstance(x, Mapping) for v in x.values())])
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            size = len(left) + len(right)
        work().hold(size)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **keywords: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, (str, bytes, int, list, tuple, dict)):
            work().hold(_grown(name, owner, args, keywords))
            if name in ("index", "count", "join", "format", "format_map"):
                bounded([owner, *args])
        made = super().call(__context, __obj, *args, **keywords)
        if isinstance(made, (str, bytes)):
            work().hold(len(made))
        elif isinstance(made, (list, tuple, dict)) and not isinstance(owner, dict):
            bounded(made)
        return made

    def compiled(self, source: str) -> jinja2.Template:
        """Compiles a template.

        Raises:
            jinja2.TemplateError: it is invalid or too long.
        """
        if len(source) > SOURCE:
            raise LimitError(f"got {len(source):,} characters, takes at most {SOURCE:,}")
        return self.from_string(source)


def render(template: jinja2.Template, /, **variables: Any) -> str:
    """Returns the text that a template of a `BoundedEnvironment` writes.

    Raises:
        LimitError: the template exceeds a limit.
    """
    token = _work.set(Work.of(variables))
    try:
        return "".join(_pieces(template, variables))
    finally:
        _work.reset(token)


def _pieces(template: jinja2.Template, variables: Mapping[str, Any]) -> Iterator[str]:
    for piece in template.generate(**variables):
        work().look()
        yield piece
