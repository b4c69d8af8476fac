"""From a text sample to a request: each segment is tokenised on its own and ids are concatenated, never text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qcfuse.data.chunking import Span, any_cut_by_seam, cut, tokens_overlapping
from qcfuse.types import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qcfuse.data.base import Sample
    from qcfuse.data.prompt import ChatTemplate


def encode_template(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Ids of our own text: special tokens written as text become their ids, none are added."""
    return tuple(tokenizer(text, add_special_tokens=False).input_ids) if text else ()


def encode_content(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Ids of a user's text: a special token written in it stays ordinary text, so data cannot end a chat turn."""
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids) if text else ()


def encode_context(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[tuple[int, ...], list[Span]]:
    """Ids as `encode_content` and each token's character span. Raises ValueError for a tokenizer without offsets."""
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} gives no character offsets; use its fast version")
    encoding = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    return tuple(encoding.input_ids), encoding.offset_mapping


def build_request(
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    *,
    chunk_tokens: int,
    num_chunks: int,
    max_new_tokens: int,
) -> Request:
    """Lay a sample out as prefix ++ chunks ++ suffix; context tokens past chunk_tokens * num_chunks are dropped.

    Raises ValueError where the context or the question holds no token.
    """
    prompt = sample.prompt
    context_ids, offsets = encode_context(tokenizer, sample.context)
    limit = chunk_tokens * num_chunks
    context_ids, offsets = context_ids[:limit], offsets[:limit]
    before = encode_template(tokenizer, prompt.before_question)
    question = encode_content(tokenizer, prompt.question)
    after = encode_template(tokenizer, prompt.after_question + template.suffix + prompt.answer_prefix)
    return Request(
        sample_id=sample.sample_id,
        prefix_ids=encode_template(tokenizer, template.render_prefix(prompt.system) + prompt.instruction),
        chunk_ids=cut(context_ids, chunk_tokens),
        suffix_ids=before + question + after,
        question_span=(len(before), len(before) + len(question)),
        answers=sample.answers,
        max_new_tokens=max_new_tokens,
        evidence=tokens_overlapping(offsets, sample.evidence_spans),
        evidence_cut_by_seam=any_cut_by_seam(offsets, sample.line_spans, chunk_tokens),
    )
