"""Fusion goes through the three ops of kernels/ for scoring, attention and placement, and through nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from qcfuse.fusion import prefill, probe, recompute, stitch
from tests.factories import selector
from tests.fusion.conftest import Rig, make_request

OPS = ("recompute_attention", "score", "place_kv", "rotate")


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """Calls of each op by name; torch's own attention and softmax are out of bounds outside the ops."""
    counted: Counter = Counter()
    inside = []

    def spying(name, op):
        def spy(*args, **kwargs):
            counted[name] += 1
            inside.append(name)
            try:
                return op(*args, **kwargs)
            finally:
                inside.pop()

        return spy

    for module in (probe, recompute, stitch, prefill):
        for name in OPS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, spying(name, getattr(module, name)))

    def forbidden(*args, **kwargs):
        assert inside, "attention outside the ops"
        return softmax(*args, **kwargs)

    softmax = torch.softmax
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", forbidden)
    monkeypatch.setattr(torch, "softmax", forbidden)
    return counted


def test_every_layer_calls_each_op_once_for_its_rows(tiny, calls):
    rig = Rig(tiny, make_request())
    layers = rig.decoder.num_layers
    fusion = rig.fusion()
    calls.clear()
    fusion.recompute(fusion.select(selector("random"), 0.4, 0, None).selected)
    # Stored rows and fresh rows of every layer; q of every layer.
    assert calls == {"recompute_attention": layers, "place_kv": 2 * layers, "rotate": layers}


def test_the_probe_attends_below_its_deepest_layer_and_scores_what_it_was_asked(tiny, calls):
    rig = Rig(tiny, make_request())
    fusion = rig.fusion()
    calls.clear()
    fusion.probe(fusion.spec(selector("qcfuse", layers=[1, 2])))
    assert calls["recompute_attention"] == 2 and calls["score"] == 2


@pytest.mark.parametrize("name", ["qcfuse", "prophetkv", "fusionrag", "cacheblend", "direct_reuse"])
def test_no_method_attends_outside_the_ops(tiny, calls, name):
    rig = Rig(tiny, make_request())
    calls.clear()
    rig.fuse(selector(name), 0.4)
    assert calls["recompute_attention"] >= rig.decoder.num_layers
