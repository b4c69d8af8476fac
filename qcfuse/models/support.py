"""Which checkpoints work, and how long their window is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qcfuse.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_config(config: PretrainedConfig, spec: ModelSpec) -> None:
    """Raises ValueError for an architecture, or a sliding window below the context, that fusion does not describe."""
    names = config.architectures or ["unknown architecture"]
    if not set(names) & set(ARCHITECTURES):
        raise ValueError(f"model {spec.name}: {', '.join(names)} is not supported; what works: "
                         f"{', '.join(ARCHITECTURES)} (Mistral and Qwen without a sliding window below the context)")
    window = sliding_window(config)
    context = context_window(config, spec)
    if window is not None and window < context:
        raise ValueError(f"model {spec.name}: its sliding window of {window} tokens is below the context of {context}; "
                         f"give model.max_context={window}, or a model without a sliding window")


def context_window(config: PretrainedConfig, spec: ModelSpec) -> int:
    """Tokens of a whole request: the model's own window, or a smaller spec.max_context.

    Raises ValueError for a max_context beyond the model's window.
    """
    own = config.max_position_embeddings
    if spec.max_context is not None and spec.max_context > own:
        raise ValueError(f"model.max_context={spec.max_context} exceeds the window of {spec.name}, {own} tokens; give "
                         f"at most {own}")
    return spec.max_context or own


def sliding_window(config: PretrainedConfig) -> int | None:
    """The window that attention really uses: Qwen configs carry one that use_sliding_window turns off."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None)
