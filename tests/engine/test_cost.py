"""The cost model: fitted coefficients, predicted schedules and the ratio that hides a load, by hand."""

from __future__ import annotations

import json

import pytest

from qcfuse.engine.cost import CostModel, Measured, Shape, stage_features
from qcfuse.fusion.probe import ProbeSpec

SPEC = ProbeSpec(anchor_ratio=0.1, layers=(2, 4), reduce="max")
LAYERS = 6


def shape(num_chunks: int) -> Shape:
    return Shape(num_prefix=20, chunk_lengths=(100,) * num_chunks, num_suffix=30, num_rows_question=12)


def truth(features: dict[str, list[float]]) -> dict[str, float]:
    """A machine: seconds that are linear in the features, with round coefficients."""
    true = {"engine": (0.01, 1e-6), "recompute": (1e-3, 2e-6, 1e-9), "place": (1e-4, 1e-7), "first_token": (0.02,),
            "probe": (1e-3, 1e-5, 1e-8), "score": (1e-3, 1e-8), "select": (1e-3, 1e-7)}  # fmt: skip
    return {stage: sum(c * x for c, x in zip(true[stage], row, strict=True)) for stage, row in features.items()}


def runs(spec=SPEC, lengths=(4, 8), rhos=(0.1, 0.3, 0.6)) -> list[Measured]:
    return [
        Measured(shape=shape(n), spec=spec, rho=rho, num_layers=LAYERS, rest_frac=1 - rho,
                 stages_s=truth(stage_features(shape(n), spec, rho, LAYERS)))
        for n in lengths for rho in rhos
    ]  # fmt: skip


@pytest.mark.parametrize("spec", [SPEC, None])
def test_a_linear_machine_is_predicted_exactly_at_other_lengths_and_ratios(spec):
    model = CostModel.fit(runs(spec))
    for n, rho in ((2, 0.5), (6, 0.2), (20, 0.9)):
        true = truth(stage_features(shape(n), spec, rho, LAYERS))
        found = model.stages_s(shape(n), spec, rho)
        assert found.keys() == true.keys()
        for stage, seconds in true.items():
            assert found[stage] == pytest.approx(seconds, rel=1e-3), stage


def test_without_a_link_ttft_is_the_sum_of_the_stages_and_a_slow_link_dominates():
    model = CostModel.fit(runs())
    stages_s = model.stages_s(shape(8), SPEC, 0.3)
    assert model.ttft_s(shape(8), SPEC, 0.3, row_bytes=100, gb_per_s=None) == pytest.approx(sum(stages_s.values()))
    # A link so slow that computing does not count: every byte, then what follows the last layer's rows.
    stored = 2 * (LAYERS - 1) * 800 * 100
    before = 3 * 2 * 80 * 100 + 2 * (800 - 80) * 100
    prefix = 2 * (LAYERS - 1) * 20 * 100
    num_bytes = prefix + before + 0.7 * (stored - before)
    found = model.ttft_s(shape(8), SPEC, 0.3, row_bytes=100, gb_per_s=1e-6)
    assert found == pytest.approx(num_bytes / 1e3, rel=0.01)


def test_the_ratio_that_hides_a_load():
    model = CostModel.fit(runs(None))
    big = shape(8)

    def ratio(gb_per_s):
        return model.hiding_rho(big, None, row_bytes=1000, gb_per_s=gb_per_s)

    assert ratio(1e3) == 0.15, "a fast link leaves the floor"
    rho = ratio(0.5)
    assert 0.15 < rho < 1
    assert model.recompute_s(big, None, rho) <= model.load_s(big, None, rho, 1000, 0.5)
    assert model.recompute_s(big, None, rho + 0.02) > model.load_s(big, None, rho + 0.02, 1000, 0.5)
    assert ratio(0.1) > rho, "slower links hide more"
    assert model.hiding_rho(big, None, row_bytes=1000, gb_per_s=1e3, floor=0.3) == 0.3


def test_coefficients_are_never_negative_and_survive_json():
    noisy = [
        Measured(shape=r.shape, spec=r.spec, rho=r.rho, num_layers=LAYERS, rest_frac=0.5,
                 stages_s={stage: s * (1.3 if i % 2 else 0.8) for stage, s in r.stages_s.items()})
        for i, r in enumerate(runs())
    ]  # fmt: skip
    model = CostModel.fit(noisy)
    assert all(c >= 0 for coefficients in model.coefficients.values() for c in coefficients)
    assert CostModel.from_json(json.loads(json.dumps(model.to_json()))) == model
    assert model.rest_bytes(0.0, 100) == 100 and model.rest_bytes(1.0, 100) == 0 and model.rest_bytes(0.3, 100) == 50


def test_nothing_to_fit():
    with pytest.raises(ValueError, match="needs measured runs"):
        CostModel.fit([])
