from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis import stats
from analysis.cells import MissingCells


def test_bootstrap_of_constant_data_has_no_width() -> None:
    mean = stats.bootstrap_mean([0.7] * 12 + [np.nan])
    assert (mean.value, mean.low, mean.high, mean.n) == (pytest.approx(0.7), pytest.approx(0.7), pytest.approx(0.7), 12)


def test_bootstrap_width_is_that_of_a_mean_and_repeats() -> None:
    values = np.random.default_rng(3).normal(5, 2, 400)
    mean = stats.bootstrap_mean(values)
    half = 1.96 * values.std() / 20
    assert mean.value == pytest.approx(values.mean())
    assert mean.high - mean.value == pytest.approx(half, rel=0.08) and mean.value - mean.low == pytest.approx(
        half, rel=0.08
    )
    assert stats.bootstrap_mean(values) == mean and stats.bootstrap_mean(values, seed=1) != mean


def test_bootstrap_of_nothing_is_nan_with_n_0() -> None:
    assert stats.bootstrap_mean([np.nan]).n == 0 and np.isnan(stats.bootstrap_mean([]).value)


def test_average_weighs_datasets_alike_and_draws_within_them() -> None:
    mean = stats.bootstrap_average([np.zeros(10), np.ones(30)])
    assert (mean.value, mean.low, mean.high, mean.n) == (0.5, pytest.approx(0.5), pytest.approx(0.5), 40)


def test_paired_difference_pairs_by_id_and_keeps_the_sign() -> None:
    full = pd.Series([1.0, 0.0, 0.5], index=["a", "b", "c"])
    method = pd.Series([0.25, 0.75, 9.0], index=["c", "a", "z"])
    difference = stats.paired_difference(method, full)
    assert (difference.value, difference.low, difference.high, difference.n) == (-0.25, -0.25, -0.25, 2)


def test_pairing_makes_a_constant_loss_certain() -> None:
    full = pd.Series(np.random.default_rng(0).random(50))
    difference = stats.paired_difference(full - 0.1, full)
    assert difference.high == pytest.approx(-0.1) and difference.low == pytest.approx(-0.1)
    assert stats.bootstrap_mean(full).high - stats.bootstrap_mean(full).low > 0.1


def test_no_common_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="no sample in common"):
        stats.paired(pd.Series([1.0], index=["a"]), pd.Series([1.0], index=["b"]))


def test_sign_flip_by_hand() -> None:
    # of the 8 sign patterns of (1, 2, 3) only +++ and --- reach |6|
    assert stats.sign_flip_p([1.0, 2.0, 3.0]) == 2 / 8
    # |1 + 2 - 3| = 0 is reached by all; zeros do not count
    assert stats.sign_flip_p([1.0, 2.0, -3.0, 0.0]) == 1.0
    assert stats.sign_flip_p([0.0, 0.0]) == 1.0


def test_sign_flip_by_sampling_agrees_with_the_normal_tail() -> None:
    differences = np.random.default_rng(1).normal(0.2, 1.0, 100)
    z = abs(differences.sum()) / np.sqrt((differences**2).sum())
    two_sided = 2 * (1 - 0.5 * (1 + np.tanh(z * 0.7978845608 * (1 + 0.044715 * z * z))))
    assert stats.sign_flip_p(differences) == pytest.approx(two_sided, abs=0.02)
    assert stats.sign_flip_p(np.ones(100)) == 1 / 10_001


def test_mcnemar_by_hand() -> None:
    # 6 pairs disagree, 1 of them in favour of the first: 2 (C(6,0) + C(6,1)) / 2^6
    first = [True] * 3 + [True] + [False] * 5
    second = [True] * 3 + [False] + [True] * 5
    assert stats.mcnemar_p(first, second) == 14 / 64
    assert stats.mcnemar_p([True, False], [True, False]) == 1.0
    with pytest.raises(ValueError, match="2 against 1"):
        stats.mcnemar_p([True, False], [True])


def test_holm_by_hand() -> None:
    # sorted .005 .01 .03 .04 -> x4, x3, x2, x1 -> .02 .03 .06 .04, and never falling: .06
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    adjusted = stats.holm([0.5, float("nan"), 0.9])
    assert adjusted[0] == 1.0 and np.isnan(adjusted[1]) and adjusted[2] == 1.0


def summary(points: dict[tuple[str, float], float], **names: str) -> pd.DataFrame:
    keys = {
        "experiment": "fig10",
        "engine": "hf",
        "model": "m",
        "dataset": "d",
        "bandwidth": "none",
        "variant": "",
    } | names
    return pd.DataFrame(
        [{**keys, "selector": name, "rho": rho, "score": score} for (name, rho), score in points.items()]
    )


SCALE = {("full_prefill", 1.0): 0.8, ("direct_reuse", 0.0): 0.2, ("epic", 0.1): 0.4, ("epic", 0.5): 0.7}
METHODS = ("full_prefill", "direct_reuse", "epic")


