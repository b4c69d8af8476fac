"""Shared fixtures: small random-weight models of every family, in memory and as directories.

    tiny_llama, tiny_qwen3, tiny_mistral   session-scoped models, float32, eval; do not change their weights
    tiny                                   the three of them, one after the other (a parametrised fixture)
    tiny_dir(family, **overrides) -> Path  a saved model with a tokenizer, made once per session and set of overrides

The functions behind them, for other sizes: `from tests.conftest import tiny_model, save_model`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = ("llama", "qwen3", "mistral")
CHAT_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<|begin_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<think>", "</think>",
)  # fmt: skip
SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random-weight causal LM of a family (llama, qwen3, mistral): 4 layers, hidden 64, 4 query and 2 kv heads of 16.

    Weights are wide enough for attention to be far from uniform, and norm weights differ from 1, so that a forgotten
    norm shows. overrides go to the config (`rope_parameters={...}`, `num_hidden_layers=2`, ...).
    """
    import torch
    import transformers

    names = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral"}
    config_class = getattr(transformers, f"{names[family]}Config")
    model_class = getattr(transformers, f"{names[family]}ForCausalLM")
    settings = {**SIZES, **({"sliding_window": None} if family == "mistral" else {}), **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**settings, attn_implementation="sdpa"))
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data += 0.2 * torch.randn_like(weight)
    return model.eval().requires_grad_(False)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 512 tokens in which every chat token of CHAT_TOKENS is one id; no BOS is added."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=list(CHAT_TOKENS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    text = "The magic number for the quiet river is 1234567. What are all the magic numbers in the text? " * 20
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def save_model(model: PreTrainedModel, directory: Path, eos_token_id: int | list[int] | None = None) -> Path:
    """Write a model and the tiny tokenizer; eos_token_id goes to generation_config.json. Returns the directory."""
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    if eos_token_id is not None:
        path = directory / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": eos_token_id}), encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def tiny_llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def tiny_qwen3() -> PreTrainedModel:
    return tiny_model("qwen3")


@pytest.fixture(scope="session")
def tiny_mistral() -> PreTrainedModel:
    return tiny_model("mistral")


@pytest.fixture(scope="session", params=FAMILIES)
def tiny(request: pytest.FixtureRequest) -> PreTrainedModel:
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_dir(family, **overrides) -> directory with config, weights, tokenizer and two eos ids."""
    made: dict[str, Path] = {}

    def directory(family: str, **overrides: Any) -> Path:
        key = json.dumps([family, overrides], sort_keys=True)
        if key not in made:
            target = tmp_path_factory.mktemp(f"tiny_{family}")
            made[key] = save_model(tiny_model(family, **overrides), target, eos_token_id=[2, 4])
        return made[key]

    return directory
