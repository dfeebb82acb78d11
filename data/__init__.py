"""Corpora, tokenizers, packing, and the loader whose order no mesh can change. Start at data/build.py."""

from data.entropy import conditional_byte_entropy

__all__ = ["conditional_byte_entropy"]
