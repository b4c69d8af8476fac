from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from qcfuse.store.match import MatchPreset, matched_bandwidth

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="module")
def storage():
    def build(tier, bandwidth, *overrides):
        with initialize_config_dir(str(CONF), version_base=None):
            config = compose(overrides=[f"+storage={tier}", f"+bandwidth={bandwidth}", *overrides])
            return instantiate(config.storage)

    return build


@pytest.mark.parametrize("tier", ["ram", "disk", "ram_disk"])
def test_every_storage_option_composes(storage, tier, monkeypatch, tmp_path):
    monkeypatch.setenv("QCFUSE_CACHE", str(tmp_path))
    config = storage(tier, "0.5", "storage.match=qwen3_8b_h20")
    assert config.tier == tier and config.root_path == tmp_path / "store" and config.link.bandwidth_gb_per_s == 0.5
    monkeypatch.delenv("QCFUSE_CACHE")
    assert storage(tier, "null").root_path == Path("~/.cache/qcfuse/store").expanduser()


def test_matched_load_over_compute_equals_the_presets(storage):
    preset = storage("disk", "null").presets["qwen3_8b_h20"]
    assert preset.kv_bytes == 36 * 10_240 * 4096 and preset.num_context_tokens == 10_240
    found = matched_bandwidth(preset, 10.0, kv_bytes=100_000_000, prefill_s=8.0)
    here = 100_000_000 / (found.gb_per_s * 1e9) / 8.0
    assert here == pytest.approx(preset.kv_bytes / 10e9 / preset.prefill_s)
    assert found.error_frac == pytest.approx(preset.prefill_error_s / preset.prefill_s)
    assert "10 GB/s compute-matched to Qwen3-8B on H20" in found.describe()
    same = matched_bandwidth(preset, 3.0, kv_bytes=preset.kv_bytes, prefill_s=preset.prefill_s)
    assert same.gb_per_s == pytest.approx(3)


def test_bad_presets_and_settings_are_refused(storage):
    preset = MatchPreset(label="x", kv_bytes=1, prefill_s=1.0, prefill_error_s=0.1, num_context_tokens=1, source="x")
    with pytest.raises(ValueError, match="prefill_s=0"):
        replace(preset, prefill_s=0)
    with pytest.raises(ValueError, match="bandwidth=0"):
        matched_bandwidth(preset, 0, kv_bytes=1, prefill_s=1)
    with pytest.raises(ValueError, match="this machine"):
        matched_bandwidth(preset, 1, kv_bytes=0, prefill_s=1)
    with pytest.raises(Exception, match="h100.*qwen3_8b_h20"):
        storage("disk", "10", "storage.match=h100")
    assert storage("disk", "null", "storage.match=qwen3_8b_h20").link.bandwidth_gb_per_s is None, "nothing to match"
