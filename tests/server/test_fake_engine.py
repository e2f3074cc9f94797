"""The fake engine keeps the promises of EngineClient that tests elsewhere lean on."""

import pytest

from loraplex.adapters import Adapter
from loraplex.core import (
    EngineClient,
    EngineDead,
    ModelNotFound,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
)
from loraplex.testing import FakeEngine, fake_text

from .helpers import ALPHA, BETA

pytestmark = pytest.mark.anyio


def request(engine: EngineClient, **params: object) -> Request:
    fields: dict[str, object] = {"ignore_eos": True, **params}
    return Request(RequestId("r"), engine.encode("Hello"), SamplingParams(**fields), ALPHA)  # type: ignore[arg-type]


async def outputs(engine: EngineClient, **params: object) -> list[RequestOutput]:
    return [output async for output in engine.generate(request(engine, **params))]


async def test_text_depends_on_adapter_and_prompt() -> None:
    texts = {fake_text(digest, prompt, 16) for digest in (None, ALPHA.digest, BETA.digest) for prompt in ((1,), (2,))}
    assert len(texts) == 6


async def test_answer_is_the_hash_and_finishes_once() -> None:
    engine = FakeEngine()
    result = await outputs(engine, n=2, temperature=0.0)
    assert [output.finished for output in result] == [False] * 15 + [True]
    expected = fake_text(ALPHA.digest, engine.encode("Hello"), 16)
    for index in (0, 1):
        deltas = [delta for output in result for delta in output.deltas if delta.index == index]
        assert "".join(delta.text for delta in deltas) == expected
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert engine.cancelled == []


async def test_end_token_ends_an_answer_unless_ignored() -> None:
    engine = FakeEngine()
    result = await outputs(engine, ignore_eos=False, max_tokens=None)
    assert result[-1].deltas[0].finish_reason == "stop"
    assert result[-1].num_output_tokens < engine.max_model_len - 6


async def test_stop_string_across_tokens_never_leaks() -> None:
    engine = FakeEngine()
    text = fake_text(ALPHA.digest, engine.encode("Hello"), 16)
    seen = ""
    for output in await outputs(engine, stop=(text[4:9],)):
        seen += output.deltas[0].text
    assert seen == text[:4]


async def test_closing_early_is_recorded() -> None:
    engine = FakeEngine()
    stream = engine.generate(request(engine))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert engine.cancelled == ["r"]
    assert engine.running == {}


async def test_stats_follow_the_running_requests() -> None:
    engine = FakeEngine()
    stream = engine.generate(request(engine))
    await anext(stream)
    stats = engine.stats()
    assert (stats.num_running, stats.running_adapters, stats.resident_adapters) == (1, (ALPHA.name,), (ALPHA.digest,))
    await stream.aclose()  # type: ignore[attr-defined]


def test_tokens_are_reversible() -> None:
    engine = FakeEngine()
    text = "Grüße, 世界"
    assert engine.decode(engine.encode(text)) == text


async def test_adapters_come_and_go_and_only_held_ones_run_if_that_is_asked_for() -> None:
    held = Adapter(BETA.digest, (), 1, 0, (), None)
    engine = FakeEngine(only_held=True)
    asked = Request(RequestId("r"), (1, 2), SamplingParams(max_tokens=2, ignore_eos=True), BETA)
    with pytest.raises(ModelNotFound):
        await anext(engine.generate(asked))
    engine.add_adapter(held)
    assert [output.finished async for output in engine.generate(asked)] == [False, True]
    engine.retire_adapter(BETA.digest)
    assert (engine.held, engine.retired) == ({}, [BETA.digest])
    with pytest.raises(ModelNotFound):
        await anext(engine.generate(asked))


def test_comparisons_answer_what_was_set() -> None:
    engine = FakeEngine()
    adapter = Adapter(BETA.digest, (), 1, 0, (), None)
    assert engine.compare(adapter).passed
    engine.comparison = EngineDead("gone")
    with pytest.raises(EngineDead):
        engine.compare(adapter)
    assert engine.compared == [BETA.digest] * 2


def test_pins_end_with_their_adapters() -> None:
    engine = FakeEngine()
    for call in (engine.pin_adapter, engine.preload_adapter):
        with pytest.raises(ModelNotFound):
            call(BETA.digest)
    engine.add_adapter(Adapter(BETA.digest, (), 1, 0, (), None))
    engine.pin_adapter(BETA.digest)
    engine.preload_adapter(BETA.digest, only_free=True)
    assert (engine.pinned, engine.preloaded) == ({BETA.digest}, [(BETA.digest, True)])
    assert [one.is_pinned for one in engine.residency()] == [True]
    engine.retire_adapter(BETA.digest)
    assert engine.pinned == set()