def test_normalised_score_by_hand_and_others_drawn_in_the_scale() -> None:
    frame = summary(SCALE | {("random", 0.1): 0.05, ("epic", 0.9): 0.95})
    scores = stats.normalised_score(frame, METHODS, (0.1, 0.5))
    assert scores.to_list() == pytest.approx([1.0, 0.0, 1 / 3, 5 / 6, -0.25, 1.25])


def test_normalised_score_names_the_missing_cells_and_the_command() -> None:
    frame = summary({key: score for key, score in SCALE.items() if key != ("epic", 0.5)})
    with pytest.raises(MissingCells) as refused:
        stats.normalised_score(frame, METHODS, (0.1, 0.5))
    assert [str(cell) for cell in refused.value.cells] == ["hf/m/d/epic/rho=0.5,bw=none"]
    assert "python run.py experiment=fig10" in str(refused.value) and "selector=epic rho=0.5" in str(refused.value)


def test_the_default_scale_is_the_papers_seven_methods_at_five_rhos() -> None:
    with pytest.raises(MissingCells) as refused:
        stats.normalised_score(summary(SCALE))
    missing = {(cell.selector, cell.rho) for cell in refused.value.cells}
    assert ("cacheblend", "0.3") in missing and ("epic", "0.1") not in missing and len(missing) == 5 * 5 - 2


def test_a_flat_panel_has_no_normalised_score() -> None:
    assert stats.normalised_score(summary(dict.fromkeys(SCALE, 1.0)), METHODS, (0.1, 0.5)).isna().all()


def test_a_variant_without_full_prefill_is_drawn_in_the_scale_without_overrides() -> None:
    frame = pd.concat([summary(SCALE), summary({("epic", 0.1): 0.5}, variant="reduce=mean")], ignore_index=True)
    assert stats.normalised_score(frame, METHODS, (0.1, 0.5)).iloc[-1] == pytest.approx(0.5)


def arms(scores: list[float], ttft_s: list[float], n: int = 6) -> stats.Arms:
    return stats.Arms(
        scores=np.repeat(np.array(scores)[:, None], n, 1), ttft_s=np.repeat(np.array(ttft_s)[:, None], n, 1)
    )


def test_matched_speedup_takes_the_fastest_point_within_the_margin() -> None:
    dataset = arms([0.80, 0.60, 0.785, 0.80], [6.0, 1.0, 2.0, 3.0])
    speedup, share = stats.matched_speedup([dataset], margin=0.02)
    assert (speedup.value, speedup.low, speedup.high, share) == (3.0, 3.0, 3.0, 1.0)
    assert stats.matched_speedup([dataset], margin=0.0)[0].value == 2.0
    assert stats.matched_speedup([dataset], margin=0.5)[0].value == 6.0


def test_matched_speedup_averages_datasets_before_it_compares() -> None:
    # 0.7 and 0.9 against 0.8 in both: equal on average although one dataset alone misses it
    pair = [arms([0.8, 0.7], [4.0, 1.0]), arms([0.8, 0.9], [8.0, 5.0])]
    assert stats.matched_speedup(pair, margin=0.0)[0].value == 2.0


def test_matched_speedup_without_a_match_is_nan() -> None:
    speedup, share = stats.matched_speedup([arms([0.8, 0.1], [4.0, 1.0])])
    assert np.isnan(speedup.value) and share == 0.0


def test_matched_speedup_covers_the_choice_of_the_point() -> None:
    # the fast point is right on half of the samples at random: some resamples match it, most need the slow one
    rng = np.random.default_rng(5)
    full = (rng.random(40) < 0.5).astype(float)
    fast = np.where(rng.random(40) < 0.2, 1 - full, full)
    dataset = stats.Arms(scores=np.stack([full, fast, full]), ttft_s=np.repeat([[4.0], [1.0], [2.0]], 5, 1))
    speedup, share = stats.matched_speedup([dataset], margin=0.0)
    assert share == 1.0 and (speedup.low, speedup.high) == (2.0, 4.0)


def test_matched_speedup_refuses_a_margin_in_percent_and_ragged_arms() -> None:
    with pytest.raises(ValueError, match=r"margin=2 is outside \[0, 1\]"):
        stats.matched_speedup([arms([0.8, 0.8], [2.0, 1.0])], margin=2)
    with pytest.raises(ValueError, match="full prefill first"):
        stats.Arms(scores=np.ones((2, 3)), ttft_s=np.ones((3, 3)))


def test_ttft_ratio_divides_medians_of_common_samples() -> None:
    times_s = np.array([[4.0, 1.0], [4.0, 2.0], [4.0, 9.0]])
    ratio = stats.ttft_ratio([times_s])
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == (2.0, pytest.approx(4 / 9), 4.0, 3)
