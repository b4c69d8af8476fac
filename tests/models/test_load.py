"""Loading local directories: weights, stop ids, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qcfuse.data.prompt import ChatTemplate
from qcfuse.models import CriticalLayers, LoadedModel, ModelSpec, ModelUnavailable, load, locate
from tests.conftest import CHAT_TOKENS, FAMILIES, save_model, tiny_model
from tests.models.test_spec import conf_spec


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("QCFUSE_CACHE", str(tmp_path / "cache"))


def path_spec(path: Path | str, **changes) -> ModelSpec:
    template = ChatTemplate(prefix="<|im_start|>{system}", suffix="<|im_end|>")
    settings = {"name": "m", "path": str(path), "template": template, "critical_layers": CriticalLayers(source="none")}
    return ModelSpec(**{**settings, **changes})


def copied(directory: Path, target: Path, **config_changes) -> Path:
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps({**config, **config_changes}), encoding="utf-8")
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_local_directory(family: str, tiny_dir) -> None:
    loaded = load(path_spec(tiny_dir(family), stop_tokens=["</s>"]))
    assert isinstance(loaded, LoadedModel)
    assert not loaded.model.training and not any(weight.requires_grad for weight in loaded.model.parameters())
    assert loaded.model.dtype == torch.float32 and loaded.model.config._attn_implementation == "sdpa"
    for name, weight in tiny_model(family).state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name]), name
    # [2, 4] of generation_config.json, 2 of config.json and the tokenizer, and </s> by name.
    assert loaded.stop_ids == {2, 4}
    assert loaded.tokenizer("<|im_start|>", add_special_tokens=False).input_ids == [1]
    assert loaded.max_context == 4096 and loaded.source == str(tiny_dir(family))


def test_stop_ids_merge_every_source(tiny_dir, tmp_path) -> None:
    target = copied(tiny_dir("qwen3"), tmp_path / "m", eos_token_id=9)
    assert load(path_spec(target, stop_tokens=["<|eot_id|>"])).stop_ids == {2, 4, 9, 10}


@pytest.mark.parametrize(
    ("name", "family"), [("qwen3_8b", "qwen3"), ("llama31_8b", "llama"), ("mistral_v03_7b", "mistral")]
)
def test_configured_models_load_from_a_path(name: str, family: str, tiny_dir) -> None:
    loaded = load(replace(conf_spec(name), path=str(tiny_dir(family))))
    ends = {CHAT_TOKENS.index(token) for token in loaded.spec.stop_tokens}
    assert ends and loaded.stop_ids == {2, 4} | ends
    text = loaded.spec.template.render_prefix("s") + loaded.spec.template.suffix
    ids = loaded.tokenizer(text, add_special_tokens=False).input_ids
    assert loaded.tokenizer.decode(ids) == text
    assert sum(i < len(CHAT_TOKENS) for i in ids) == sum(text.count(token) for token in CHAT_TOKENS)


def test_unknown_stop_token_is_named(tiny_dir) -> None:
    with pytest.raises(ValueError, match=r"stop token '<\|eot\|>'"):
        load(path_spec(tiny_dir("llama"), stop_tokens=["<|eot|>"]))


def test_explicit_dtype(tiny_dir) -> None:
    assert load(path_spec(tiny_dir("llama"), dtype="bfloat16")).model.dtype == torch.bfloat16


def test_unsupported_architecture_lists_what_works(tiny_dir, tmp_path) -> None:
    target = copied(tiny_dir("llama"), tmp_path / "m", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    with pytest.raises(ValueError, match="GPT2LMHeadModel is not supported; what works: Llama.*Qwen3") as error:
        load(path_spec(target))
    assert "\n" not in str(error.value)


def test_sliding_window_below_the_context(tiny_dir) -> None:
    directory = tiny_dir("mistral", sliding_window=1024)
    with pytest.raises(ValueError, match=r"sliding window of 1024 .* model\.max_context=1024"):
        load(path_spec(directory))
    assert load(path_spec(directory, max_context=1024)).max_context == 1024


def test_unused_sliding_window_of_qwen(tiny_dir, tmp_path) -> None:
    target = copied(tiny_dir("qwen3"), tmp_path / "m", sliding_window=64, use_sliding_window=False)
    assert load(path_spec(target)).max_context == 4096


def test_max_context_beyond_the_window(tiny_dir) -> None:
    with pytest.raises(ValueError, match="max_context=5000 exceeds the window of m, 4096"):
        load(path_spec(tiny_dir("llama"), max_context=5000))


def test_missing_directory(tmp_path) -> None:
    with pytest.raises(ModelUnavailable, match="model.path=.*nowhere: no such directory.*smollm2_135m"):
        locate(path_spec(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_directory_without_a_file(name: str, tiny_dir, tmp_path) -> None:
    target = copied(tiny_dir("llama"), tmp_path / "m")
    (target / name).unlink()
    with pytest.raises(ModelUnavailable, match="has no .*(config.json|safetensors)"):
        load(path_spec(target))


def test_missing_shard_is_named(tiny_dir, tmp_path) -> None:
    target = copied(tiny_dir("llama"), tmp_path / "m")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelUnavailable, match="has no model-1.safetensors"):
        locate(path_spec(target))


def test_no_tokenizer(tiny_dir, tmp_path) -> None:
    target = copied(tiny_dir("llama"), tmp_path / "m")
    for path in target.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="no tokenizer can be read|no fast form"):
        load(path_spec(target))


def test_int8_needs_cuda_and_two_devices_another_engine(tiny_dir) -> None:
    with pytest.raises(ValueError, match="quantization=int8 needs a CUDA device, not cpu"):
        load(path_spec(tiny_dir("llama"), quantization="int8"))
    with pytest.raises(ValueError, match="engine=vllm"):
        load(path_spec(tiny_dir("llama"), devices=2))


def test_fingerprint_follows_weights_dtype_and_rope(tiny_dir, tmp_path) -> None:
    base = load(path_spec(tiny_dir("llama"))).fingerprint
    assert load(path_spec(copied(tiny_dir("llama"), tmp_path / "same"))).fingerprint == base
    rope = {"rope_type": "default", "rope_theta": 5e5}
    others = [
        path_spec(save_model(tiny_model("llama", seed=1), tmp_path / "weights")),
        path_spec(copied(tiny_dir("llama"), tmp_path / "rope", rope_parameters=rope)),
        path_spec(copied(tiny_dir("llama"), tmp_path / "norm", rms_norm_eps=1e-6)),
        path_spec(tiny_dir("llama"), dtype="bfloat16"),
    ]
    assert len({base, *(load(spec).fingerprint for spec in others)}) == 5


def test_rewritten_weights_are_hashed_anew(tiny_dir, tmp_path) -> None:
    target = copied(tiny_dir("llama"), tmp_path / "m")
    before = load(path_spec(target)).fingerprint
    save_model(tiny_model("llama", seed=3), target)
    assert load(path_spec(target)).fingerprint != before
