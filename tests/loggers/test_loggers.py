from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from qcfuse import loggers
from qcfuse.loggers.base import RunLogger, flatten

ROOT = Path(loggers.__file__).parents[2]
OFFLINE_RUN = """
import sys
from matplotlib.figure import Figure
from qcfuse.loggers import create

output_dir = sys.argv[1]
figure = Figure(figsize=(1, 1))
figure.savefig(f"{output_dir}/plot.png")
logger = create("wandb", project="qcfuse", mode="offline", output_dir=output_dir, start_timeout_s=120)
for cell in ("cell-one", "cell-two"):
    logger.start(cell, "sweep-7", {"rho": 0.35, "selector": {"name": "qcfuse"}})
    logger.log_metrics({"n": 2, "score_mean": 0.625, "ttft_s": {"median": 1.25}, "pipeline_efficiency_median": None})
    logger.log_table("samples", [
        {"sample_id": "s0", "score": 1.0, "answers": ("7", "8"), "stages_s": {"probe": 0.5}, "error": None},
        {"sample_id": "s1", "score": 0, "answers": (), "stages_s": {}, "error": "boom"},
    ])
    logger.log_image("plot", f"{output_dir}/plot.png")
    logger.finish()
"""


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess, list[str]]:
    """Two cells logged with every route to the network leading to a listener that notes who calls."""
    root, calls = tmp_path_factory.mktemp("wandb"), []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    calls.append(str(server.accept()[0].recv(200)))
                except OSError:
                    return

        threading.Thread(target=listen, daemon=True).start()
        proxy = f"http://127.0.0.1:{server.getsockname()[1]}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
        env |= {
            "HTTPS_PROXY": proxy,
            "HTTP_PROXY": proxy,
            "https_proxy": proxy,
            "http_proxy": proxy,
            "HOME": str(root / "home"),
        }
        env |= {"NO_PROXY": "", "no_proxy": ""}
        done = subprocess.run([sys.executable, "-c", OFFLINE_RUN, str(root)], cwd=ROOT, env=env, capture_output=True,
                              text=True, check=True)  # fmt: skip
    return root, done, calls


def test_offline_writes_one_run_a_cell_with_config_group_and_metrics(offline: tuple) -> None:
    root, _, _ = offline
    runs = sorted((root / "wandb").glob("offline-run-*/run-*.wandb"))
    contents = [run.read_bytes() for run in runs]
    assert len(runs) == 2
    assert {name for name in (b"cell-one", b"cell-two") for content in contents if name in content} == {
        b"cell-one",
        b"cell-two",
    }
    for content in contents:
        for part in (b"sweep-7", b"selector", b"0.35", b"score_mean", b"0.625", b"ttft_s.median"):
            assert part in content
        assert b"pipeline_efficiency_median" not in content


def test_offline_writes_the_table_and_the_image(offline: tuple) -> None:
    root, _, _ = offline
    tables = list((root / "wandb").glob("offline-run-*/files/media/table/*.table.json"))
    assert len(tables) == 2 and len(list((root / "wandb").glob("offline-run-*/files/media/images/*.png"))) == 2
    table = json.loads(tables[0].read_text())
    assert table["columns"] == ["sample_id", "score", "answers", "stages_s.probe", "error"]
    assert table["data"] == [["s0", 1.0, "['7', '8']", 0.5, None], ["s1", 0, "[]", None, "boom"]]


def test_offline_is_silent_calls_nobody_and_leaves_the_home_folder_alone(offline: tuple) -> None:
    root, done, calls = offline
    assert calls == [] and done.stdout == "" and "wandb" not in done.stderr.lower()
    assert not [path for path in (root / "home").rglob("*") if "wandb" in path.name.lower()]


@pytest.mark.parametrize("cause", ["disk", "library"])
def test_a_logger_that_fails_warns_once_and_raises_nothing(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output_dir = tmp_path / "outputs"
    if cause == "disk":
        output_dir.write_text("a file where a folder should be")
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
        for name in ("CACHE", "CONFIG", "DATA"):
            monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))
    logger = loggers.create("wandb", project="p", mode="offline", output_dir=output_dir, start_timeout_s=5)
    with caplog.at_level(logging.WARNING):
        logger.start("cell", "group", {})
        logger.log_metrics({"n": 1})
        logger.log_table("samples", [{"sample_id": "s0"}])
        logger.log_image("plot", tmp_path / "none.png")
        logger.finish()
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
    assert "WandbLogger stopped logging this run" in caplog.records[0].getMessage()


class Recorder(RunLogger):
    """Fails in the middle of its first run."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _start(self, cell_name: str, group: str, config: dict) -> None:
        self.calls.append(cell_name)

    def _log_metrics(self, metrics: dict) -> None:
        if self.calls == ["first"]:
            raise RuntimeError("disk full\nreally")
        self.calls.append(f"metrics {metrics}")

    def _log_table(self, name: str, columns: list[str], rows: list[list]) -> None:
        self.calls.append(f"table {columns} {rows}")

    def _log_image(self, name: str, path: Path) -> None:
        self.calls.append(f"image {path.name}")

    def _finish(self) -> None:
        self.calls.append("finish")


def test_a_broken_run_is_closed_and_the_next_cell_is_logged_again() -> None:
    logger = Recorder()
    for cell in ("first", "second"):
        logger.start(cell, "g", {})
        logger.log_metrics({"a": {"b": 1}, "c": None})
        logger.log_table("t", [{"x": 1}, {"y": {"z": (2,)}}])
        logger.finish()
    assert logger.calls == ["first", "finish", "second", "metrics {'a.b': 1}",
                            "table ['x', 'y.z'] [[1, None], [None, '[2]']]", "finish"]  # fmt: skip


def test_stopping_by_hand_is_not_swallowed() -> None:
    logger = Recorder()
    logger._log_image = lambda name, path: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        logger.log_image("plot", Path("x.png"))


@pytest.mark.parametrize(("name", "class_name"), [("wandb", "WandbLogger"), ("none", "NoLogger")])
def test_conf_blocks_make_the_logger(name: str, class_name: str, tmp_path: Path) -> None:
    root = OmegaConf.create({"output_dir": str(tmp_path), "logger": OmegaConf.load(ROOT / f"conf/logger/{name}.yaml")})
    logger = instantiate(root.logger)
    assert type(logger).__name__ == class_name
    if name == "wandb":
        assert logger.mode == "offline" and logger.output_dir == tmp_path


def test_none_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = loggers.create("none")
    logger.start("cell", "group", {})
    logger.log_metrics({"n": 1})
    logger.log_table("samples", [])
    logger.log_image("plot", Path("none.png"))
    logger.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("options", "why"), [
    ({"mode": "onlin"}, r"logger\.mode='onlin' is unknown; give one of offline, online, disabled"),
    ({"start_timeout_s": 0}, r"start_timeout_s=0 must be above 0"),
    ({"project": ""}, "project is empty"),
])  # fmt: skip
def test_bad_options_are_refused(options: dict, why: str) -> None:
    good = {"project": "p", "mode": "offline", "output_dir": "outputs", "start_timeout_s": 5}
    with pytest.raises(ValueError, match=why):
        loggers.create("wandb", **(good | options))


def test_a_mistyped_logger_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="logger 'wanb' does not exist; did you mean wandb"):
        loggers.create("wanb")


def test_flatten() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": [1, "x"]}) == {"a.b.c": 1, "d": "[1, 'x']"}
