"""Tiny seeded bases and adapters written by transformers and PEFT, what those compute, and an engine to compare."""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from loraplex.adapters import AdapterLimits
from loraplex.core import AdapterRef, Request, RequestId, RequestOutput, SamplingParams
from loraplex.engine import Engine, EngineConfig, RequestFailed, ServedModels, load_base
from loraplex.kernels import choose_ops

VOCAB = 160
WORDS = {f"t{i}": i for i in range(VOCAB)}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED_PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
CONFIGS: dict[str, type[transformers.PretrainedConfig]] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16, "tie_word_embeddings": True},
    # Caps that bend scores and logits of this size, and a scale that is not the head's.
    "gemma2": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "phi3": {},
}


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed * 1009 + length)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


# ---------------------------------------------------------------------- bases
def base_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """A config of the family with tiny sizes."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return CONFIGS[family](**(shape | FAMILY_DEFAULTS[family] | overrides))


def randomise(model: transformers.PreTrainedModel, seed: int) -> None:
    """Values of the size trained models have: nothing is zero, one or tiny, so a part left out shows."""
    norm_centre = 0.0 if model.config.model_type.startswith("gemma") else 1.0  # Gemma's norms add 1
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(norm_centre + 0.3 * noise)
            elif name.endswith("bias") or "embed_tokens" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)


def write_tokenizer(directory: Path, words: dict[str, int] = WORDS) -> None:
    """A tokenizer of whole words without special tokens, as the corpus bases have."""
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(document))


def make_base(
    directory: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Save a random model of the family with its tokenizer."""
    model = transformers.AutoModelForCausalLM.from_config(base_config(family, **overrides))
    randomise(model, seed)
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def edit_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change config.json in place."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


