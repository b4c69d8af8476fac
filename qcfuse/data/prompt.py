"""Prompt text: the model's chat template and the tasks' versioned wording (prompts/*.yaml)."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import resources

import yaml

SYSTEM_SLOT = "{system}"


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Text around the user's turn; special tokens are written as their text and parsed to ids.

    prefix: up to the user's turn, with the literal {system} where the system text goes. Without that literal (models
    with no system role) the system text opens the user's turn, followed by a blank line.
    suffix: from the end of the user's turn to the start of the assistant's.
    """

    prefix: str
    suffix: str

    def __post_init__(self) -> None:
        if self.prefix.count(SYSTEM_SLOT) > 1 or SYSTEM_SLOT in self.suffix:
            raise ValueError(f"template: {SYSTEM_SLOT} belongs in the prefix, at most once; got prefix "
                             f"{self.prefix!r}, suffix {self.suffix!r}")

    def render_prefix(self, system: str) -> str:
        """The prefix with the system text in its place."""
        if SYSTEM_SLOT in self.prefix:
            return self.prefix.replace(SYSTEM_SLOT, system)
        return self.prefix + (f"{system}\n\n" if system else "")


@dataclass(frozen=True, kw_only=True)
class TaskPrompt:
    """Wording of one task. Slots are {word}; `fill` puts values in, and text inside a value is never read as a slot.

    instruction stands before the context, the rest after it; item is how one unit (a needle, a passage) is written.
    answer_prefix opens the assistant's turn.
    """

    version: int
    system: str
    instruction: str
    item: str
    before_question: str
    question: str
    after_question: str
    answer_prefix: str

    def fill(self, **values: str | int) -> TaskPrompt:
        """A copy with the slots of every piece but `item` filled. Raises ValueError for a slot without a value."""
        texts = {name: text for name, text in asdict(self).items() if name not in ("version", "item")}
        return replace(self, **{name: fill_slots(text, values) for name, text in texts.items()})

    def write_item(self, **values: str | int) -> str:
        """One unit of the context. Raises ValueError for a slot without a value."""
        return fill_slots(self.item, values)

    @cached_property
    def sha256(self) -> str:
        """Hash of the wording, for records: results under two wordings are not comparable."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def fill_slots(text: str, values: dict[str, str | int]) -> str:
    """Replace each {word} by values[word] in one pass."""

    def value_of(slot: re.Match[str]) -> str:
        if slot[1] not in values:
            raise ValueError(f"prompt slot {slot[0]} has no value; known here: {sorted(values)}")
        return str(values[slot[1]])

    return re.sub(r"\{(\w+)\}", value_of, text)


def load_prompt(name: str) -> TaskPrompt:
    """Read prompts/<name>.yaml. Raises ValueError that lists the names for an unknown one."""
    folder = resources.files(__package__).joinpath("prompts")
    names = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    if name not in names:
        raise ValueError(f"unknown prompt {name!r}; prompts/ has {', '.join(names)}")
    return TaskPrompt(**yaml.safe_load(folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8")))
