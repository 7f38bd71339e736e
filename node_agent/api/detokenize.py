"""Tokens to text, one token at a time: no half characters, and in all exactly what decoding the whole would give."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.text import BaseText

REPLACEMENT = "\ufffd"
"""Character that tokenizers write for bytes that are not (yet) a character."""

WINDOW = 12
"""Tokens of a window before it is shortened."""
KEEP = 6
"""Tokens that stay. They hold at least as many bytes, more than the 3 that an unfinished character can have; UTF-8
synchronises itself, so decoding from there ends in the same state as decoding from the beginning."""


class TokenText:
    """Properties of a tokenizer that detokenisation needs. Made once per process, and once more for requests that want
    special tokens in their text (`skip_special` False)."""

    def __init__(self, text: BaseText, *, skip_special: bool = True) -> None:
        self._tokenizer = text.tokenizer
        self.eos_ids = text.eos_ids
        self._skip_special = skip_special
        added = text.tokenizer.get_added_tokens_decoder()
        self._silent = frozenset(token_id for token_id, token in added.items() if token.special and skip_special)
        self.with_special = TokenText(text, skip_special=False) if skip_special else self
        """The same tokens, special ones with their text."""
        self._anchor = [text.bos_id]
        self._anchor_text: str = text.tokenizer.decode(self._anchor, skip_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the tokens' text."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
        return text

    def is_silent(self, token_id: int) -> bool:
        """Returns whether the id has no text: ids without a token have none, nor have special tokens that are left
        out."""
        return token_id in self._silent or self._tokenizer.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Returns whether the token is a byte-fallback token such as <0xE4>."""
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def one(self, token_id: int) -> str:
        """Returns one token's text as it stands inside a text: with its leading space, special tokens by their name."""
        # Behind BOS, because decoders strip the leading space of a text's first token.
        text: str = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
        if self._anchor_text and text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        alone: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return alone


class IncrementalDetokenizer:
    """Text of one generation as it continues `prompt_ids`.

    The pieces that `add` and `flush` return, joined, are decode(prompt + generated) without decode(prompt): a first
    word keeps its leading space unless the prompt has no text (BOS alone).

    Only a window of the last tokens is decoded again at each step. A run of byte-fallback tokens is held back until it
    ends, for decoders judge it as a whole: one wrong byte turns all of the run's characters into replacements.
    """

    def __init__(self, tokens: TokenText, prompt_ids: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._window = _context(tokens, prompt_ids)
        self._emitted = len(tokens.decode(self._window))
        """Characters of the window's text that were emitted, or belong to the prompt."""

    def add(self, token_id: int) -> str:
        """Returns the text that this token completes; often one word, sometimes nothing."""
        if self._tokens.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._tokens.is_byte(token_id):
            return ""
        text = self._tokens.decode(self._window)
        # The last replacement may stand for the beginning of a character; those before it are final.
        final = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._emitted : final]
        self._emitted = max(self._emitted, final)
        if len(self._window) > WINDOW:
            self._shorten(withheld=len(text) - self._emitted)
        return piece

    def flush(self) -> str:
        """Returns the text that is left when no more tokens will come; half a character becomes a replacement
        character."""
        text = self._tokens.decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _shorten(self, withheld: int) -> None:
        tail = self._window[-KEEP:]
        text = self._tokens.decode(tail)
        if text:  # without text in front, the next token would count as the first of a text
            self._window = tail
            self._emitted = len(text) - withheld


def _context(tokens: TokenText, prompt_ids: Sequence[int]) -> list[int]:
    """Returns the last token of the prompt that has text and ends a character, if there is one."""
    for token_id in reversed(prompt_ids):
        if not tokens.is_silent(token_id) and not tokens.is_byte(token_id):
            return [token_id]
    return []
