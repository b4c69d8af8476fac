import json
import shutil

import pytest

ROWS = [
    {"input": " Who wrote it? ", "context": ["Ann wrote it.", "Bob read it."], "answers": ["Ann", "Ann B."]},
    {"input": "Use {braces}?", "context": ["Line\u2028separator."], "answers": ["yes"]},
]


def write(path, lines):
    texts = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text("\n".join(texts), encoding="utf-8")
    return str(path)


def test_rows_become_requests_in_file_order(make, tokenizer, template, tmp_path):
    task = make("jsonl", path=write(tmp_path / "rows.jsonl", [*ROWS, ""]), name="mine")
    first, second = task.requests(tokenizer, template)
    context = tokenizer.decode([i for chunk in first.chunk_ids for i in chunk])
    assert context == "Passage 1:\nAnn wrote it.\n\nPassage 2:\nBob read it."
    assert tokenizer.decode(first.suffix_ids[slice(*first.question_span)]) == " Who wrote it?"
    assert tokenizer.decode(first.suffix_ids).endswith("\nAnswer:<|im_end|>\n<|im_start|>assistant\n")
    assert (first.answers, first.sample_id, first.max_new_tokens) == (("Ann", "Ann B."), "mine-0000", 32)
    assert tokenizer.decode(second.suffix_ids[slice(*second.question_span)]) == " Use {braces}?"
    assert len(task) == 2


def test_only_the_first_chunks_are_kept(make, tokenizer, template, tmp_path):
    row = ROWS[0] | {"context": ["word " * 400]}
    task = make("jsonl", path=write(tmp_path / "long.jsonl", [row]), scale={"chunk_tokens": 16, "num_chunks": 3})
    assert [len(chunk) for chunk in task.request(0, tokenizer, template).chunk_ids] == [16, 16, 16]


def test_limits_beyond_the_file(make, tokenizer, template, tmp_path):
    path = write(tmp_path / "two.jsonl", ROWS)
    with pytest.raises(ValueError, match="limit=3 is larger than the 2 samples"):
        make("jsonl", path=path).requests(tokenizer, template, 3)
    with pytest.raises(Exception, match="num_samples=3 is larger than the 2 rows"):
        make("jsonl", path=path, num_samples=3)
    assert len(make("jsonl", path=path, num_samples=1).requests(tokenizer, template)) == 1


@pytest.mark.parametrize(("line", "message"), [
    ("{", "line 2: not JSON"),
    ("[1]", "line 2: 'input'"),
    (ROWS[0] | {"input": "  "}, "line 2: 'input' must be a question"),
    (ROWS[0] | {"context": []}, "line 2: 'context'"),
    (ROWS[0] | {"answers": "Ann"}, "line 2: 'answers'"),
])
def test_a_bad_row_is_named_by_its_line(line, message, make, tmp_path):
    with pytest.raises(Exception, match=message):
        make("jsonl", path=write(tmp_path / "bad.jsonl", [ROWS[0], line]))


def test_a_missing_or_empty_file_is_refused(make, tmp_path):
    for path, message in ((None, "path=None is not a file"), (str(tmp_path / "no.jsonl"), "is not a file"),
                          (write(tmp_path / "empty.jsonl", [""]), "holds no rows")):
        with pytest.raises(Exception, match=message):
            make("jsonl", path=path)


def test_a_file_that_changed_is_read_again(make, tokenizer, template, tmp_path):
    path = tmp_path / "rows.jsonl"
    make("jsonl", path=write(path, ROWS))
    shutil.copy(write(tmp_path / "one.jsonl", [ROWS[1]]), path)
    assert len(make("jsonl", path=str(path))) == 1
