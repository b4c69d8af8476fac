"""Weights and tokenizer of a spec, ready for the reference engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcfuse.models.files import locate
from qcfuse.models.fingerprint import fingerprint
from qcfuse.models.spec import ModelSpec
from qcfuse.models.support import check_config, context_window

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """model: a transformers causal LM, eval mode, no gradients, sdpa attention. fingerprint: the store's model key.

    stop_ids: every id that ends an answer. source: the directory of the files. max_context: tokens of the window.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    stop_ids: frozenset[int]
    fingerprint: str
    source: str
    max_context: int
    spec: ModelSpec


def load(spec: ModelSpec, device: str = "cpu") -> LoadedModel:
    """Load the model of a spec onto one device.

    Raises ModelUnavailable where its files cannot be had, ValueError for an architecture, window, quantization or
    number of devices that this path cannot run, each in one line.
    """
    check_engine(spec, device)
    directory = locate(spec)
    config = read_config(directory)
    check_config(config, spec)
    tokenizer = load_tokenizer(directory)
    dtype = dtype_name(spec, device)
    return LoadedModel(
        model=load_weights(spec, directory, dtype, device),
        tokenizer=tokenizer,
        stop_ids=read_stop_ids(spec, directory, tokenizer),
        fingerprint=fingerprint(directory, config, dtype, spec.quantization),
        source=str(directory),
        max_context=context_window(config, spec),
        spec=spec,
    )


def check_engine(spec: ModelSpec, device: str) -> None:
    """Refuse what needs another engine or device before any file is touched."""
    if spec.devices > 1:
        raise ValueError(f"model {spec.name} is set to {spec.devices} devices, and engine=hf runs on one; use "
                         f"engine=vllm, or model.devices=1 on a device that holds it")
    if spec.quantization and not device.startswith("cuda"):
        raise ValueError(f"model {spec.name}: quantization={spec.quantization} needs a CUDA device, not {device}; give "
                         f"model.quantization=null")


def dtype_name(spec: ModelSpec, device: str) -> str:
    """The dtype by name: `auto` is bfloat16 on CUDA and float32 elsewhere."""
    if spec.dtype != "auto":
        return spec.dtype
    return "bfloat16" if device.startswith("cuda") else "float32"


def read_config(directory: Path) -> PretrainedConfig:
    """The model's config.json. Raises ValueError for one that transformers cannot read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{directory}/config.json cannot be read ({' '.join(str(error).split())[:160]})") from error


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The model's fast tokenizer. Raises ValueError where there is none (spans need its character offsets).

    mistral_format=False: special tokens written as text have to parse, which Mistral's own tokenizer refuses.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, mistral_format=False)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ValueError(f"{directory}: no tokenizer can be read ({' '.join(str(error).split())[:160]}); give a "
                         f"directory with tokenizer.json") from error
    if not tokenizer.is_fast:
        raise ValueError(f"{directory}: its tokenizer {type(tokenizer).__name__} has no fast form; give a directory "
                         f"with tokenizer.json")
    return tokenizer


def load_weights(spec: ModelSpec, directory: Path, dtype: str, device: str) -> PreTrainedModel:
    """The causal LM in eval mode on `device`."""
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    if spec.quantization == "int8":
        options |= {"quantization_config": int8_config(spec), "device_map": device}
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, use_safetensors=True, **options)
    if spec.quantization is None:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def int8_config(spec: ModelSpec) -> Any:
    """transformers' setting for 8-bit weights. Raises ValueError where bitsandbytes is not installed."""
    from importlib.util import find_spec

    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is None:
        raise ValueError(f"model {spec.name}: 8-bit weights need the package bitsandbytes; install it (`pip install "
                         f"bitsandbytes`), or give model.quantization=null")
    return BitsAndBytesConfig(load_in_8bit=True)


def read_stop_ids(spec: ModelSpec, directory: Path, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Every eos id of generation_config.json, config.json and the tokenizer, and the ids of spec.stop_tokens.

    Raises ValueError for a stop token that is not one token of this tokenizer.
    """
    from transformers import GenerationConfig

    ids = as_ids(read_config(directory).eos_token_id) | as_ids(tokenizer.eos_token_id)
    if (directory / "generation_config.json").is_file():
        ids |= as_ids(GenerationConfig.from_pretrained(directory).eos_token_id)
    vocabulary = tokenizer.get_vocab()
    for token in spec.stop_tokens:
        if token not in vocabulary:
            raise ValueError(f"model {spec.name}: stop token {token!r} is not a token of {directory}; correct "
                             f"model.stop_tokens ([] uses the model's own eos ids)")
        ids.add(vocabulary[token])
    if not ids:
        raise ValueError(f"model {spec.name}: {directory} names no eos token; give model.stop_tokens=[TEXT]")
    return frozenset(ids)


def as_ids(value: int | list[int] | None) -> set[int]:
    """An eos entry (absent, one id, a list) as a set."""
    return set() if value is None else {value} if isinstance(value, int) else set(value)
