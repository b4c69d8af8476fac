"""The one command: composes a configuration (or a sweep of them) and hands it to a runner."""

from __future__ import annotations

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from runners.compose_errors import explain
from runners.dispatch import run_configs


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig | list[DictConfig]) -> None:
    """One config for a plain run; the grouped launcher hands over a sweep's whole list."""
    single = isinstance(config, DictConfig)
    jobs = [(config, HydraConfig.get())] if single else [(job, job.hydra) for job in config]
    try:
        run_configs(jobs)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to continue")


if __name__ == "__main__":
    # argparse takes overrides on one side of a flag only; users put -m anywhere.
    sys.argv.sort(key=lambda argument: argument in ("-m", "--multirun"))
    explain(sys.argv[1:])
    main()
