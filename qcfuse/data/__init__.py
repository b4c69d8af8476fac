"""Requests and data: text samples, prompts, segment-wise tokenisation, chunking. conf/dataset names each class."""
