"""The reference engine: fusion on a transformers model, float32 on CPU, bfloat16 on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qcfuse.anchors.base import AnchorRule
from qcfuse.data.base import check_fits
from qcfuse.decoder.hf import HFDecoder
from qcfuse.engine.base import Arm, Engine, Quality, Reference, Timing
from qcfuse.engine.branches import Branch, Branches
from qcfuse.engine.caches import Caches
from qcfuse.engine.decode import extend, greedy
from qcfuse.engine.fidelity import quality_of
from qcfuse.engine.links import Links
from qcfuse.engine.planned_bytes import no_bytes
from qcfuse.engine.timing import timing_of
from qcfuse.fusion.cache import KVCache
from qcfuse.fusion.fuse import Fusion, full_prefill
from qcfuse.fusion.layout import Layout
from qcfuse.fusion.probe import ProbeResult, ProbeSpec
from qcfuse.fusion.source import MemorySource, Source
from qcfuse.fusion.timeline import Timeline
from qcfuse.models import LoadedModel, load
from qcfuse.models.spec import ModelSpec
from qcfuse.selectors.base import ProbeSelector, Selector
from qcfuse.store.config import StoreConfig
from qcfuse.store.geometry import KVGeometry
from qcfuse.types import Request, Selection


@dataclass(frozen=True, kw_only=True)
class HFEngineConfig:
    """device: auto takes CUDA where there is one. num_threads: CPU threads, None for torch's own choice.

    decode_batch: arms that are fused and decoded together in the quality pass (memory grows with it).
    num_answer_tokens: how much of full prefill's answer fidelity is averaged over.
    """

    device: str
    num_threads: int | None
    decode_batch: int
    num_answer_tokens: int

    def __post_init__(self) -> None:
        for name in ("num_threads", "decode_batch", "num_answer_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"engine.{name}={value} must be at least 1")

    def build(self, spec: ModelSpec, anchors: AnchorRule, storage: StoreConfig) -> HFEngine:
        """Loads the model; raises ValueError (ModelUnavailable where its files cannot be had)."""
        if storage.head_groups != 1:
            raise ValueError(f"storage.head_groups={storage.head_groups}: engine=hf is one rank that reads whole rows; "
                             "use 1")
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        return HFEngine(load(spec, device), anchors, storage, self)


class HFEngine(Engine):
    """One model, one anchor rule, one store; the caches of the latest request stay at hand."""

    name = "hf"

    def __init__(self, loaded: LoadedModel, anchors: AnchorRule, storage: StoreConfig, config: HFEngineConfig) -> None:
        self.loaded, self.anchors, self.config = loaded, anchors, config
        self.decoder = HFDecoder(loaded.model)
        self.tokenizer = loaded.tokenizer
        self.critical = loaded.spec.critical_layers.named()
        decoder = self.decoder
        self.geometry = KVGeometry.of(
            num_layers=decoder.num_layers,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            dtype=decoder.dtype,
            head_groups=storage.head_groups,
        )
        self.store = storage.open(model_key=loaded.fingerprint, anchor_key=anchors.key, geometry=self.geometry)
        self.caches = Caches(decoder, anchors, self.store, self.encode)
        self.links = Links(self.store, self.caches.makers, pinned=decoder.device.type == "cuda")
        self._pool: KVCache | None = None

    def check(self, request: Request) -> None:
        check_fits(request, self.loaded.max_context)

    def check_selector(self, selector: Selector) -> None:
        selector.probe_spec(self.decoder.num_layers, self.critical)

    def kv_bytes(self, num_tokens: int) -> int:
        return self.geometry.kv_bytes(num_tokens)

    @property
    def reference_key(self) -> str:
        return f"{self.loaded.fingerprint}-{self.config.num_answer_tokens}"

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.inference_mode()
    def prepare(self, request: Request) -> int:
        return self.caches.prepare(request)

    @torch.inference_mode()
    def reference(self, request: Request) -> Reference:
        layout = Layout(request, self.decoder.device)
        count = min(self.config.num_answer_tokens, request.max_new_tokens)
        cache = KVCache.empty(self.decoder, layout.num_tokens)
        logits = full_prefill(self.decoder, layout, cache, Timeline())
        alone = Branches(cache, 0, [Branch.of(cache, layout.positions)], count)
        steps = torch.cat(greedy(self.decoder, logits, alone, layout.num_tokens, count, self.loaded.stop_ids)[1])
        return Reference(answer_ids=steps.argmax(-1), logits=steps)

    @torch.inference_mode()
    def judge(self, request: Request, arms: Sequence[Arm], reference: Reference) -> list[Quality]:
        base = self._fusion(request, KVCache.empty(self.decoder, request.num_tokens), Timeline())
        base.stitch()
        probes: dict[ProbeSpec | None, ProbeResult | None] = {}
        selections = []
        for arm in arms:
            spec = base.spec(arm.selector)
            if spec not in probes:
                probes[spec] = base.probe(spec)
            selections.append(base.select(arm.selector, arm.rho, arm.seed, probes[spec]))
        judged: list[Quality] = []
        for start in range(0, len(arms), self.config.decode_batch):
            part = slice(start, start + self.config.decode_batch)
            judged += self._judge_batch(base, arms[part], selections[part], reference)
        return judged

    @torch.inference_mode()
    def select(self, request: Request, arm: Arm) -> Selection:
        """What an arm would recompute."""
        fusion = self._fusion(request, KVCache.empty(self.decoder, request.num_tokens), Timeline())
        return fusion.select(arm.selector, arm.rho, arm.seed, fusion.probe(fusion.spec(arm.selector)))

    @torch.inference_mode()
    def layer_importance(self, request: Request, selector: ProbeSelector) -> np.ndarray:
        everything = replace(selector, layers="all")
        fusion = self._fusion(request, KVCache.empty(self.decoder, request.num_tokens), Timeline())
        return fusion.probe(fusion.spec(everything)).importance.cpu().numpy()

    @torch.inference_mode()
    def time(self, request: Request, arm: Arm, *, decode: bool, gb_per_s: float | None = None) -> Timing:
        cache = self._reused_cache(request)
        if arm.selector.fixed_rho == 1.0:
            return self._time_full_prefill(request, cache, decode)
        if gb_per_s is None and self.store.config.uses_ram:
            self.caches.in_memory(request)
            timeline = self._timeline()
            timeline.to("engine")
            fusion = self._fusion(request, cache, timeline)
            return self._time_fusion(fusion, arm, decode, gb_per_s)
        self.prepare(request)
        timeline = self._timeline()
        timeline.to("engine")
        layout = Layout(request, self.decoder.device)
        with self.links.source(request, layout, timeline, gb_per_s=gb_per_s, rho=arm.rho) as source:
            return self._time_fusion(self._fused(layout, source, cache, timeline), arm, decode, gb_per_s)

    def close(self) -> None:
        """Ends the links' threads and closes the store."""
        self.links.close()
        self.store.close()

    def _time_fusion(self, fusion: Fusion, arm: Arm, decode: bool, gb_per_s: float | None) -> Timing:
        selection = fusion.select(arm.selector, arm.rho, arm.seed, fusion.probe(fusion.spec(arm.selector)))
        logits, selection = fusion.finish(arm.selector, arm.rho, selection)
        logits.argmax(-1).item()
        ttft_s = fusion.timeline.finish()
        latency_s = self.store.config.link.latency_s
        timing = timing_of(fusion, arm, selection, ttft_s, self.geometry, gb_per_s=gb_per_s, latency_s=latency_s)
        if not decode:
            return timing
        return replace(timing, decode_s=self._time_decode(fusion.layout.request, logits, fusion.cache))

    def _reused_cache(self, request: Request) -> KVCache:
        if self._pool is None or self._pool.num_rows < request.num_tokens:
            self._pool = KVCache.empty(self.decoder, request.num_tokens)
        return KVCache(k=self._pool.k, v=self._pool.v)

    def _judge_batch(
        self, base: Fusion, arms: Sequence[Arm], selections: Sequence[Selection], reference: Reference
    ) -> list[Quality]:
        layout, request, num_tokens = base.layout, base.layout.request, base.layout.num_tokens
        cache = KVCache.empty(self.decoder, num_tokens)
        first, branches = [], []
        selections = list(selections)
        for place, (arm, selection) in enumerate(zip(arms, selections, strict=True)):
            if arm.selector.fixed_rho == 1.0:
                first.append(self._engine_prefill(request, cache))
                branches.append(Branch.of(cache, layout.positions))
                continue
            cache.copy_from(base.cache, layout.context_end)
            fusion = self._fusion(request, cache, Timeline())
            logits, final = fusion.finish(arm.selector, arm.rho, selection)
            first.append(logits)
            # Rows that were fresh at any layer are the branch's own: where P was narrowed, all that it began with.
            own = torch.cat([selection.selected + layout.num_prefix, layout.suffix_positions])
            branches.append(Branch.of(cache, own))
            selections[place] = final
        first = torch.cat(first)
        caches = Branches(base.cache, layout.context_end, branches, request.max_new_tokens + len(reference.answer_ids))
        forced = self._forced(reference, first, caches, num_tokens)
        outputs, _ = greedy(self.decoder, first, caches, num_tokens, request.max_new_tokens, self.loaded.stop_ids)
        return [
            quality_of(selection, ids, logits, reference, base.layout)
            for selection, ids, logits in zip(selections, outputs, forced, strict=True)
        ]

    def _forced(self, reference: Reference, first: Tensor, caches: Branches, start: int) -> Tensor:
        """Logits [C, A, vocab] along the reference answer; the rows written to the caches are scratch."""
        if reference.answer_ids.shape[0] == 1:
            return first[:, None]
        ids = reference.answer_ids[:-1].to(first.device).expand(first.shape[0], -1)
        return torch.cat([first[:, None], extend(self.decoder, ids, caches, start)], 1)

    def _time_full_prefill(self, request: Request, cache: KVCache, decode: bool) -> Timing:
        """Both full-prefill arms, one after the other; the faster one's stages stand for the method."""
        timings = {}
        for arm in ("engine", "loop"):
            timeline = self._timeline()
            timeline.to("engine")
            if arm == "engine":
                logits = self._engine_prefill(request)
            else:
                logits = full_prefill(self.decoder, Layout(request, self.decoder.device), cache, timeline)
            logits.argmax(-1).item()
            timings[arm] = (timeline.finish(), timeline)
        ttft_s, timeline = min(timings.values(), key=lambda timing: timing[0])
        return Timing(
            ttft_s=ttft_s,
            decode_s=self._time_decode(request, logits, cache) if decode else None,
            stages_s=timeline.stages_s(),
            bytes=no_bytes(self.geometry, request.num_context_tokens),
            trace=timeline.chrome_trace(ttft_s=ttft_s),
            arms={name: {"ttft_s": t, "stages_s": line.stages_s()} for name, (t, line) in timings.items()},
        )

    def _engine_prefill(self, request: Request, cache: KVCache | None = None) -> Tensor:
        """transformers' own full prefill, last logits only [1, vocab]; its KV is copied to `cache` where given."""
        ids = torch.tensor([request.input_ids], device=self.decoder.device)
        out = self.loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        if cache is not None:
            for layer, kept in enumerate(out.past_key_values.layers):
                cache.write(layer, slice(0, ids.shape[1]), kept.keys[0].transpose(0, 1), kept.values[0].transpose(0, 1))
        return out.logits[0, -1:].float()

    def _time_decode(self, request: Request, logits: Tensor, cache: KVCache) -> float:
        rows = torch.arange(request.num_tokens, device=self.decoder.device)
        alone = Branches(cache, 0, [Branch.of(cache, rows)], request.max_new_tokens)
        timeline = self._timeline()
        greedy(self.decoder, logits, alone, request.num_tokens, request.max_new_tokens, self.loaded.stop_ids)
        return timeline.finish()

    def _fusion(self, request: Request, cache: KVCache, timeline: Timeline) -> Fusion:
        layout = Layout(request, self.decoder.device)
        return self._fused(layout, MemorySource(layout, *self.caches.in_memory(request)), cache, timeline)

    def _fused(self, layout: Layout, source: Source, cache: KVCache, timeline: Timeline) -> Fusion:
        return Fusion(
            decoder=self.decoder, layout=layout, source=source, cache=cache, timeline=timeline, critical=self.critical
        )

    def _timeline(self) -> Timeline:
        return Timeline(torch.cuda.synchronize if self.decoder.device.type == "cuda" else None)
