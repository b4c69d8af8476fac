"""What conf/model/<name>.yaml says of a model; no weights, no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qcfuse.data.prompt import ChatTemplate

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
DTYPES = ("auto", "float32", "bfloat16", "float16")
SCALES = ("embedded", "paper")


@dataclass(frozen=True, kw_only=True)
class CriticalLayers:
    """Named rankings of layers, best first, 0-based, as published (a list may name a layer twice).

    source: where the lists come from. file: JSON that runner=profile writes, relative to conf/, with the ranking under
    "layers"; where it exists it is the list `profiled`, and `default` too if no default is published.
    """

    source: str
    lists: dict[str, list[int]] = field(default_factory=dict)
    file: str | None = None

    def __post_init__(self) -> None:
        for name, layers in self.lists.items():
            check_ranking(layers, f"critical_layers.lists.{name}")
        if "profiled" in self.lists:
            raise ValueError("critical_layers.lists.profiled is taken by what runner=profile measures; rename the list")

    @property
    def path(self) -> Path | None:
        return None if self.file is None else CONF_DIR / self.file

    def named(self) -> dict[str, tuple[int, ...]]:
        """Every ranking by name; without `default` where the model has not been profiled yet.

        Raises ValueError for a profile file that holds no ranking.
        """
        lists = {name: tuple(layers) for name, layers in self.lists.items()}
        if self.path is not None and self.path.exists():
            lists["profiled"] = read_ranking(self.path)
            lists.setdefault("default", lists["profiled"])
        return lists


def read_ranking(path: Path) -> tuple[int, ...]:
    """The list under "layers" of a profile file. Raises ValueError that names file and command."""
    try:
        layers = json.loads(path.read_text(encoding="utf-8"))["layers"]
        check_ranking(layers, str(path))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no ranking of layers ({error}); write it anew with "
                         f"`python run.py runner=profile`") from None
    return tuple(layers)


def check_ranking(layers: Sequence[int], where: str) -> None:
    """Raises ValueError unless layers is a non-empty list of layer numbers."""
    if not layers or not all(type(layer) is int and layer >= 0 for layer in layers):
        raise ValueError(f"{where}={layers}: give layer numbers from 0, best first")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model as configured.

    name: used in output paths. hub_id, revision: the weights on the Hugging Face hub; path: a local directory used
    instead; embedded: the weights come with a package (`qcfuse.models.embedded`).
    dtype: auto is float32 on CPU and bfloat16 on CUDA. max_context: tokens; None is the model's own window.
    stop_tokens: text of tokens that end an answer, on top of every eos of the model's files.
    quantization: None or int8 (8-bit weights, done by the engine). devices: tensor-parallel devices.
    default_scale: the `scale` group used where none is given.
    """

    name: str
    template: ChatTemplate
    critical_layers: CriticalLayers
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = None
    embedded: bool = False
    dtype: str = "auto"
    max_context: int | None = None
    stop_tokens: list[str] = field(default_factory=list)
    quantization: str | None = None
    devices: int = 1
    default_scale: str = "paper"

    def __post_init__(self) -> None:
        if not (self.hub_id or self.path or self.embedded):
            raise ValueError(f"model {self.name}: no weights named; give model.path=DIR or model.hub_id=OWNER/NAME")
        for key, value, allowed in (
            ("dtype", self.dtype, DTYPES),
            ("quantization", self.quantization, (None, "int8")),
            ("default_scale", self.default_scale, SCALES),
        ):
            if value not in allowed:
                raise ValueError(f"model.{key}={value} is unknown; choose one of {', '.join(map(str, allowed))}")
        for key, value in (("devices", self.devices), ("max_context", self.max_context)):
            if value is not None and value < 1:
                raise ValueError(f"model.{key}={value} is below 1; give a count of at least 1")
