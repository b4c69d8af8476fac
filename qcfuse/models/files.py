"""From a spec to a local directory that holds config.json, safetensors and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from qcfuse.models.errors import ModelUnavailable
from qcfuse.models.spec import ModelSpec

PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.txt"]
INDEX_NAME = "model.safetensors.index.json"
HUB_TIMEOUT_S = 5.0


def locate(spec: ModelSpec) -> Path:
    """The directory of the model's files: spec.path, else the embedded default, else the hub (downloaded once).

    Raises ModelUnavailable, one line, where the files cannot be had.
    """
    if spec.path is not None:
        return check_directory(Path(spec.path).expanduser(), f"model.path={spec.path}")
    if spec.embedded:
        from qcfuse.models.embedded import embedded_directory

        return embedded_directory()
    return from_hub(spec)


def check_directory(directory: Path, label: str) -> Path:
    """The directory itself once it is seen to hold a model. Raises ModelUnavailable that says what is missing."""
    if not directory.is_dir():
        raise ModelUnavailable(f"{label}: no such directory; give one that holds config.json, *.safetensors and a "
                               f"tokenizer, or use model=smollm2_135m, which comes with the install")
    missing = [name for name in ("config.json",) if not (directory / name).is_file()]
    missing += missing_weights(directory)
    if missing:
        raise ModelUnavailable(f"{label}: {directory} has no {', '.join(missing)}; a model directory holds "
                               f"config.json, *.safetensors and a tokenizer")
    return directory


def missing_weights(directory: Path) -> list[str]:
    """Names of weight files that ought to be there: those of the index, or any safetensors at all."""
    index = directory / INDEX_NAME
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            return [f"readable {INDEX_NAME}"]
        return [name for name in shards if not (directory / name).is_file()]
    return [] if any(directory.glob("*.safetensors")) else ["*.safetensors"]


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checked directory, by name."""
    index = directory / INDEX_NAME
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [directory / name for name in sorted(names)]
    return sorted(directory.glob("*.safetensors"))


def from_hub(spec: ModelSpec) -> Path:
    """A whole snapshot in the hub's cache: one already there is used without asking the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(spec.hub_id, revision=spec.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return download(spec)
    whole = (cached / "config.json").is_file() and not missing_weights(cached)
    return cached if whole else download(spec)


def download(spec: ModelSpec) -> Path:
    """Ask the hub once with a short timeout, then download: an unreachable hub fails in seconds, not in retries."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().model_info(spec.hub_id, revision=spec.revision, timeout=HUB_TIMEOUT_S)
        directory = snapshot_download(
            spec.hub_id, revision=spec.revision, allow_patterns=PATTERNS, etag_timeout=HUB_TIMEOUT_S
        )
    # Every failure of the hub client (network, proxy, access, disk) leads to the same three ways out.
    except Exception as error:
        raise ModelUnavailable(
            f"model {spec.name}: {spec.hub_id} cannot be had from the hub ({reason(error)}); download it elsewhere and "
            f"give model.path=DIR, or use model=smollm2_135m, which comes with the install"
        ) from error
    return check_directory(Path(directory), f"model {spec.name}")


def reason(error: Exception) -> str:
    """A few words for an error of the hub client."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return "access has to be granted on its page; log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return "no such revision"
    if isinstance(error, RepositoryNotFoundError):
        return "no such repository, or a private one"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
