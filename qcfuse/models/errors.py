"""The one error of this room that callers tell apart."""


class ModelUnavailable(ValueError):
    """A model's files cannot be had; the message is one line that names the ways out."""
