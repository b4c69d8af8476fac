import re

import pytest

from qcfuse.data.haystack import NOISE
from qcfuse.data.niah import join_queries
from qcfuse.data.vocabulary import words
from qcfuse.models import load_tokenizer
from qcfuse.models.embedded import embedded_directory

RULER_NAMES = ("ruler_mq", "ruler_mv", "ruler_single", "ruler_vt", "ruler_profile")
NEEDLE = re.compile(r"One of the special magic numbers for (\w+-\w+) is: (\d{7})\.")


def context_of(request, tokenizer):
    return tokenizer.decode([i for chunk in request.chunk_ids for i in chunk])


def evidence_runs(request, tokenizer):
    """Texts of the maximal runs of neighbouring evidence tokens."""
    ids, runs = [i for chunk in request.chunk_ids for i in chunk], []
    for index in request.evidence:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [tokenizer.decode([ids[i] for i in run]).strip() for run in runs]


@pytest.mark.parametrize("name", RULER_NAMES)
def test_a_sample_does_not_depend_on_the_limit_or_the_process(name, make, tokenizer, template):
    three, one = make(name).requests(tokenizer, template, 3), make(name).requests(tokenizer, template, 1)
    assert three[0] == one[0]
    assert len({request.prompt_sha256 for request in three}) == 3
    assert len({request.sample_id for request in three}) == 3
    assert make(name, scale={"num_samples": 40}).request(2, tokenizer, template) == three[2]


@pytest.mark.parametrize("name", RULER_NAMES)
def test_context_is_as_long_as_fits_with_any_tokenizer(name, make, tokenizer, coarse_tokenizer, template):
    for own in (tokenizer, coarse_tokenizer):
        request = make(name).request(1, own, template)
        line = len(own(NOISE + "\n").input_ids)
        assert 1024 - line <= request.num_context_tokens <= 1024
        assert all(len(chunk) == 128 for chunk in request.chunk_ids[:-1])


def test_multi_query_asks_for_all_four_keys(make, tokenizer, template):
    for request in make("ruler_mq").requests(tokenizer, template, 4):
        needles = NEEDLE.findall(context_of(request, tokenizer))
        assert len({key for key, _ in needles}) == len(needles) == 4
        question = tokenizer.decode(request.suffix_ids[slice(*request.question_span)])
        asked = re.fullmatch(r"What are all the special magic numbers for (.+), (.+), (.+), and (.+) mentioned in the "
                             r"provided text\?", question)
        assert [dict(needles)[key] for key in asked.groups()] == list(request.answers)
        assert sorted(evidence_runs(request, tokenizer)) == sorted(request.answers)
        assert request.max_new_tokens == 128


def test_multi_value_hides_four_numbers_under_one_key(make, tokenizer, template):
    request = make("ruler_mv").request(0, tokenizer, template)
    needles = NEEDLE.findall(context_of(request, tokenizer))
    assert len({key for key, _ in needles}) == 1
    assert sorted(value for _, value in needles) == sorted(request.answers)
    assert len(set(request.answers)) == 4
    assert sorted(evidence_runs(request, tokenizer)) == sorted(request.answers)
    assert tokenizer.decode(request.suffix_ids).endswith(
        f"<|im_end|>\n<|im_start|>assistant\n The special magic numbers for {needles[0][0]} mentioned in the provided "
        f"text are")


def test_single_is_worded_in_the_singular(make, tokenizer, template):
    request = make("ruler_single").request(0, tokenizer, template)
    assert len(NEEDLE.findall(context_of(request, tokenizer))) == len(request.answers) == 1
    assert "A special magic number is hidden" in tokenizer.decode(request.prefix_ids)
    assert "What is the special magic number for" in tokenizer.decode(request.suffix_ids)
    assert make("ruler_single").prompt_sha256 != make("ruler_mq").prompt_sha256 == make("ruler_mv").prompt_sha256


def test_unqueried_keys_are_no_evidence(make, tokenizer, template):
    request = make("ruler_mq", num_queries=1).request(0, tokenizer, template)
    assert len(NEEDLE.findall(context_of(request, tokenizer))) == 4
    assert evidence_runs(request, tokenizer) == list(request.answers)
    assert len(request.answers) == 1


def test_needles_stand_between_sentences(make, tokenizer):
    for index in range(4):
        sample = make("ruler_mq").sample(index, tokenizer)
        for start, end in sample.line_spans:
            assert start == 0 or re.search(r"""[.?!]["']? $""", sample.context[:start])
            assert end == len(sample.context) or re.match(r" \S", sample.context[end:])


@pytest.mark.parametrize("kind", ["noise", "prose"])
def test_seam_flag_says_whether_a_needle_lies_in_two_chunks(kind, make, tokenizer, template):
    task = make("ruler_single", haystack={"kind": kind}, scale={"chunk_tokens": 64, "num_chunks": 4, "num_samples": 24})
    flags = []
    for request in task.requests(tokenizer, template):
        whole = any(NEEDLE.search(tokenizer.decode(chunk)) for chunk in request.chunk_ids)
        assert request.evidence_cut_by_seam != whole
        flags.append(whole)
    assert len(set(flags)) == 2


