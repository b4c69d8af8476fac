"""The embedded default: converted once, whole or not at all, and it answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from qcfuse.models import ModelUnavailable, embedded, load
from tests.models.test_spec import conf_spec


@pytest.fixture(scope="module")
def smollm2():
    return load(conf_spec("smollm2_135m"))


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def test_answers_and_stops(smollm2) -> None:
    template = smollm2.spec.template
    text = template.render_prefix("You answer in one word.") + "What is the capital of France?" + template.suffix
    prompt = torch.tensor([ids_of(smollm2.tokenizer, text)])
    out = smollm2.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    answer = out[0, prompt.shape[1] :].tolist()
    assert "Paris" in smollm2.tokenizer.decode(answer)
    assert answer[-1] in smollm2.stop_ids and not smollm2.stop_ids & set(answer[:-1])


def test_tokenizer_is_smollms(smollm2) -> None:
    tokenizer = smollm2.tokenizer
    assert [ids_of(tokenizer, text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]
    # Digits stand alone, and blanks before a digit are one piece (split off before the byte-level rule).
    assert len(ids_of(tokenizer, "1234567")) == 7
    assert ids_of(tokenizer, "\n\n7")[:-1] == ids_of(tokenizer, "\n\n") and len(ids_of(tokenizer, "\n\n7")) == 2
    text = "A needle: 42,  and\n\nmore.\t1<|im_end|>"
    assert tokenizer.decode(ids_of(tokenizer, text)) == text
    assert not tokenizer("a").input_ids == tokenizer("<|im_start|>a").input_ids


def test_shape_and_stop_ids(smollm2) -> None:
    config = smollm2.model.config
    shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, smollm2.max_context)
    assert shape == (30, 9, 3, 8192)
    assert smollm2.stop_ids == {0, 2} and smollm2.model.dtype == torch.float32


@pytest.fixture
def quick(tmp_path, monkeypatch) -> list[Path]:
    """An own cache and a conversion that only notes where it wrote."""
    calls: list[Path] = []

    def convert(gguf: Path, directory: Path) -> None:
        calls.append(directory)
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_text("")

    monkeypatch.setenv("QCFUSE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "convert", convert)
    return calls


def test_converted_once(quick: list[Path]) -> None:
    first = embedded.embedded_directory()
    assert embedded.embedded_directory() == first
    assert len(quick) == 1 and not quick[0].exists() and [path.name for path in first.parent.iterdir()] == [first.name]


def test_killed_conversion_is_never_used(quick: list[Path], monkeypatch) -> None:
    whole = embedded.convert

    def die_half_way(gguf: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "convert", die_half_way)
    with pytest.raises(KeyboardInterrupt):
        embedded.embedded_directory()
    monkeypatch.setattr(embedded, "convert", whole)
    assert (embedded.embedded_directory() / "model.safetensors").exists() and len(quick) == 1


def test_leftover_of_a_kill_is_swept_later_but_not_while_young(quick: list[Path], monkeypatch) -> None:
    target = embedded.embedded_directory()
    shutil.rmtree(target)
    left = target.parent / f"{target.name}.abc.tmp"
    left.mkdir()
    embedded.embedded_directory()
    assert left.exists()
    shutil.rmtree(target)
    monkeypatch.setattr(embedded, "ABANDONED_AFTER_S", -1.0)
    embedded.embedded_directory()
    assert not left.exists()


def test_a_faster_process_wins(quick: list[Path], monkeypatch) -> None:
    whole = embedded.convert
    target = embedded.embedded_directory()
    shutil.rmtree(target)

    def slow(gguf: Path, directory: Path) -> None:
        whole(gguf, directory)
        target.mkdir()
        whole(gguf, target)
        (target / "theirs").touch()

    monkeypatch.setattr(embedded, "convert", slow)
    assert (embedded.embedded_directory() / "theirs").exists()


def test_unwritable_cache(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QCFUSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable, match="cannot write .*QCFUSE_CACHE"):
        embedded.embedded_directory()


def test_package_missing(monkeypatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package")
    with pytest.raises(ModelUnavailable, match="make setup.*model.path=DIR"):
        embedded.embedded_directory()
