"""Chat templates: Jinja programs that format messages as a prompt, run in a sandbox as in transformers."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols

from decodax.io.messages import ChatTemplateError, Message
from decodax.io.sandbox import BoundedEnvironment, render

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold the assistant's reasoning; servers and templates use different names."""


def render_chat(template: str, messages: Sequence[Message], *, add_generation_prompt: bool = True,
                tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any) -> str:
    """Formats the prompt for a chat by a template.

    Args:
        template: Jinja source. It runs in a sandbox without access to Python's internals or to files, with limits on
            its time and output.
        messages: the conversation so far, mappings with a role and a content. An assistant's reasoning may have any of
            the names in `REASONING`; it is passed under the name that the template uses.
        add_generation_prompt: True ends the prompt with the text that begins the assistant's answer.
        tools: JSON schemas of functions that the model may call.
        variables: other variables of the template (bos_token, enable_thinking, documents, ...).

    Raises:
        ChatTemplateError: the template does not compile, raises for these messages, or exceeds a limit.
        TypeError: a message is not a mapping.

    >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    >>> render_chat(template, [{"role": "user", "content": "hi"}])
    '<user>hi'
    """
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"messages: got {message!r}, takes mappings with a role and a content")
    # As in transformers, a field that is None counts as absent.
    messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
    try:
        compiled, read = _compiled(template)
        return render(compiled, **{"documents": None, **variables}, messages=[_named(m, read) for m in messages],
                      tools=tools, add_generation_prompt=add_generation_prompt)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"chat template: {error}") from error
    except Exception as error:        # a template may fail like any program
        raise ChatTemplateError(f"chat template: {type(error).__name__}: {error}") from error


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks the assistant's part for training; its content is printed
    unchanged."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own way)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _named(message: Message, read: Sequence[str]) -> Message:
    """Returns the message with its reasoning under the first of the names `read` that the template uses, unless the
    message already has one of them."""
    given = next((message[name] for name in REASONING if name in message), None)
    if given is None or not read or any(name in message for name in read):
        return message
    return {**message, read[0]: given}


def _reads(tree: nodes.Template) -> tuple[str, ...]:
    """Returns the names in `REASONING` that a template reads from its messages: `m.name`, `m["name"]` or
    `m.get("name")`.

    The same names in a `namespace` or in the parts of a content do not count.
    """
    text = lambda node: node.value if isinstance(node, nodes.Const) else None
    of_content = lambda node: any(n.attr == "content" for n in node.find_all(nodes.Getattr)) or any(
        text(n.arg) == "content" for n in node.find_all(nodes.Getitem))
    others = {a.target.name for a in tree.find_all(nodes.Assign)
              if isinstance(a.target, nodes.Name) and isinstance(a.node, nodes.Call)
              and isinstance(a.node.node, nodes.Name) and a.node.node.name == "namespace"}
    others |= {loop.target.name for loop in tree.find_all(nodes.For)
               if isinstance(loop.target, nodes.Name) and of_content(nodes.Output([loop.iter]))}
    found: list[tuple[Any, str | None]] = [(n.node, n.attr) for n in tree.find_all(nodes.Getattr)]
    found += [(n.node, text(n.arg)) for n in tree.find_all(nodes.Getitem)]
    found += [(n.node.node, text(n.args[0])) for n in tree.find_all(nodes.Call)
              if isinstance(n.node, nodes.Getattr) and n.node.attr == "get" and n.args]
    names = {name for base, name in found if not (isinstance(base, nodes.Name) and base.name in others)}
    return tuple(name for name in REASONING if name in names)


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> tuple[jinja2.Template, tuple[str, ...]]:
    """Returns the compiled template, and the names of `REASONING` that it reads."""
    env = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.add_filter("tojson", _to_json)        # jinja's own escapes HTML
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return env.compiled(template), _reads(env.parse(template))


def _to_json(x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
