"""The model key of the chunk store: which weights, in which arithmetic, a cache was made with."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcfuse.models.embedded import cache_root
from qcfuse.models.files import weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SETTINGS = (
    "architectures", "num_hidden_layers", "hidden_size", "intermediate_size", "hidden_act", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "attention_bias", "sliding_window",
)  # fmt: skip
"""Config entries that change K or V for the same weights."""


def fingerprint(directory: Path, config: PretrainedConfig, dtype: str, quantization: str | None = None) -> str:
    """sha256 (hex) over the content of every weight file, dtype, quantization, rope and norm settings.

    All bytes are hashed, no sample of them: a fine-tune may differ anywhere, and a chunk cache of another model
    would be used in silence. A file's hash is remembered by path, size and modification time.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = list(pool.map(file_sha256, weight_files(directory)))
    settings = {name: getattr(config, name, None) for name in SETTINGS}
    text = json.dumps([hashes, dtype, quantization, settings], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file's content, from the cache where size and mtime are unchanged."""
    real = path.resolve()
    stat = real.stat()
    key: dict[str, Any] = {"path": str(real), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    memo = cache_root() / "fingerprints" / f"{hashlib.sha256(str(real).encode()).hexdigest()}.json"
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
        if {name: known[name] for name in key} == key:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    remember(memo, {**key, "sha256": digest})
    return digest


def remember(memo: Path, entry: dict[str, Any]) -> None:
    """Write the entry whole or not at all; a cache that cannot be written only costs the next run its time."""
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memo.parent, suffix=".tmp", delete=False) as file:
            json.dump(entry, file)
        os.replace(file.name, memo)
    except OSError:
        return
