import dataclasses

import pytest

from qcfuse.data.base import Sample, check_fits
from qcfuse.data.prompt import TaskPrompt
from qcfuse.data.segments import build_request, encode_context

PROMPT = TaskPrompt(version=1, system="Be brief.", instruction="Read this.\n", item="", before_question="\nQuestion:",
                    question=" Which one?", after_question="\nAnswer:", answer_prefix=" It is")
SIZES = {"chunk_tokens": 4, "num_chunks": 3, "max_new_tokens": 5}


def sample(context, **changes):
    return Sample(sample_id="s-0", context=context, answers=("x",), prompt=dataclasses.replace(PROMPT, **changes))


def test_segments_are_tokenised_apart_and_ids_concatenated(tokenizer, template):
    request = build_request(sample("one two three"), tokenizer, template, **SIZES)
    start, end = request.question_span
    assert tokenizer.decode(request.prefix_ids) == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
                                                    "Read this.\n")
    assert tokenizer.decode(request.suffix_ids[:start]) == "\nQuestion:"
    assert list(request.suffix_ids[start:end]) == tokenizer(" Which one?", add_special_tokens=False).input_ids
    assert tokenizer.decode(request.suffix_ids[end:]) == "\nAnswer:<|im_end|>\n<|im_start|>assistant\n It is"
    assert [i for chunk in request.chunk_ids for i in chunk] == tokenizer("one two three").input_ids
    assert request.max_new_tokens == 5


def test_template_text_becomes_special_ids_and_user_text_never_does(tokenizer, template):
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    request = build_request(sample("a <|im_end|> b", question=" <|im_end|>?"), tokenizer, template,
                            chunk_tokens=50, num_chunks=2, max_new_tokens=1)
    start, end = request.question_span
    assert request.prefix_ids.count(end_id) == 1
    assert request.suffix_ids[end:].count(end_id) == 1
    assert end_id not in request.suffix_ids[start:end]
    assert all(end_id not in chunk for chunk in request.chunk_ids)
    assert tokenizer.decode(request.chunk_ids[0]) == "a <|im_end|> b"


def test_context_is_cut_by_tokens_and_the_rest_dropped(tokenizer, template):
    text = "The platform was crowded with people who had come to see it off, and none of them had taken it."
    ids, _ = encode_context(tokenizer, text)
    request = build_request(sample(text), tokenizer, template, **SIZES)
    assert len(ids) > 12
    assert [len(chunk) for chunk in request.chunk_ids] == [4, 4, 4]
    assert [i for chunk in request.chunk_ids for i in chunk] == list(ids[:12])


def test_evidence_is_the_tokens_of_its_characters(tokenizer, template):
    text = "The key 1234567 lies here."
    span = (text.index("1"), text.index("7") + 1)
    marked = dataclasses.replace(sample(text), evidence_spans=(span,), line_spans=(span,))
    request = build_request(marked, tokenizer, template, chunk_tokens=40, num_chunks=1, max_new_tokens=1)
    ids = request.chunk_ids[0]
    assert tokenizer.decode([ids[i] for i in request.evidence]).strip() == "1234567"
    assert not request.evidence_cut_by_seam
    cut = build_request(marked, tokenizer, template, chunk_tokens=request.evidence[2], num_chunks=9, max_new_tokens=1)
    assert cut.evidence_cut_by_seam
    assert cut.evidence == request.evidence
    short = build_request(marked, tokenizer, template, chunk_tokens=request.evidence[2], num_chunks=1, max_new_tokens=1)
    assert short.evidence == request.evidence[:2]


def test_a_chunk_and_a_question_of_one_token_are_allowed(tokenizer, template):
    request = build_request(sample("one", question="?"), tokenizer, template, chunk_tokens=1, num_chunks=9,
                            max_new_tokens=1)
    assert {len(chunk) for chunk in request.chunk_ids} == {1}
    assert request.question_span[1] - request.question_span[0] == 1


@pytest.mark.parametrize(("changes", "message"), [
    ({"prompt": dataclasses.replace(PROMPT, question=" \n")}, "s-0: the question is empty"),
    ({"context": " "}, "s-0: the context is empty"),
    ({"answers": ()}, "s-0: no reference answers"),
])
def test_empty_parts_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        dataclasses.replace(sample("text"), **changes)
    assert "\n" not in str(caught.value)


def test_tokens_to_generate_count_toward_the_window(tokenizer, template):
    request = build_request(sample("one two three"), tokenizer, template, **SIZES)
    check_fits(request, request.num_tokens + 5)
    with pytest.raises(ValueError, match=f"s-0: {request.num_tokens} prompt tokens .* window of") as caught:
        check_fits(request, request.num_tokens + 4)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False
        name_or_path = "slow"

    with pytest.raises(ValueError, match="'slow' gives no character offsets"):
        encode_context(Slow(), "text")
