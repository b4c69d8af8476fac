"""A hydra launcher that hands all jobs of a sweep to one call, so that a model loads once and arms share a sample."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


@dataclass
class GroupedLauncherConf:
    _target_: str = "hydra_plugins.qcfuse_grouped.GroupedLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="grouped", node=GroupedLauncherConf, provider="qcfuse")


class GroupedLauncher(Launcher):
    """Composes every job's config and calls the task function once, with the list."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.hydra_context = hydra_context
        self.task_function = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        configure_log(self.config.hydra.job_logging, self.config.hydra.verbose)
        configs = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            OmegaConf.set_readonly(config.hydra, False)
            config.hydra.job.id, config.hydra.job.num = str(number), number
            configs.append(config)
        self.task_function(configs)
        return [
            JobReturn(overrides=filter_overrides(overrides), cfg=config, status=JobStatus.COMPLETED, _return_value=None)
            for overrides, config in zip(job_overrides, configs, strict=True)
        ]
