"""Batch speculative decoding with globally trimmed draft trees, for SGLang."""

from sglang_tetris.adapter.options import configure

__all__ = ["configure"]
