import random
from importlib import resources

import pytest

from qcfuse.data.haystack import NOISE, Haystack, largest_fitting, scatter
from qcfuse.data.sentences import split_sentences
from qcfuse.data.vocabulary import draw_keys, draw_names, draw_numbers, words


def shipped(split):
    return resources.files("qcfuse.data").joinpath("texts", f"prose_{split}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("text", "expected"), [
    ("One. Two! Three?", ["One.", "Two!", "Three?"]),
    ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
    ("Dr. Smith met J. Doe. They spoke.", ["Dr. Smith met J. Doe.", "They spoke."]),
    ("It was I. She knew.", ["It was I.", "She knew."]),
    ("Version 3.5 is out. 7 people care.", ["Version 3.5 is out.", "7 people care."]),
    ("Wait... what? Yes.", ["Wait... what?", "Yes."]),
    ("no end", ["no end"]),
    ("  ", []),
])
def test_sentences(text, expected):
    assert split_sentences(text) == expected


def test_shipped_texts_are_long_enough_and_share_no_run_of_seven_words():
    texts = {split: shipped(split).lower().split() for split in ("eval", "profile")}
    assert len(texts["eval"]) >= 4000
    assert len(texts["profile"]) >= 2500
    runs = [{tuple(text[i : i + 7]) for i in range(len(text) - 6)} for text in texts.values()]
    assert not runs[0] & runs[1]


def test_prose_takes_exactly_the_words_asked_for_and_starts_over():
    prose, source = Haystack(kind="prose", path=None, random_start=False), shipped("profile").split()
    assert " ".join(prose.take("profile", 30, 0.9)).split() == source[:30]
    again = " ".join(prose.take("profile", len(source) + 5, 0.0)).split()
    assert again == source + source[:5]
    assert prose.take("profile", 0, 0.0) == []


def test_random_start_begins_at_a_sentence():
    prose = Haystack(kind="prose", path=None, random_start=True)
    sentences = split_sentences(" ".join(shipped("eval").split()))
    assert prose.take("eval", 100, 0.5)[0] == sentences[len(sentences) // 2]


def test_noise_is_one_line_again_and_again():
    noise = Haystack(kind="noise", path=None, random_start=True)
    assert noise.take("eval", 2, 0.3) == [NOISE, NOISE]
    assert noise.separator == "\n"


def test_file_haystack_and_bad_settings(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Alpha beta.  Gamma\ndelta.")
    own = Haystack(kind="file", path=str(path), random_start=False)
    assert own.take("eval", 3, 0.0) == ["Alpha beta.", "Gamma"]
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="holds no words"):
        Haystack(kind="file", path=str(tmp_path / "blank.txt"), random_start=False).take("eval", 3, 0.0)
    for settings, message in ((("prosa", None), "'prosa' is unknown"), (("file", None), "needs one"),
                              (("noise", "x"), "kind 'file' only"), (("file", "none.txt"), "does not exist")):
        with pytest.raises(ValueError, match=message):
            Haystack(kind=settings[0], path=settings[1], random_start=False)


def test_scatter_places_inserts_at_their_depths():
    text, spans = scatter(["a.", "b.", "c.", "d."], ["X", "YY", "Z"], [0.0, 0.5, 1.0], " ")
    assert text == "X a. b. YY c. d. Z"
    assert [text[slice(*span)] for span in spans] == ["X", "YY", "Z"]


def test_scatter_keeps_order_at_one_place():
    text, spans = scatter(["a", "b"], ["X", "Y"], [0.5, 0.6], "\n")
    assert text == "a\nX\nY\nb"
    assert [text[slice(*span)] for span in spans] == ["X", "Y"]


@pytest.mark.parametrize("budget", [0, 9, 10, 12, 13, 100, 299, 300, 301, 5000])
def test_largest_fitting_equals_a_plain_search(budget):
    def length(n):
        return 10 + 3 * n + (n // 7) % 2

    expected = max((n for n in range(1, 101) if length(n) <= budget), default=0)
    assert largest_fitting(length, budget, 100) == expected


def test_largest_fitting_ends_on_uneven_text():
    sizes = [1] * 50 + [40] * 50
    assert largest_fitting(lambda n: sum(sizes[:n]), 50 + 40 * 7 + 39, 100) == 57
    assert largest_fitting(lambda n: sum(sizes[::-1][:n]), 40 * 50 + 3, 100) == 53


def test_vocabulary_halves_share_no_word():
    halves = [{*words("adjectives", split), *words("nouns", split)} for split in ("eval", "profile")]
    assert not halves[0] & halves[1]
    for split in ("eval", "profile"):
        for part in ("adjectives", "nouns"):
            listed = words(part, split)
            assert len(set(listed)) == len(listed) >= 70
            assert all(word.isalpha() and word.islower() for word in listed)


def test_drawn_words_are_distinct_and_well_formed():
    rng = random.Random(0)
    keys = draw_keys(rng, "eval", 500)
    assert len(set(keys)) == 500
    known = words("adjectives", "eval"), words("nouns", "eval")
    assert all(part in listed for key in keys for part, listed in zip(key.split("-"), known, strict=True))
    numbers = draw_numbers(rng, 1, 9)
    assert sorted(numbers) == list("123456789")
    names = draw_names(rng, 3, 2000)
    assert len(set(names)) == 2000
    assert "VAR" not in names
    assert all(len(name) == 3 and name.isupper() for name in names)
