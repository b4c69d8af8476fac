"""Anchor rules against slow references on a small model."""

from __future__ import annotations

import pytest
import torch

from qcfuse.decoder.hf import HFDecoder
from qcfuse.fusion.prepare import prepare_chunk, prepare_prefix
from qcfuse.fusion.source import anchor_count
from tests.factories import rule
from tests.fusion.conftest import encode

IDS = [30, 41, 52, 63, 30, 85, 96, 107, 118]


def order_of(model, **changes) -> list:
    name = changes.pop("name")
    return prepare_chunk(HFDecoder(model), IDS, rule(name, **changes), encode).order.tolist()


def test_sink_keeps_token_order(tiny):
    assert order_of(tiny, name="sink") == list(range(9))


def test_knorm_ranks_low_key_norms_first(tiny):
    decoder = HFDecoder(tiny)
    chunk = prepare_chunk(decoder, IDS, rule("sink"), encode)
    hidden = decoder.embed(torch.tensor(IDS))
    keys = torch.cat([decoder.project_kv(0, hidden)[0][None], chunk.k])
    expected = keys.norm(dim=-1).mean(-1).mean(0).sort().indices.tolist()
    assert order_of(tiny, name="knorm") == expected


def attention_while_repeating(model, instruction: str, repeat: bool) -> torch.Tensor:
    """[L, n] by transformers' own attention maps: max over repeat queries and heads."""
    ids = IDS + encode(instruction) + (IDS if repeat else [])
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            maps = model(torch.tensor([ids]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    return torch.stack([layer[0, :, len(IDS) :, : len(IDS)].flatten(0, 1).amax(0) for layer in maps])


@pytest.mark.parametrize("variant", ["full_repeat", "instruction_only"])
def test_kvzip_is_the_attention_received_while_repeating(tiny, variant):
    scores = attention_while_repeating(tiny, "repeat", variant == "full_repeat")
    expected = scores.mean(0).sort(descending=True, stable=True).indices.tolist()
    assert order_of(tiny, name="kvzip", variant=variant) == expected


def test_kvzip_by_layer_with_sinks_first(tiny_llama):
    orders = order_of(tiny_llama, name="kvzip", scope="layer", num_sinks=2)
    assert len(orders) == 3, "one ranking per stored layer"
    scores = attention_while_repeating(tiny_llama, "repeat", True)
    for layer, order in enumerate(orders, 1):
        assert order[:2] == [0, 1]
        rest = scores[layer, 2:].sort(descending=True, stable=True).indices + 2
        assert order[2:] == rest.tolist()


def test_rows_stand_in_rank_order(tiny):
    decoder = HFDecoder(tiny)
    ranked, plain = (prepare_chunk(decoder, IDS, rule(name), encode) for name in ("knorm", "sink"))
    torch.testing.assert_close(ranked.k, plain.k[:, ranked.order])
    torch.testing.assert_close(ranked.v, plain.v[:, ranked.order])


def test_a_chunk_cache_knows_nothing_of_other_chunks(tiny):
    """Isolated prefill: the prefix cache of the same ids, alone, is the same KV."""
    decoder = HFDecoder(tiny)
    chunk, prefix = prepare_chunk(decoder, IDS, rule("sink"), encode), prepare_prefix(decoder, IDS)
    torch.testing.assert_close(chunk.k, prefix.k)


@pytest.mark.parametrize("ratio,length,count", [(0.1, 128, 13), (0.07, 100, 7), (0, 9, 0), (1, 9, 9), (0.5, 1, 1)])
def test_anchor_count_is_the_ceiling_in_decimals(ratio, length, count):
    assert anchor_count(ratio, length) == count


def test_keys_differ_with_every_setting():
    keys = {rule("kvzip").key, rule("kvzip", num_sinks=4).key, rule("kvzip", reduce="mean").key, rule("knorm").key}
    assert len(keys) == 4


@pytest.mark.parametrize("field,value", [("scope", "token"), ("layer_reduce", "sum"), ("num_sinks", -1)])
def test_wrong_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"anchors.{field}={value!r}"):
        rule("knorm", **{field: value})