# ---------------------------------------------------------------------- adapters
@contextmanager
def _peft_warnings() -> Iterator[None]:
    """PEFT 0.21 reads `is_gradient_checkpointing`, which transformers 5.24 deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        yield


def make_adapter(
    directory: Path,
    base: Path,
    *,
    rank: int = 4,
    targets: Sequence[str] | None = None,
    seed: int = 0,
    size: float = 1.0,
    **options: Any,
) -> Path:
    """Save a random PEFT adapter, of all projections by default, both matrices non-zero. `size` scales what it adds."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if targets is None:
        targets = FUSED_PROJECTIONS if model.config.model_type == "phi3" else PROJECTIONS
    config = peft.LoraConfig(
        r=rank, lora_alpha=options.pop("lora_alpha", 2 * rank), target_modules=list(targets), **options
    )
    with _peft_warnings():
        wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                fan_in = parameter.shape[1]
                parameter.copy_(0.5 * size * torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
    wrapped.save_pretrained(directory)
    return directory


# ---------------------------------------------------------------------- what transformers and PEFT compute
class Reference:
    """The base, or with an adapter its unmerged or merged model, in float32 through transformers."""

    def __init__(self, base: Path, adapter: Path | None = None, *, merged: bool = False) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        if adapter is not None:
            with _peft_warnings():
                model = peft.PeftModel.from_pretrained(model, adapter)
            model = model.merge_and_unload() if merged else model
        self.model = model.eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits at every position [len, vocab]."""
        logits: torch.Tensor = self.model(input_ids=torch.tensor([token_ids])).logits[0].float()
        return logits

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Tokens that `generate` continues the prompt with."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


# ---------------------------------------------------------------------- the engine under test
@dataclass
class Trace:
    """All that one sequence gave."""

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    text: str = ""
    deltas: list[Any] = field(default_factory=list)

    @property
    def last(self) -> Any:
        return self.deltas[-1]


class Harness:
    """A stepped engine that checks the scheduler after every step and keeps every token and logits row."""

    def __init__(self, base: Path, before_step: Callable[[Engine], None] | None = None, **settings: Any) -> None:
        settings = {"dtype": "float32", "memory_bytes": 8 * 2**20, "num_threads": 1} | settings
        self.engine = Engine(load_base(base, EngineConfig(**settings), name="base"), self._observe)
        self.models = ServedModels(self.engine, AdapterLimits())
        self.traces: dict[tuple[str, int], Trace] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.now = 0.0
        self._before_step = before_step
        self._count = 0

    def _observe(self, request_id: RequestId, index: int, logits: torch.Tensor) -> None:
        self.trace(request_id, index).logits.append(logits)

    def load(self, name: str, directory: Path) -> AdapterRef:
        return self.models.load(name, directory, created=0.0)

    def trace(self, request_id: str, index: int = 0) -> Trace:
        return self.traces.setdefault((request_id, index), Trace())

    def add(self, prompt: Sequence[int], params: SamplingParams = GREEDY, adapter: AdapterRef | None = None) -> str:
        """Queue a request; its id."""
        self._count += 1
        request_id = RequestId(f"r{self._count}")
        self.engine.add_request(Request(request_id, tuple(prompt), params, adapter), self.now)
        return request_id

    def step(self) -> None:
        """One step, then the scheduler's invariants."""
        if self._before_step is not None:
            self._before_step(self.engine)
        self.now += 0.01
        for result in self.engine.step(self.now):
            if isinstance(result, RequestFailed):
                self.failures[result.request_id] = result
            else:
                self._take(result)
        self.engine.scheduler.check_invariants()

    def _take(self, output: RequestOutput) -> None:
        self.outputs.setdefault(output.request_id, []).append(output)
        for delta in output.deltas:
            trace = self.trace(output.request_id, delta.index)
            trace.tokens.extend(delta.token_ids)
            trace.text += delta.text
            trace.deltas.append(delta)

    def run(self) -> None:
        """Step until everything has ended."""
        while self.engine.has_work:
            self.step()

    def answer(
        self, prompt: Sequence[int], params: SamplingParams = GREEDY, adapter: AdapterRef | None = None
    ) -> Trace:
        """One request alone."""
        request_id = self.add(prompt, params, adapter)
        self.run()
        assert request_id not in self.failures
        return self.trace(request_id)

    def check_all_free(self) -> None:
        """Nothing is held but by resident adapters."""
        scheduler = self.engine.scheduler
        assert not scheduler.sequences
        assert scheduler.pool.num_free == scheduler.pool.num_pages - scheduler.residency.num_pages


def poison_free_pages(engine: Engine) -> None:
    """Fill every page nobody holds with NaN, so that reading one shows."""
    engine._buffer.rows[torch.tensor(engine.scheduler.pool._free, dtype=torch.int64)] = float("nan")


def assert_equals_reference(
    trace: Trace, prompt: Sequence[int], reference: Reference, *, rtol: float = 1e-4, atol: float = 2e-5
) -> None:
    """The engine's logits at every drawn token equal the reference's on the same tokens."""
    wide = reference.logits([*prompt, *trace.tokens[:-1]])[len(prompt) - 1 :]
    torch.testing.assert_close(torch.stack(trace.logits), wide, rtol=rtol, atol=atol)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest over rows."""
    wide = wanted.double()
    return float(((got.double().cpu() - wide).norm(dim=-1) / wide.norm(dim=-1)).max())


def assert_equal_references(
    harness: Harness, served: tuple[Path, list[Path]], asked: list[tuple[str, tuple[int, ...], int]]
) -> None:
    """Errors against float32 are no larger than those of transformers and PEFT in bfloat16, but for chance.

    `served` is a base and adapters; `asked` the (request, prompt, 1 + adapter or 0) of greedy requests that ended.
    """
    base, adapters = served
    ours, theirs = [], []
    for which in {one[2] for one in asked}:
        reference = Reference(base, adapters[which - 1] if which else None)
        mine = [(prompt, harness.trace(name)) for name, prompt, other in asked if other == which]
        lists = [([*prompt, *trace.tokens[:-1]], len(prompt) - 1) for prompt, trace in mine]
        wanted = [reference.logits(tokens)[first:] for tokens, first in lists]
        reference.model.to(torch.bfloat16)
        for (_, trace), (tokens, first), exact in zip(mine, lists, wanted, strict=True):
            ours.append(relative_error(torch.stack(trace.logits), exact))
            theirs.append(relative_error(reference.logits(tokens)[first:], exact))
    assert not {name for name, _, _ in asked} & harness.failures.keys()
    assert max(ours) <= 1.25 * max(theirs), (max(ours), max(theirs))


def native_note() -> str | None:
    """Why the native operations do not run here, or None."""
    choice = choose_ops(torch.device("cpu"), torch.bfloat16, num_threads=2)
    if choice.note is not None:
        return choice.note
    return None if "AMX" in choice.ops.name else "without AMX the dense product is torch's, whose bits vary with rows"


def tokens_of(traces: Iterable[Trace]) -> list[list[int]]:
    return [trace.tokens for trace in traces]
