"""The hub: failures give one line in seconds, a whole cached snapshot needs no network."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from qcfuse.models import ModelUnavailable, locate
from tests.models.test_spec import conf_spec


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path, monkeypatch) -> None:
    """snapshot_download keeps its default cache in a constant, so that the argument is given here."""
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **kwargs: real(*args, cache_dir=tmp_path / "hub", **kwargs)
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def the_line(spec) -> str:
    with pytest.raises(ModelUnavailable) as error:
        locate(spec)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "failure",
    [
        httpx2.ConnectError("Name or service not known"),
        httpx2.ConnectTimeout("timed out"),
        OSError("proxy says no"),
        OfflineModeIsEnabled("offline"),
    ],
)
def test_failing_hub_names_the_ways_out(failure: Exception, monkeypatch) -> None:
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    text = the_line(conf_spec("qwen3_8b"))
    for word in ("qwen3_8b", "Qwen/Qwen3-8B", "model.path=DIR", "model=smollm2_135m", str(failure)):
        assert word in text


def test_hub_that_never_answers_is_asked_once(monkeypatch) -> None:
    """A server that accepts and stays silent: the short timeout ends the one request, without retries."""
    monkeypatch.setattr("qcfuse.models.files.HUB_TIMEOUT_S", 0.2)
    accepted: list[socket.socket] = []

    def accept_and_hold(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(server.accept()[0])

    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=accept_and_hold, args=(server,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    real = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: real(endpoint=endpoint))
    text = the_line(conf_spec("qwen3_14b"))
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
    assert "Timeout" in text and len(accepted) == 1


def test_malformed_hub_id() -> None:
    assert "a/b/c" in the_line(replace(conf_spec("qwen3_8b"), hub_id="a/b/c"))


def test_whole_snapshot_in_the_cache_is_used_offline(tiny_dir, tmp_path, monkeypatch) -> None:
    repository = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    snapshot.symlink_to(tiny_dir("qwen3"))

    def fail(*args, **kwargs):
        raise OSError("the network was asked")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    assert locate(conf_spec("qwen3_8b")).samefile(tiny_dir("qwen3"))
    part = tmp_path / "part"
    part.mkdir()
    (part / "config.json").write_text("{}")
    snapshot.unlink()
    snapshot.symlink_to(part)
    assert "the network was asked" in the_line(conf_spec("qwen3_8b"))
