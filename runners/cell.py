"""A cell: one configuration, its components, and the directory that its results live in."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from qcfuse.types import budget

# What names a cell's directory itself, or changes nothing in its records: no part of "other overrides".
NAMED = ("model", "dataset", "selector", "engine", "rho", "bandwidth", "experiment", "experiment_name")
INERT = ("limit", "force", "logger", "runner", "output_dir")
# Not hashed either: `scale` acts through the dataset's own fields, the others say where things lie.
UNHASHED = (*INERT, "experiment_name", "scale")
SCALARS = ("rho", "bandwidth", "limit", "seed", "reduce", "force", "dump", "output_dir", "experiment_name")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Components are instantiated (and so checked) before any model loads. config: resolved, as plain data."""

    config: dict[str, Any]
    components: dict[str, Any]
    choices: dict[str, str]
    overrides: tuple[str, ...]

    @classmethod
    def of(cls, config: DictConfig, hydra: DictConfig) -> Cell:
        """hydra: the job's hydra node. Raises ValueError with one line where a value is impossible."""
        choices = {k: str(v) for k, v in hydra.runtime.choices.items() if not k.startswith("hydra") and v is not None}
        plain = {key: config[key] for key in config if key != "hydra"}
        resolved = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
        components = {
            key: build(key, node) for key, node in resolved.items() if isinstance(node, dict) and "_target_" in node
        }
        cell = cls(config=resolved, components=components, choices=choices, overrides=tuple(hydra.overrides.task))
        cell._check()
        return cell

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("components", {}):
            return self.components[name]
        if name in SCALARS:
            return self.config[name]
        raise AttributeError(name)

    @property
    def rho(self) -> float | str:
        """The selector's own ratio where it has just one (full prefill 1, direct reuse 0); auto: chosen per request."""
        fixed = self.selector.fixed_rho
        return self.config["rho"] if fixed is None else fixed

    @property
    def path(self) -> Path:
        bandwidth = "none" if self.bandwidth is None else f"{self.bandwidth:g}"
        rho = self.rho if self.rho == "auto" else f"{self.rho:g}"
        parts = [f"rho={rho}", f"bw={bandwidth}", *self._other_overrides()]
        names = [self.choices[group] for group in ("engine", "model", "dataset", "selector")]
        return Path(self.output_dir, self.experiment_name, *names, ",".join(parts))

    @property
    def name(self) -> str:
        return str(self.path.relative_to(self.output_dir))

    @property
    def sha256(self) -> str:
        """Of the resolved config (without what changes no record) and of the critical layers that it leads to."""
        return self.sha256_of(self.config)

    def sha256_of(self, config: dict[str, Any]) -> str:
        """The hash that another resolved config has at this cell's rho and critical layers."""
        hashed = {key: value for key, value in config.items() if key not in UNHASHED}
        hashed["rho"] = self.rho
        hashed["storage"] = {key: value for key, value in hashed["storage"].items() if key != "root"}
        hashed["critical_layers"] = {k: list(v) for k, v in self.model.critical_layers.named().items()}
        return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode()).hexdigest()

    def quality_key(self, config: dict[str, Any] | None = None) -> str:
        """Equal for cells (or configs, at this cell's rho) whose predictions are the same: they differ at most in where
        caches lie and how fast they are read."""
        if self.rho == "auto":
            return self.sha256  # what is recomputed follows from the link
        of = self.config if config is None else config
        kept = {key: value for key, value in of.items() if key not in (*UNHASHED, "storage", "bandwidth")}
        return json.dumps({**kept, "rho": self.rho}, sort_keys=True, default=str)

    def key(self, *groups: str) -> str:
        """Equal for cells that share the resolved config of these groups and scalars."""
        return json.dumps([self.config[group] for group in groups], sort_keys=True, default=str)

    def _other_overrides(self) -> list[str]:
        """Sorted overrides that neither name the directory nor leave records alone; long or odd values are hashed."""
        texts = []
        for override in self.overrides:
            key, _, value = override.lstrip("+~").partition("=")
            is_default_scale = key == "scale" and value == self.model.default_scale
            if key in NAMED or key.split(".")[0] in INERT or key == "storage.root" or is_default_scale:
                continue
            plain = re.sub(r"[^\w.+-]+", "-", value).strip("-")
            if "/" in value or len(plain) > 48:
                plain = f"{plain[-24:]}~{hashlib.sha256(value.encode()).hexdigest()[:8]}"
            texts.append(f"{key}={plain}")
        return sorted(texts)

    def _check(self) -> None:
        if self.config["rho"] == "auto":
            if self.bandwidth is None:
                raise ValueError("rho=auto takes the ratio whose recompute hides the load, and needs the link's speed "
                                 "for it: set bandwidth to GB/s, or give rho a number from 0 to 1")
        else:
            budget(self.config["rho"], 1)
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1, or null for all samples")


def build(group: str, node: dict[str, Any]) -> Any:
    """A component from its `_target_` block. Raises ValueError with the component's own line where a value is wrong."""
    try:
        return instantiate(node)
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ValueError(str(cause) if isinstance(cause, ValueError) else f"{group}: {cause}") from None
