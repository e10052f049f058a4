"""Text: tokenizers, incremental detokenising, stop strings, chat templates. No torch, no transformers."""

from __future__ import annotations

from agentrt.text.detokenizer import Detokenizer
from agentrt.text.stop import StopMatcher
from agentrt.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer", "load_tokenizer"]
