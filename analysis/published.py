"""Numbers that the authors published, read off their figures; analysis/data names the source and the reading error."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pandas as pd

DATA = Path(__file__).parent / "data"


@lru_cache
def aggregate() -> pd.DataFrame:
    """QCFuse Fig. 11: suite (ruler, longbench), selector, rho, ttft_s, quality (normalised %), errors, source.

    ttft_rel is TTFT over that of full prefill in the same suite: GPU seconds do not compare with other machines'.
    """
    frame = pd.read_csv(DATA / "aggregate.csv")
    full_s = frame[frame["selector"] == "full_prefill"].set_index("suite")["ttft_s"]
    return frame.assign(ttft_rel=frame["ttft_s"] / frame["suite"].map(full_s))


@lru_cache
def per_dataset() -> pd.DataFrame:
    """The June 2026 figure of the authors' repository: Qwen3 models x three QA datasets, F1 (0 to 1) against TTFT."""
    return pd.read_csv(DATA / "per_dataset.csv")


def for_panel(model: str, dataset: str) -> pd.DataFrame:
    """Published points with a TTFT for one model and dataset, empty where the authors showed none."""
    frame = per_dataset()
    return frame[(frame["model"] == model) & (frame["dataset"] == dataset) & frame["ttft_s"].notna()]