def test_variable_tracking_chain_evidence_and_example(make, tokenizer, template):
    for request in make("ruler_vt").requests(tokenizer, template, 4):
        lines = [line for line in context_of(request, tokenizer).split("\n") if line != NOISE]
        first = re.fullmatch(r"VAR ([A-Z]{5}) = (\d{5})", lines[0])
        names = [first[1]]
        for line in lines[1:]:
            name, source = re.fullmatch(r"VAR ([A-Z]{5}) = VAR ([A-Z]{5})", line).groups()
            assert source == names[-1]
            names.append(name)
        assert request.answers == tuple(names)
        assert len(set(names)) == 5
        sources = [first[2], *names[:-1]]
        assert evidence_runs(request, tokenizer) == [word for pair in zip(names, sources, strict=True) for word in pair]
        suffix = tokenizer.decode(request.suffix_ids)
        assert suffix.endswith(f"5 variables are assgined the value {first[2]}, they are:")
        assert request.max_new_tokens == 30


def test_variable_tracking_has_one_solved_example_shared_by_all(make, tokenizer, template):
    task = make("ruler_vt")
    prefixes = {request.prefix_ids for request in task.requests(tokenizer, template, 3)}
    assert len(prefixes) == 1
    text = tokenizer.decode(prefixes.pop())
    example = text[text.index("Memorize") : text.rindex("\n\nMemorize")]
    assert 450 <= len(tokenizer(example).input_ids) <= 500
    chain = re.findall(r"VAR ([A-Z]{3}) = ", example)
    assert len(chain) == 5
    assert example.endswith("they are: " + " ".join(chain))


def test_splits_share_no_key_word_and_no_number(make, tokenizer, template):
    def seen(name):
        requests = make(name).requests(tokenizer, template)
        needles = [pair for request in requests for pair in NEEDLE.findall(context_of(request, tokenizer))]
        return {part for key, _ in needles for part in key.split("-")}, {value for _, value in needles}

    profile_words, profile_values = seen("ruler_profile")
    eval_words, eval_values = seen("ruler_mq")
    assert profile_words <= {*words("adjectives", "profile"), *words("nouns", "profile")}
    assert not profile_words & eval_words
    assert not profile_values & eval_values


def test_equal_seeds_still_give_the_splits_their_own_streams(make):
    task = make("ruler_single")
    other = make("ruler_single", split="profile")
    assert task.stream(0).random() != other.stream(0).random()
    assert task.stream(0).random() == make("ruler_single").stream(0).random()


def test_profile_takes_its_parts_in_turn(make, tokenizer, template):
    requests = make("ruler_profile").requests(tokenizer, template, 6)
    assert [request.sample_id for request in requests] == [
        f"ruler_profile_{part}-{index:04d}" for index in (0, 1) for part in ("single", "mv", "mq")]
    assert [len(request.answers) for request in requests] == [1, 4, 4] * 2
    assert all(request.evidence for request in requests)


def test_queries_are_listed_as_in_the_benchmark():
    assert join_queries(["a"]) == "a"
    assert join_queries(["a", "b"]) == "a, and b"
    assert join_queries(["a", "b", "c", "d"]) == "a, b, c, and d"


@pytest.mark.parametrize("name", ["ruler_mq", "ruler_vt", "ruler_profile"])
def test_evidence_with_the_embedded_models_tokenizer(name, make, template):
    tokenizer = load_tokenizer(embedded_directory())
    for request in make(name).requests(tokenizer, template, 2):
        answers = set(request.answers)
        assert 900 < request.num_context_tokens <= 1024
        assert answers <= set(evidence_runs(request, tokenizer))
        if name != "ruler_vt":
            # It writes each digit as a token of its own.
            assert len(request.evidence) == 7 * len(answers)


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("ruler_mq", {"num_queries": 5}, "no more queries than keys"),
    ("ruler_mv", {"num_values": 41}, "41 needles"),
    ("ruler_mq", {"num_digits": 0}, "num_digits=0"),
    ("ruler_mq", {"split": "test"}, "split='test' is unknown"),
    ("ruler_mq", {"chunk_tokens": 0}, "chunk_tokens=0"),
    ("ruler_mq", {"num_samples": None}, "say how many"),
    ("ruler_mq", {"name": "a/b"}, "goes into file names"),
    ("ruler_mq", {"metric": "string_match"}, "did you mean 'string_match_all'"),
    ("ruler_vt", {"num_hops": 0}, "num_hops=0"),
    ("ruler_vt", {"num_letters": 1}, "num_letters=1"),
    ("ruler_profile", {"metric": "qa_f1", "chunk_tokens": True}, "chunk_tokens=True"),
])
def test_bad_settings_are_named(name, changes, message, make):
    with pytest.raises(Exception, match=message):
        make(name, **changes)


def test_limits_larger_than_the_data_and_contexts_too_short(make, tokenizer, template):
    with pytest.raises(ValueError, match="limit=13 is larger than the 12 samples of ruler_mq"):
        make("ruler_mq").requests(tokenizer, template, 13)
    with pytest.raises(ValueError, match="limit=0 must be"):
        make("ruler_mq").requests(tokenizer, template, 0)
    with pytest.raises(ValueError, match="1 chunks of 16 tokens cannot hold the 4 sentences"):
        make("ruler_mq", scale={"chunk_tokens": 16, "num_chunks": 1}).requests(tokenizer, template, 1)
    with pytest.raises(ValueError, match="example_tokens=60 cannot hold"):
        make("ruler_vt", example_tokens=60).requests(tokenizer, template, 1)
