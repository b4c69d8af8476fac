"""Drawn figures as images in Weights & Biases, through the logger that runs use (conf/logger/wandb.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

LOGGER = Path(__file__).parents[1] / "conf" / "logger" / "wandb.yaml"


def log_figures(outputs: Path, drawn: Mapping[str, tuple[str, Path]]) -> None:
    """drawn: figure -> its experiment and PNG. One run per experiment, in the group of that experiment's cells."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    logger = instantiate(OmegaConf.create({"output_dir": str(outputs), "logger": OmegaConf.load(LOGGER)}).logger)
    for experiment in dict.fromkeys(experiment for experiment, _ in drawn.values()):
        images = {name: path for name, (owner, path) in drawn.items() if owner == experiment}
        logger.start(f"{experiment}/figures", experiment, {"figures": sorted(images)})
        for name, path in images.items():
            logger.log_image(name, path)
        logger.finish()
