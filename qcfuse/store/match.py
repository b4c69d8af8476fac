"""Bandwidths that keep the ratio of load time to compute time of a published set-up on other machines and models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MatchPreset:
    """A published set-up: KV bytes and full-prefill seconds of a context of num_context_tokens.

    source: where prefill_s was read; prefill_error_s: how far the reading may be off.
    """

    label: str
    kv_bytes: int
    prefill_s: float
    prefill_error_s: float
    num_context_tokens: int
    source: str

    def __post_init__(self) -> None:
        if self.kv_bytes <= 0 or self.prefill_s <= 0 or self.num_context_tokens <= 0:
            raise ValueError(f"preset {self.label!r}: kv_bytes={self.kv_bytes}, prefill_s={self.prefill_s} and "
                             f"num_context_tokens={self.num_context_tokens} must be above 0")
        if not 0 <= self.prefill_error_s < self.prefill_s:
            raise ValueError(f"preset {self.label!r}: prefill_error_s={self.prefill_error_s} must lie in "
                             "[0, prefill_s)")

    def scale(self, *, kv_bytes: int, prefill_s: float) -> float:
        """GB/s here per GB/s there: (kv_bytes / prefill_s) here over the same there.

        kv_bytes, prefill_s: the KV of all L layers and the measured full prefill of the same context on this machine.
        """
        if kv_bytes <= 0 or not prefill_s > 0:
            raise ValueError(f"kv_bytes={kv_bytes} and prefill_s={prefill_s} of this machine must be above 0")
        return (kv_bytes / prefill_s) / (self.kv_bytes / self.prefill_s)


@dataclass(frozen=True, kw_only=True)
class MatchedBandwidth:
    """gb_per_s: what the link is set to; error_frac: relative error from the preset's reading."""

    nominal_gb_per_s: float
    gb_per_s: float
    error_frac: float
    label: str

    def describe(self) -> str:
        """For every output and axis that shows the bandwidth."""
        return (f"{self.nominal_gb_per_s:g} GB/s compute-matched to {self.label} "
                f"({self.gb_per_s:.4g} GB/s here, reading error {100 * self.error_frac:.0f}%)")


def matched_bandwidth(
    preset: MatchPreset, nominal_gb_per_s: float, *, kv_bytes: int, prefill_s: float
) -> MatchedBandwidth:
    """The link speed here at which load time over compute time equals that of the preset at nominal_gb_per_s."""
    if not nominal_gb_per_s > 0:
        raise ValueError(f"bandwidth={nominal_gb_per_s} GB/s of the named set-up must be above 0")
    scale = preset.scale(kv_bytes=kv_bytes, prefill_s=prefill_s)
    return MatchedBandwidth(nominal_gb_per_s=nominal_gb_per_s, gb_per_s=nominal_gb_per_s * scale,
                            error_frac=preset.prefill_error_s / preset.prefill_s, label=preset.label)
