"""Offline use, as vLLM users write it."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import loraplex
from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.core import (
    AdapterRefused,
    ConfigError,
    FinishReason,
    InvalidRequest,
    NonFiniteOutput,
    RefusalReason,
)

from ..conftest import MakeAdapter, MakeBase
from ..oracle import Reference, make_base

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def make_llm(base: Path, **settings: Any) -> LLM:
    return LLM(base, **({"dtype": "float32", "memory_bytes": 2**23, "num_threads": 1} | settings))


@pytest.fixture(scope="module")
def llm(tiny_base: MakeBase) -> LLM:
    return make_llm(tiny_base("llama"))


@pytest.fixture(scope="module")
def adapters(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> list[Path]:
    return [tiny_adapter(tiny_base("llama"), rank=rank, seed=rank) for rank in (4, 8)]


def test_package_offers_what_users_import() -> None:
    assert loraplex.LLM is LLM
    assert loraplex.LoRARequest is LoRARequest
    with pytest.raises(AttributeError):
        loraplex.AsyncLLM  # noqa: B018


def test_single_string(llm: LLM) -> None:
    (answer,) = llm.generate("t1 t2 t3", GREEDY)
    assert answer.prompt == "t1 t2 t3"
    assert answer.prompt_token_ids == (1, 2, 3)
    (output,) = answer.outputs
    assert output.text == "".join(f" t{token}" for token in output.token_ids)
    assert (len(output.token_ids), output.finish_reason, output.logprobs) == (6, FinishReason.LENGTH, None)


def test_list_of_strings_and_token_ids_answer_in_order(llm: LLM, tiny_base: MakeBase) -> None:
    reference = Reference(tiny_base("llama"))
    prompts: list[Any] = ["t9", [4, 5], (6,), "t1 t2"]
    answers = llm.generate(prompts, GREEDY)
    assert [answer.prompt for answer in answers] == ["t9", None, None, "t1 t2"]
    for answer, ids in zip(answers, ([9], [4, 5], [6], [1, 2]), strict=True):
        assert list(answer.outputs[0].token_ids) == reference.greedy(ids, 6)


def test_one_prompt_of_token_ids(llm: LLM) -> None:
    (answer,) = llm.generate([1, 2, 3], GREEDY)
    assert (answer.prompt, answer.prompt_token_ids) == (None, (1, 2, 3))
    assert answer.outputs[0].token_ids == llm.generate("t1 t2 t3", GREEDY)[0].outputs[0].token_ids


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_default_sampling_params(llm: LLM) -> None:
    assert len(llm.generate("t1")[0].outputs[0].token_ids) == 16


def test_sampling_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5, n=2, seed=1, logprobs=2)]
    first, second = llm.generate(["t1", "t2"], params)
    assert [len(output.token_ids) for output in first.outputs] == [2]
    assert [len(output.token_ids) for output in second.outputs] == [5, 5]
    assert [output.index for output in second.outputs] == [0, 1]
    logprobs = second.outputs[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == list(second.outputs[0].token_ids)


def test_lora_request_for_all_and_for_each(llm: LLM, tiny_base: MakeBase, adapters: list[Path]) -> None:
    one = LoRARequest("one", 1, str(adapters[0]))
    two = LoRARequest("two", 2, str(adapters[1]))
    mixed = llm.generate(["t1 t2"] * 3, GREEDY, lora_request=[one, None, two])
    assert [answer.served_by.model for answer in mixed] == ["one@1", llm.engine.base.name, "two@1"]
    base = tiny_base("llama")
    references = [Reference(base, adapters[0]), Reference(base), Reference(base, adapters[1])]
    for answer, reference in zip(mixed, references, strict=True):
        assert list(answer.outputs[0].token_ids) == reference.greedy([1, 2], 6)
    for answer in llm.generate(["t1 t2", "t1 t2"], GREEDY, lora_request=one):
        assert answer.outputs == mixed[0].outputs
    assert not mixed[0].served_by.cold or mixed[0].served_by.load_s > 0


def test_lora_request_spelled_with_keywords(llm: LLM, adapters: list[Path]) -> None:
    request = LoRARequest(lora_name="one", lora_int_id=1, lora_path=str(adapters[0]))
    assert llm.generate("t1", GREEDY, lora_request=request)[0].served_by.model == "one@1"


def test_name_for_another_path_is_refused(tiny_base: MakeBase, adapters: list[Path]) -> None:
    llm = make_llm(tiny_base("llama"))
    llm.generate("t1", GREEDY, LoRARequest("a", 1, str(adapters[0])))
    with pytest.raises(AdapterRefused) as caught:
        llm.generate("t1", GREEDY, LoRARequest("a", 1, str(adapters[1])))
    assert caught.value.reason is RefusalReason.NAME_CONFLICT
    assert "choose another name" in caught.value.message


def test_lora_request_never_gets_another_version(tiny_base: MakeBase, adapters: list[Path]) -> None:
    """The name was replaced, or taken away, beside `generate`: the path decides, or it is refused."""
    llm = make_llm(tiny_base("llama"))
    request = LoRARequest("a", 1, str(adapters[0]))
    before = llm.generate("t1", GREEDY, request)[0]
    llm.models.unload("a")
    again = llm.generate("t1", GREEDY, request)[0]
    assert again.served_by.model == "a@2"
    assert again.outputs == before.outputs
    llm.models.load("a", adapters[1], created=0.0, replace=True)
    with pytest.raises(AdapterRefused) as caught:
        llm.generate("t1", GREEDY, request)
    assert caught.value.reason is RefusalReason.NAME_CONFLICT


def test_rank_above_the_limit_is_refused(tiny_base: MakeBase, adapters: list[Path]) -> None:
    llm = make_llm(tiny_base("llama"), max_lora_rank=4)
    llm.load_lora(LoRARequest("small", 1, str(adapters[0])))
    with pytest.raises(AdapterRefused) as caught:
        llm.load_lora(LoRARequest("large", 2, str(adapters[1])))
    assert caught.value.reason is RefusalReason.RANK_TOO_LARGE
    assert "8" in caught.value.message


@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_of_another_length_than_the_prompts_are_refused(llm: LLM, count: int) -> None:
    with pytest.raises(ConfigError) as caught:
        llm.generate(["t1", "t2"], [GREEDY] * count)
    assert f"{count} entries for 2 prompts" in caught.value.message
    with pytest.raises(ConfigError):
        llm.generate(["t1", "t2"], GREEDY, lora_request=[None] * count)
    assert not llm.engine.has_work


def test_bad_prompt_refuses_the_whole_call_before_anything_runs(llm: LLM) -> None:
    steps = llm.engine.stats().num_steps
    with pytest.raises(InvalidRequest):
        llm.generate(["t1", [1, 9999]], GREEDY)
    with pytest.raises(InvalidRequest):
        llm.generate(["t1", ""], GREEDY)
    assert (llm.engine.stats().num_steps, llm.engine.has_work) == (steps, False)


def test_more_prompts_than_the_queue_holds_are_all_answered(tiny_base: MakeBase) -> None:
    llm = make_llm(tiny_base("llama"), max_waiting=4, max_num_seqs=3, max_num_batched_tokens=8)
    prompts = [f"t{i}" for i in range(20)]
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2, n=2))
    assert [answer.prompt for answer in answers] == prompts
    assert all(len(output.token_ids) == 2 for answer in answers for output in answer.outputs)
    with pytest.raises(InvalidRequest, match="n is 5; the queue holds 4"):
        llm.generate("t1", SamplingParams(n=5))
    assert llm.generate("t3", GREEDY)


def test_failure_of_one_cancels_the_rest_and_the_next_call_works(
    tiny_base: MakeBase, adapters: list[Path], tmp_path: Path
) -> None:
    llm = make_llm(tiny_base("llama"))
    tensors = load_file(adapters[0] / "adapter_model.safetensors")
    save_file({name: value.sign() * 1e38 for name, value in tensors.items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((adapters[0] / "adapter_config.json").read_bytes())
    broken = LoRARequest("broken", 1, str(tmp_path))
    with pytest.raises(NonFiniteOutput) as caught:
        llm.generate(["t1", "t2", "t3"], GREEDY, lora_request=[None, broken, None])
    assert caught.value.model == "broken@1"
    assert not llm.engine.has_work
    assert len(llm.generate(["t1", "t2"], GREEDY)) == 2


def test_interrupted_call_leaves_nothing_behind(tiny_base: MakeBase, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(tiny_base("llama"))
    with monkeypatch.context() as patch:

        def interrupt(now: float) -> None:
            raise KeyboardInterrupt

        patch.setattr(llm.engine, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["t1", "t2"], GREEDY)
    assert not llm.engine.has_work
    assert len(llm.generate("t1", GREEDY)) == 1


# ---------------------------------------------------------------------- chat
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}t7{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    base = make_base(tmp_path_factory.mktemp("chatty"), "llama")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    return make_llm(base)


def test_chat_takes_one_conversation_or_a_list(chatty: LLM, adapters: list[Path]) -> None:
    talk = [{"role": "system", "content": "t4"}, {"role": "user", "content": "t5 t6"}]
    (single,) = chatty.chat(talk, GREEDY)
    assert single.prompt_token_ids == (0, 4, 0, 5, 6, 7)  # roles are unknown words: t0
    request = LoRARequest("one", 1, str(adapters[0]))
    first, second = chatty.chat([talk, talk[1:]], GREEDY, lora_request=[None, request])
    assert first.outputs == single.outputs
    assert second.prompt_token_ids == (0, 5, 6, 7)
    assert second.served_by.model == "one@1"


def test_message_without_content_is_refused(chatty: LLM) -> None:
    with pytest.raises(InvalidRequest, match="content"):
        chatty.chat([{"role": "user"}], GREEDY)


def test_chat_takes_vllms_order_of_arguments(chatty: LLM) -> None:
    (answer,) = chatty.chat([{"role": "user", "content": "t5"}], GREEDY, False, None, add_generation_prompt=False)
    assert answer.prompt_token_ids == (0, 5)


def test_chat_without_a_template_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.chat([{"role": "user", "content": "t1"}])


def test_settings_reach_the_engine(tiny_base: MakeBase) -> None:
    seen: list[tuple[int, int]] = []
    rows: list[Any] = []
    llm = make_llm(
        tiny_base("llama"),
        served_model_name="mine",
        max_model_len=50,
        max_loras=2,
        progress=lambda done, total: seen.append((done, total)),
        on_logits=lambda *row: rows.append(row),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert llm.engine.scheduler.config.max_model_len == 50
    assert llm.engine.scheduler.config.max_loras == 2
    assert llm.generate("t1", GREEDY)[0].served_by.model == "mine"
    assert len(rows) == 6
    with pytest.raises(ConfigError, match="gpu_memory_utilization_typo"):
        make_llm(tiny_base("llama"), gpu_memory_utilization_typo=1)
    with pytest.raises(ConfigError, match="served_model_name"):
        make_llm(tiny_base("llama"), served_model_name=["mine"])


def test_prompt_mappings_of_vllm_mean_the_same(tiny_base: MakeBase) -> None:
    llm = make_llm(tiny_base("llama"))
    params = SamplingParams(max_tokens=4, temperature=0.0)
    plain = llm.generate(["t5 t6", "t7"], params)
    mapped = llm.generate([{"prompt": "t5 t6"}, {"prompt_token_ids": list(plain[1].prompt_token_ids)}], params)
    assert [one.outputs[0].token_ids for one in mapped] == [one.outputs[0].token_ids for one in plain]
    single = llm.generate({"prompt": "t7"}, params)
    assert single[0].outputs[0].token_ids == plain[1].outputs[0].token_ids


def test_prompt_of_another_form_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([{"prompt": "t1", "multi_modal_data": {}}])


def test_token_ids_of_numpy_mean_the_same(llm: LLM) -> None:
    plain = llm.generate([[1, 2], [3]], GREEDY)
    given = llm.generate([np.array([1, 2]), [np.int64(3)]], GREEDY)
    assert [one.outputs for one in given] == [one.outputs for one in plain]
    assert all(type(token) is int for token in given[0].prompt_token_ids)


# ---------------------------------------------------------------------- as vLLM users write it
def test_what_vllm_users_write_runs(tiny_base: MakeBase, adapters: list[Path]) -> None:
    llm = make_llm(
        tiny_base("llama"),
        enable_lora=True,
        tensor_parallel_size=1,
        enforce_eager=True,
        gpu_memory_utilization=0.9,
        trust_remote_code=False,
        max_cpu_loras=4,
    )
    request = LoRARequest("one", 1, lora_local_path=str(adapters[0]))
    (answer,) = llm.generate("t1", GREEDY, lora_request=request, use_tqdm=False)
    assert (answer.finished, answer.served_by.model) == (True, "one@1")
    assert answer.outputs[0].cumulative_logprob is None
    assert llm.get_tokenizer().encode("t1 t2") == [1, 2]


def test_cumulative_logprob_is_the_sum_over_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate("t1", SamplingParams(temperature=0.0, max_tokens=3, logprobs=0))[0].outputs
    assert output.logprobs is not None
    assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs))


def test_seed_makes_the_same_calls_give_the_same_answers(tiny_base: MakeBase) -> None:
    def answers(seed: int | None) -> list[tuple[int, ...]]:
        llm = make_llm(tiny_base("llama"), seed=seed)
        return [llm.generate("t1", SamplingParams(max_tokens=12))[0].outputs[0].token_ids for _ in range(2)]

    first, second = answers(3)
    assert answers(3) == [first, second]
    assert first != second
    assert answers(4) != [first, second]


def test_adapter_is_refused_without_enable_lora(tiny_base: MakeBase, adapters: list[Path]) -> None:
    llm = make_llm(tiny_base("llama"), enable_lora=False)
    with pytest.raises(ConfigError, match="enable_lora"):
        llm.generate("t1", GREEDY, lora_request=LoRARequest("one", 1, str(adapters[0])))
    assert llm.models.catalog.list() == ()
    assert llm.generate("t1", GREEDY)


def test_lora_request_without_or_with_two_directories_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="lora_path"):
        LoRARequest("a", 1)
    with pytest.raises(ConfigError, match="lora_local_path"):
        LoRARequest("a", 1, "x", lora_local_path="y")
    assert LoRARequest("a", 1, lora_local_path="x") == LoRARequest("a", 1, "x")
    wrong: Any = True
    with pytest.raises(ConfigError, match="LoRARequest"):
        llm.generate("t1", GREEDY, lora_request=wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_take_turns(tiny_base: MakeBase, adapters: list[Path], dtype: str) -> None:
    """Each thread loads and generates at once with the others, and gets what it gets alone."""
    llm = make_llm(tiny_base("llama"), dtype=dtype, num_threads=2)
    requests = [None, LoRARequest("one", 1, str(adapters[0])), LoRARequest("two", 2, str(adapters[1])), None]
    expected = [llm.generate(f"t{i}", GREEDY, lora_request=one)[0].outputs for i, one in enumerate(requests)]
    llm.models.unload("one")
    found: dict[int, list[Any]] = {i: [] for i in range(4)}

    def work(i: int) -> None:
        for _ in range(5):
            found[i].append(llm.generate(f"t{i}", GREEDY, lora_request=requests[i])[0].outputs)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {i: [expected[i]] * 5 for i in range(4)}
