"""Questions over given passages, from a file of JSON lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcfuse.data.base import Dataset, Sample
from qcfuse.data.prompt import load_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Jsonl(Dataset):
    """Rows {"input": question, "context": [passage, ...], "answers": [text, ...]} in file order.

    Passages are numbered, concatenated and chunked by tokens; what lies past the last chunk is dropped.
    num_samples: None for every row. prompt: a name in prompts/.
    """

    path: str | None
    prompt: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None or not Path(self.path).is_file():
            raise ValueError(f"{self.name}: dataset.path={self.path!r} is not a file; give a file of JSON lines "
                             f"with the keys input, context, answers")
        num_rows = len(self.rows)
        if self.num_samples is not None and self.num_samples > num_rows:
            raise ValueError(f"{self.name}: num_samples={self.num_samples} is larger than the {num_rows} rows of "
                             f"{self.path}; null takes all")
        load_prompt(self.prompt)

    @cached_property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """Every row of the file, checked."""
        return _read_rows(str(self.path))

    def __len__(self) -> int:
        return len(self.rows) if self.num_samples is None else self.num_samples

    @property
    def prompt_sha256(self) -> str:
        return load_prompt(self.prompt).sha256

    def sample(self, index: int, tokenizer: PreTrainedTokenizerBase) -> Sample:
        """Row `index`; the tokenizer plays no part."""
        row, prompt = self.rows[index], load_prompt(self.prompt)
        passages = (prompt.write_item(number=i, text=text) for i, text in enumerate(row["context"], start=1))
        return Sample(
            sample_id=f"{self.name}-{index:04d}",
            context="\n".join(passages).rstrip(),
            prompt=prompt.fill(question=row["input"].strip()),
            answers=tuple(row["answers"]),
        )


def _read_rows(path: str) -> tuple[dict[str, Any], ...]:
    """Rows of the file, checked. Raises ValueError with the line number of a row that cannot be used."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            rows.append(_parse_row(line, f"{path}, line {number}"))
    if not rows:
        raise ValueError(f"{path} holds no rows; give one JSON object a line")
    return tuple(rows)


def _parse_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); give one object a line") from None
    if not isinstance(row, dict) or not isinstance(row.get("input"), str) or not row["input"].strip():
        raise ValueError(f"{where}: 'input' must be a question that is not empty")
    for key in ("context", "answers"):
        value = row.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise ValueError(f"{where}: {key!r} must be a list of at least one text")
    return row
