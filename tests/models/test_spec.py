"""Model descriptions: conf/model, value checks, critical layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from qcfuse.data.prompt import ChatTemplate
from qcfuse.models import CriticalLayers, ModelSpec
from qcfuse.models import spec as spec_module

CONF = Path(__file__).resolve().parents[2] / "conf" / "model"
NAMES = sorted(path.stem for path in CONF.glob("*.yaml"))
PUBLISHED = {
    "llama31_8b": ((14, 13, 17), (14, 13, 16)),
    "mistral_v03_7b": ((16, 19, 15), (15, 19, 18)),
    "qwen3_8b": ((20, 21, 18), (20, 21, 19)),
    "qwen3_14b": ((24, 26, 21), (24, 26, 21)),
    "qwen3_32b": ((48, 45, 50), (48, 45, 50)),
}


def conf_spec(name: str) -> ModelSpec:
    config = OmegaConf.load(CONF / f"{name}.yaml")
    config.pop("defaults", None)
    return instantiate(config)


def make_spec(**changes) -> ModelSpec:
    template = ChatTemplate(prefix="<|im_start|>{system}", suffix="<|im_end|>")
    settings = {"name": "m", "hub_id": "a/b", "template": template, "critical_layers": CriticalLayers(source="none")}
    return ModelSpec(**{**settings, **changes})


def test_the_models_of_both_papers_are_there() -> None:
    assert set(NAMES) == {
        "smollm2_135m", "qwen3_8b", "qwen3_14b", "qwen3_32b", "llama31_8b", "mistral_v03_7b", "mistral_7b", "yi_34b",
        "llama_70b",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_yaml_instantiates(name: str) -> None:
    spec = conf_spec(name)
    assert spec.name == name
    assert "SYS" in spec.template.render_prefix("SYS")
    assert spec.template.suffix and spec.stop_tokens
    assert spec.default_scale == ("embedded" if name == "smollm2_135m" else "paper")
    assert spec.embedded is (name == "smollm2_135m")
    assert spec.critical_layers.path == spec_module.CONF_DIR / f"critical_layers/{name}.json"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_layers(name: str) -> None:
    lists = conf_spec(name).critical_layers.named()
    assert (lists["default"][:3], lists["later_list"][:3]) == PUBLISHED[name]
    assert len(lists["default"]) == len(lists["later_list"]) == 10


def test_quantized_models_of_cacheblend() -> None:
    found = {name: (conf_spec(name).quantization, conf_spec(name).devices) for name in NAMES}
    assert {name: value for name, value in found.items() if value != (None, 1)} == {
        "yi_34b": ("int8", 1), "llama_70b": ("int8", 2),
    }  # fmt: skip


def test_qwen_answers_without_thinking() -> None:
    assert conf_spec("qwen3_8b").template.suffix.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hub_id": None}, "model.path=DIR"),
        ({"dtype": "fp8"}, "dtype=fp8"),
        ({"quantization": "int4"}, "quantization=int4"),
        ({"devices": 0}, "devices=0"),
        ({"max_context": 0}, "max_context=0"),
        ({"default_scale": "huge"}, "default_scale=huge"),
    ],
)
def test_bad_values_are_named(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_spec(**changes)


def test_profile_file_fills_default_only_where_none_is_published(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(spec_module, "CONF_DIR", tmp_path)
    bare = CriticalLayers(source="measured", file="m.json")
    published = CriticalLayers(source="paper", lists={"default": [1, 2]}, file="m.json")
    assert bare.named() == {}
    (tmp_path / "m.json").write_text(json.dumps({"layers": [7, 3]}), encoding="utf-8")
    assert bare.named() == {"profiled": (7, 3), "default": (7, 3)}
    assert published.named() == {"default": (1, 2), "profiled": (7, 3)}


@pytest.mark.parametrize("text", ["", "{}", '{"layers": []}', '{"layers": [1.5]}', '{"layers": 3}', "[1]"])
def test_damaged_profile_file_is_named(tmp_path, monkeypatch, text: str) -> None:
    monkeypatch.setattr(spec_module, "CONF_DIR", tmp_path)
    (tmp_path / "m.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"m\.json holds no ranking.*runner=profile"):
        CriticalLayers(source="measured", file="m.json").named()


@pytest.mark.parametrize("lists", [{"default": []}, {"default": [-1]}, {"default": ["3"]}, {"profiled": [1]}])
def test_bad_lists_are_refused(lists: dict) -> None:
    with pytest.raises(ValueError, match="critical_layers.lists"):
        CriticalLayers(source="x", lists=lists)
