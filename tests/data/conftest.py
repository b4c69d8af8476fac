"""A small byte-level BPE tokenizer, so that data tests need no model, and the shipped dataset configs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from qcfuse.data.base import Dataset
from qcfuse.data.prompt import ChatTemplate

CONF = Path(__file__).parents[2] / "conf" / "dataset"
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    text = (CONF.parents[1] / "qcfuse" / "data" / "texts" / "prose_eval.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL,
                                                              initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(1500)


@pytest.fixture(scope="session")
def coarse_tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(400)


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate(prefix="<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n",
                        suffix="<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture(scope="session")
def make() -> Callable[..., Dataset]:
    """make("ruler_mq", chunk_tokens=64, seed=1, ...): the shipped config with the embedded scale and overrides."""

    def build(name: str, /, *, scale: dict[str, int] | None = None, **overrides: Any) -> Dataset:
        sizes = {"chunk_tokens": 128, "num_chunks": 8, "num_samples": 12} | (scale or {})
        own = OmegaConf.load(CONF / f"{name}.yaml")
        root = OmegaConf.create({"scale": sizes, "seed": 42, "dataset": OmegaConf.merge(own, overrides)})
        return instantiate(root.dataset)

    return build
