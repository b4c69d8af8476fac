import dataclasses

import pytest

from qcfuse.data.prompt import ChatTemplate, fill_slots, load_prompt


def test_system_text_goes_into_its_slot():
    template = ChatTemplate(prefix="<sys>{system}</sys><user>", suffix="</user>")
    assert template.render_prefix("be brief") == "<sys>be brief</sys><user>"
    assert template.render_prefix("") == "<sys></sys><user>"


def test_without_a_slot_the_system_text_opens_the_users_turn():
    template = ChatTemplate(prefix="<s>[INST] ", suffix=" [/INST]")
    assert template.render_prefix("be brief") == "<s>[INST] be brief\n\n"
    assert template.render_prefix("") == "<s>[INST] "


@pytest.mark.parametrize(("prefix", "suffix"), [("{system}{system}", ""), ("", "{system}")])
def test_a_misplaced_system_slot_is_refused(prefix, suffix):
    with pytest.raises(ValueError, match="belongs in the prefix, at most once"):
        ChatTemplate(prefix=prefix, suffix=suffix)


def test_values_are_never_read_as_slots():
    assert fill_slots("{a} and {b}", {"a": "{b}", "b": "x"}) == "{b} and x"


def test_a_slot_without_a_value_is_named():
    with pytest.raises(ValueError, match=r"\{query\} has no value; known here: \['key'\]"):
        fill_slots("for {query}", {"key": "x"})


def test_unknown_prompt_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown prompt 'niah'.*niah_plural, niah_singular"):
        load_prompt("niah")


def test_hash_follows_the_wording():
    prompt = load_prompt("niah_plural")
    assert prompt.sha256 == load_prompt("niah_plural").sha256
    for field, value in (("version", 2), ("question", "Which?"), ("item", "{key}: {value}")):
        assert dataclasses.replace(prompt, **{field: value}).sha256 != prompt.sha256


def test_benchmark_wording_and_its_singular():
    plural, single = (load_prompt(f"niah_{form}").fill(query="a, and b") for form in ("plural", "singular"))
    assert plural.instruction.startswith("Some special magic numbers are hidden within")
    assert single.instruction.startswith("A special magic number is hidden within")
    assert plural.question == "What are all the special magic numbers for a, and b mentioned in the provided text?"
    assert single.question == "What is the special magic number for a, and b mentioned in the provided text?"
    assert single.answer_prefix == " The special magic number for a, and b mentioned in the provided text is"
    assert single.write_item(key="k", value=7) == "One of the special magic numbers for k is: 7."
