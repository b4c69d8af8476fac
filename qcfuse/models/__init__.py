"""Models: what conf/model describes (`ModelSpec`), where its files are (`locate`), and the loaded thing (`load`)."""

from __future__ import annotations

from qcfuse.models.errors import ModelUnavailable
from qcfuse.models.files import locate
from qcfuse.models.loaded import LoadedModel, load, load_tokenizer, read_stop_ids
from qcfuse.models.spec import CriticalLayers, ModelSpec

__all__ = [
    "CriticalLayers", "LoadedModel", "ModelSpec", "ModelUnavailable", "load", "load_tokenizer", "locate",
    "read_stop_ids",
]  # fmt: skip
