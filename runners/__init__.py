"""Loops over cells and samples: prepare, profile, evaluate, bench. They time and record, methods live in qcfuse."""
