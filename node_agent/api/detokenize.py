"""Incremental detokenisation, token by token. It emits no partial characters, and the pieces join to the exact decoded
text."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.text import REPLACEMENT, BaseText
from cluster.token_bytes import part_bytes

WINDOW = 12
"""Number of tokens at which the window of last tokens is shortened."""
KEEP = 6
"""Number of tokens that remain in the window when it is shortened.

They hold at least this many bytes, more than the 3 of an unfinished character. UTF-8 is self-synchronising, so decoding
from the first of them ends in the same state.
"""


class TokenText:
    """Properties of a tokenizer for detokenisation. Created once per process, and once more for requests that want
    special tokens in their text (`skip_special` False)."""

    def __init__(self, text: BaseText, *, skip_special: bool = True) -> None:
        self._tokenizer = text.tokenizer
        self.eos_ids = text.eos_ids
        self._skip_special = skip_special
        added = text.tokenizer.get_added_tokens_decoder()
        self.added = {token_id: str(each.content) for token_id, each in added.items()}
        """texts of added tokens, special or not, by id"""
        self.silent_texts = {
            token_id: str(each.content) for token_id, each in added.items() if each.special and skip_special
        }
        """texts of the special tokens that are skipped, by id"""
        self.with_special = TokenText(text, skip_special=False) if skip_special else self
        """the same tokenizer, but with the text of special tokens"""
        self._anchor = [text.bos_id]
        self._anchor_text: str = text.tokenizer.decode(self._anchor, skip_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
        return text

    def is_silent(self, token_id: int) -> bool:
        """Returns whether the id has no text: it is not a token, or is a skipped special token."""
        return token_id in self.silent_texts or self._tokenizer.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Returns whether the token is a byte-fallback token such as <0xE4>."""
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def part(self, token_id: int, text: str) -> bytes:
        """Returns the token's bytes if its `text` shows a part of a character by a replacement; else none."""
        return part_bytes(self._tokenizer, token_id) if REPLACEMENT in text else b""

    def one(self, token_id: int) -> str:
        """Returns one token's text as it appears within a text, with its leading space. Special tokens are shown by
        name."""
        # decode after BOS, because decoders strip the leading space of the first token
        text: str = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
        if self._anchor_text and text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        alone: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return alone


class IncrementalDetokenizer:
    """Text of one generation that continues `prompt_ids`.

    The pieces returned by `add` and `flush` join to decode(prompt + generated) without decode(prompt). A first word
    keeps its leading space, unless the prompt has no text (BOS alone). Each step decodes only a window of the last
    tokens. A run of byte-fallback tokens is held back until it ends, since decoders treat it as a whole: one invalid
    byte turns all of its characters into replacement characters.
    """

    def __init__(self, tokens: TokenText, prompt_ids: Sequence[int] = (), *, spaces: bool = True) -> None:
        """`spaces`: False writes an added token after another one without the tokenizer's space between them."""
        self._tokens, self._spaces = tokens, spaces
        self._follows_added = False
        self._window = _context(tokens, prompt_ids)
        self._emitted = len(tokens.decode(self._window))
        """number of characters of the window's text that were already emitted or belong to the prompt"""

    def add(self, token_id: int) -> str:
        """Returns the text that this token completes: often a word, sometimes nothing."""
        if self._tokens.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._tokens.is_byte(token_id):
            return ""
        text = self._tokens.decode(self._window)
        # the last replacement may stand for an unfinished character; earlier ones are final
        final = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._emitted : final]
        self._emitted = max(self._emitted, final)
        if not self._spaces:
            piece, self._follows_added = self._without_space(token_id, piece), token_id in self._tokens.added
        if len(self._window) > WINDOW:
            self._shorten(withheld=len(text) - self._emitted)
        return piece

    def _without_space(self, token_id: int, piece: str) -> str:
        return self._tokens.added.get(token_id, piece) if self._follows_added else piece

    def flush(self) -> str:
        """Returns the remaining text at the end of the tokens. An unfinished character becomes a replacement
        character."""
        text = self._tokens.decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _shorten(self, withheld: int) -> None:
        tail = self._window[-KEEP:]
        text = self._tokens.decode(tail)
        if text:  # without preceding text, the next token would count as the first of a text
            self._window = tail
            self._emitted = len(text) - withheld


def _context(tokens: TokenText, prompt_ids: Sequence[int]) -> list[int]:
    """Returns a list with the last token of the prompt that has text and ends a character. Returns an empty list if
    there is none."""
    for token_id in reversed(prompt_ids):
        if not tokens.is_silent(token_id) and not tokens.is_byte(token_id):
            return [token_id]
    return []
