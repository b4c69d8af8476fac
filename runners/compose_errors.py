"""A configuration that does not compose gets one line that names the key and the nearest right one."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qcfuse.config import register

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"


def explain(arguments: Sequence[str]) -> None:
    """Composes what the command line asks for (each value of a sweep alone) and exits with one line where it fails."""
    register()
    texts = [a for a in arguments if "=" in a and not a.startswith("-") and not a.lstrip("+~").startswith("hydra")]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        try:
            configs = [compose("config", overrides) for overrides in _variants(texts)]
            check_writable(Path(configs[0].output_dir))
        except (HydraException, OmegaConfBaseException) as error:
            sys.exit(f"error: {describe(error, texts)}")
        except OSError as error:
            sys.exit(f"error: {error}")


def check_writable(directory: Path) -> None:
    """Raises OSError where results could not be kept."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"output_dir={directory} cannot be made ({error.strerror}); give output_dir=DIR") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OSError(f"output_dir={directory} is not writable; give output_dir=DIR or change its permissions")


def describe(error: Exception, texts: Sequence[str]) -> str:
    """One line: what was wrong, the nearest option or key, where there is one."""
    message = str(error).splitlines()
    if missing := re.search(r"Could not find '([\w/]+)/([^'/]+)'", message[0]):
        group, name = missing.groups()
        options = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))
        return f"{group}={name} does not exist{_nearest(name, options)}; choose one of {', '.join(options)}"
    for text in texts:
        key, _, value = text.lstrip("+~").partition("=")
        if f"'{key}'" in str(error) or f"'{key.split('.')[-1]}'" in str(error) or f": {key}" in str(error):
            keys = _known_keys()
            if key not in keys:
                return f"unknown option {key} (in {text}){_nearest(key, keys)}"
            return f"{key}={value} cannot be used: {message[0]}"
    return " ".join(message[:2])


def _variants(texts: Sequence[str]) -> list[list[str]]:
    """The plain overrides with, one at a time, each value of a sweep: every value is checked, no grid is built."""
    overrides = OverridesParser.create().parse_overrides(list(texts))
    plain = [o.input_line for o in overrides if not o.is_sweep_override()]
    swept = [
        _single(override, str(value))
        for override in overrides
        if override.is_sweep_override()
        for value in override.sweep_string_iterator()
    ]
    return [[*plain, one] for one in swept] or [plain]


def _single(override: Override, value: str) -> str:
    return f"{override.input_line.partition('=')[0]}={value}"


def _known_keys() -> list[str]:
    config = compose("config")
    keys: list[str] = []

    def walk(node: DictConfig, prefix: str) -> None:
        for key in node:
            keys.append(f"{prefix}{key}")
            child = OmegaConf.select(
                config, f"{prefix}{key}", throw_on_missing=False, throw_on_resolution_failure=False
            )
            if isinstance(child, DictConfig):
                walk(child, f"{prefix}{key}.")

    walk(config, "")
    return [*keys, "experiment"]


def _nearest(name: str, options: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
