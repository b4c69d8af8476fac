"""What is done to a model's raw text before it is scored."""

import re


def clean_prediction(text: str) -> str:
    """Strip, and turn control characters (U+0000 to U+001F) into newlines, as RULER's evaluation does."""
    return re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip()
