"""Full prefill's answer ids and logits, kept once per prompt, whatever cells need them and when."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from qcfuse.engine.base import Engine, Reference
from qcfuse.types import Request


class References:
    """One small safetensors file per model, engine settings and prompt hash; a damaged one is made again."""

    def __init__(self, directory: Path, engine: Engine) -> None:
        self.directory = directory / engine.reference_key
        self.engine = engine

    def of(self, request: Request) -> Reference:
        path = self.directory / f"{request.prompt_sha256}.safetensors"
        try:
            return Reference(**load_file(path))
        except (OSError, SafetensorError, TypeError):
            reference = self.engine.reference(request)
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        tensors = {"answer_ids": reference.answer_ids, "logits": reference.logits}
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary)
        os.replace(temporary, path)
        return reference
