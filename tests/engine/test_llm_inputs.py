"""Prompts and conversations in the forms people write."""

from typing import Any

import numpy as np
import pytest

from loraplex.core import ChatMessage, InvalidRequest
from loraplex.engine.llm_inputs import list_conversations, list_prompts, plain_prompt


@pytest.mark.parametrize(
    ("prompts", "plain"),
    [
        ("t1", ["t1"]),
        (["t1", [2, 3]], ["t1", (2, 3)]),
        ([1, 2], [(1, 2)]),
        ((1, 2), [(1, 2)]),
        ({"prompt": "t1"}, ["t1"]),
        (np.array([1, 2]), [(1, 2)]),
        (np.array([[1, 2], [3, 4]], dtype=np.uint16), [(1, 2), (3, 4)]),
        (list(np.array([1, 2])), [(1, 2)]),
        ([np.array([1, 2]), "t1"], [(1, 2), "t1"]),
        ({"prompt_token_ids": np.array([1, 2], dtype=np.int32)}, [(1, 2)]),
        ([], []),
    ],
)
def test_prompts_in_every_form(prompts: Any, plain: list[Any]) -> None:
    read = [plain_prompt(prompt) for prompt in list_prompts(prompts)]
    assert read == plain
    assert all(type(token) is int for prompt in read if not isinstance(prompt, str) for token in prompt)


@pytest.mark.parametrize(
    "prompt",
    [{}, {"text": "t1"}, {"prompt": 5}, [1.5], [True], 3, None, np.array([1.5]), np.array([True]), np.array(3)],
)
def test_prompts_of_another_form_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        plain_prompt(prompt)


def test_messages_in_every_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": None},
    ]
    expected = [
        ChatMessage("system", "x"),
        ChatMessage("user", "a\nb", (("name", "ann"),)),
        ChatMessage("assistant", ""),
    ]
    assert list_conversations(talk) == [expected]
    assert list_conversations([talk, talk[:1]]) == [expected, expected[:1]]
    assert list_conversations([]) == []


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([{"role": "user"}], "content"),
        ([{"content": "x"}], "role"),
        ([{"role": 3, "content": "x"}], "role"),
        ([{"role": "user", "content": None}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "content"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "tool_calls"),
        ([{"role": "user", "content": "x", "name": 3}], "name"),
        ([{"role": "user", "content": "x"}, "y"], "message"),
        ([["x"]], "message"),
        (["x"], "conversation"),
        ([3], "conversation"),
        ("x", "messages"),
    ],
)
def test_messages_of_another_form_are_refused(messages: Any, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part):
        list_conversations(messages)
