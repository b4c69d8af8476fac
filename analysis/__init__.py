"""Figures, tables and statistics from outputs/ alone; nothing in this package imports torch or runs a model."""
