"""What the demo sends, as a client with a key would."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_MAX_TOKENS = 40
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Question:
    """One request: who asks which model."""

    caller: str
    key: str | None
    model: str
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, with what the server says it ran. `text` is one line."""

    question: Question
    status: int
    served_by: str  # the model field of the answer; the error's code where it was refused
    digest: str  # "-" for the base
    text: str
    num_tokens: int
    seconds: float


def ask(url: str, question: Question) -> Answer:
    """One chat completion, or the error."""
    import httpx

    body = {
        "model": question.model,
        "messages": [{"role": "user", "content": question.text}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {question.key}"} if question.key is not None else {}
    started = time.perf_counter()
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=_TIMEOUT_S)
    seconds = time.perf_counter() - started
    answer = reply.json()
    if not reply.is_success:
        error = answer["error"]
        return Answer(question, reply.status_code, error["code"], "-", error["message"], 0, seconds)
    adapter = answer["x_loraplex"]["adapter"]
    text = " ".join(answer["choices"][0]["message"]["content"].split())
    digest = adapter["digest"] if adapter else "-"
    tokens = answer["usage"]["completion_tokens"]
    return Answer(question, reply.status_code, answer["model"], digest, text, tokens, seconds)


def ask_all(url: str, questions: Sequence[Question]) -> list[Answer]:
    """All at once."""
    with ThreadPoolExecutor(len(questions)) as clients:
        return list(clients.map(lambda question: ask(url, question), questions))


def curl_line(url: str, key: str, model: str) -> str:
    """The command to try."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Tell me about the sea."}]})
    headers = f"-H 'Authorization: Bearer {key}' -H 'Content-Type: application/json'"
    return f"curl {url}/v1/chat/completions {headers} -d '{body}'"
