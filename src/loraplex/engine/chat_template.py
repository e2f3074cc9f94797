"""Chat templates of the base model, rendered in a sandbox with bounds on work and output.

Templates come from the operator's base directory, never from an adapter or a request. The bounds catch a template that
loops or grows without end on some input; they are not a defence against an operator.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraplex.core.errors import BaseRefused, InvalidRequest, RefusalReason
from loraplex.core.limits import MAX_BODY_BYTES, MAX_MESSAGES
from loraplex.core.request import ChatMessage

MAX_RENDERED_CHARS = MAX_BODY_BYTES + 2**20  # what a request may bring, and room for the template's own text
MAX_LOOP_STEPS = 50_000  # about 0.3 s of empty loop on one core; a template needs a few per message
_MAX_POWER_BITS = 2**16

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""A template may build a control token from the role, as in `'<|' + role + '|>'`; so clients cannot invent roles."""

_TICK = "_loraplex_tick"


class ChatTemplate:
    """A compiled template with the special tokens it may name. Safe to use from several threads."""

    __slots__ = ("_template", "_variables")

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile `source`. Raises BaseRefused when it is not a valid template."""
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(_count_loops(environment.parse(source)))
        except TemplateSyntaxError as error:
            raise BaseRefused(
                RefusalReason.CONFIG_INVALID, f"the chat template is invalid: {error}", "chat_template"
            ) from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The text of a conversation. Raises InvalidRequest when the template refuses it or exceeds a bound."""
        budget = _Budget()
        parts: list[str] = []
        size = 0
        values = {**self._variables, "messages": [dict(m) for m in messages], "tools": None, "documents": None}
        try:
            stream = self._template.generate(
                values, add_generation_prompt=add_generation_prompt, **{_TICK: budget.tick}
            )
            for part in stream:
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    _refuse(f"it renders to more than {MAX_RENDERED_CHARS} characters")
        except InvalidRequest:
            raise
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest(
                f"the chat template of this model refused the messages: {error}", "messages"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise InvalidRequest("the chat template of this model needs too much memory here", "messages") from error
        return "".join(parts)


def load_chat_template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template in `directory`: chat_template.jinja, else `chat_template` of tokenizer_config.json (`config`)."""
    path = directory / "chat_template.jinja"
    source = _read_template(path) if path.is_file() else _template_in_config(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, _special_variables(config))


def message_fields(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """What a template sees of each message. Raises InvalidRequest for no messages, too many, or an unknown role."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages holds {len(messages)} entries; allowed are 1 to {MAX_MESSAGES}", "messages")
    for message in messages:
        if message.role not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise InvalidRequest(f"role {message.role!r} is not supported; supported: {known}", "messages")
    return [{**dict(m.extra), "role": m.role, "content": m.content} for m in messages]


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BaseRefused(RefusalReason.CONFIG_INVALID, f"{path} is not UTF-8 text: {error}", path.name) from error


def _template_in_config(value: Any) -> str | None:
    """A string, or a list of {name, template} of which the one called `default` counts."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
                return str(entry["template"])
    raise BaseRefused(
        RefusalReason.CONFIG_INVALID,
        "chat_template is neither a string nor a list with an entry named 'default'",
        "tokenizer_config.json",
    )


def _special_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, by name, each a string or an object with `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


class _Budget:
    """Loop iterations and macro calls left in one rendering."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_LOOP_STEPS

    def tick(self) -> str:
        self._left -= 1
        if self._left < 0:
            _refuse(f"it takes more than {MAX_LOOP_STEPS} loop steps")
        return ""


def _refuse(why: str) -> NoReturn:
    raise InvalidRequest(f"the chat template of this model cannot render these messages: {why}", "messages")


def _count_loops(tree: nodes.Template) -> nodes.Template:
    """Begin every loop and macro body with a call that counts: an empty loop yields no output to count by."""
    bodies: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
    for node in bodies:
        call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.Output([call]).set_lineno(node.lineno))
    return tree


class _Sandbox(ImmutableSandboxedEnvironment):
    """Bounds the two operators that make a large value out of two small ones."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and left.bit_length() * abs(right) > _MAX_POWER_BITS:
            _refuse("a power is too large")
        if operator == "*" and _repeated_len(left, right) > MAX_RENDERED_CHARS:
            _refuse("a repeated value is too long")
        return super().call_binop(context, operator, left, right)


def _repeated_len(left: Any, right: Any) -> int:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int):
            return len(value) * count
    return 0


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training, and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (the type that jinja2 declares)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
