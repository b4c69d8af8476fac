"""One experiment of synthetic cells, and its figures, shared by the tests that only read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis import build


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fig10 cells of two RULER tasks, three methods, two rho, eight samples (four of them timed)."""
    root = tmp_path_factory.mktemp("outputs")
    build.plausible(root, num_samples=8, num_timed=4, datasets=("ruler_single", "ruler_vt"),
                    methods=("random", "epic", "qcfuse"), rhos=(0.1, 0.5))  # fmt: skip
    return root
