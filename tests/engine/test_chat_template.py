"""Chat templates: where they are read from, what they see, and that none of them runs away."""

import json
from pathlib import Path

import pytest

from loraplex.core.errors import BaseRefused, InvalidRequest, RefusalReason
from loraplex.core.limits import MAX_MESSAGES
from loraplex.core.request import ChatMessage
from loraplex.engine.chat_template import ChatTemplate, load_chat_template, message_fields

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: list[dict[str, str]] | None = None, **variables: str) -> str:
    return ChatTemplate(source, variables).render(messages or HELLO, add_generation_prompt=True)


def test_jinja_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load_chat_template(tmp_path, {"chat_template": "config"})
    assert template is not None and template.render(HELLO, True) == "file"


def test_default_counts_in_a_list_of_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    template = load_chat_template(tmp_path, {"chat_template": named})
    assert template is not None and template.render(HELLO, True) == "plain"


def test_no_template_is_none(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, {}) is None


@pytest.mark.parametrize("value", [7, [{"name": "other", "template": "x"}], {"template": "x"}])
def test_unusable_template_entry_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(BaseRefused) as caught:
        load_chat_template(tmp_path, {"chat_template": value})
    assert caught.value.reason is RefusalReason.CONFIG_INVALID


def test_syntax_error_is_refused_at_load() -> None:
    with pytest.raises(BaseRefused, match="invalid"):
        ChatTemplate("{% for %}", {})


def test_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BaseRefused, match="UTF-8"):
        load_chat_template(tmp_path, {})


def test_special_tokens_are_variables(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ bos_token }}{{ eos_token }}"}
    template = load_chat_template(tmp_path, config)
    assert template is not None and template.render(HELLO, True) == "<s></s>"


def test_template_language_of_transformers_is_known() -> None:
    source = (
        "{%- for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor -%}"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ missing }}"
    )
    assert render(source) == json.dumps(HELLO[0]) + "4True"


def test_refusal_of_the_template_is_a_client_error() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "bomb",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(40000) %}{{ messages[0].content * 999 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_runaway_template_is_stopped(bomb: str) -> None:
    with pytest.raises(InvalidRequest):
        render(bomb)


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__base__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_sandbox_holds(escape: str) -> None:
    with pytest.raises(InvalidRequest):
        render(escape)


def test_private_names_are_undefined() -> None:
    assert render("{{ self._TemplateReference__context }}{{ raise_exception.__globals__ }}") == ""


def test_message_content_is_not_a_template() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 7 * 7 }}"}]) == "{{ 7 * 7 }}"


def test_fields_of_a_message() -> None:
    message = ChatMessage("user", "Hi", extra=(("name", "Ada"), ("role", "system")))
    assert message_fields([message]) == [{"name": "Ada", "role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "messages", [[], [ChatMessage("user", "x")] * (MAX_MESSAGES + 1), [ChatMessage("im_end", "x")]]
)
def test_bad_message_list_is_refused(messages: list[ChatMessage]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        message_fields(messages)
    assert caught.value.param == "messages"
