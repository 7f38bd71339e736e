"""Bytes of single tokens, and bounds on the text that one token can represent.

With the bounds, text that is certainly too long for a context is refused without tokenising it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer

_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""Token of a single byte, in vocabularies of characters."""


@dataclass(frozen=True)
class TokenBytes:
    """Bounds of one tokenizer. `longest`: maximum number of UTF-8 bytes of text in a single token. `uncounted`: byte
    values that may not appear in any token."""

    longest: int
    uncounted: bytes = b""

    def fewest_tokens(self, text: str) -> int:
        """Returns a lower bound on the number of tokens of `text`."""
        return -(-len(text.encode().translate(None, delete=self.uncounted)) // self.longest)


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """Returns the bounds of the tokenizer. Returns None where there are none: it may shorten or drop text, or combine
    any number of unknown characters in one token."""
    settings = json.loads(tokenizer.to_str())
    model, added = settings["model"], settings["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # such a token absorbs all spaces around it
    if not _keeps_length(settings["normalizer"]) or not _keeps_all(settings["pre_tokenizer"]):
        return None
    vocabulary = model.get("vocab")
    if model["type"] != "BPE" or not isinstance(vocabulary, dict):
        return None
    added_bytes = [_max_byte_length(tokenizer, token["content"]) for token in added]
    if _is_byte_level(settings["pre_tokenizer"]):
        unknown = bytes(byte for byte, letter in enumerate(_byte_letters()) if letter not in vocabulary)
        return TokenBytes(max([1, *map(len, vocabulary), *added_bytes]), unknown)
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return TokenBytes(max([1, *(len(token.encode()) for token in vocabulary), *added_bytes]))
    return None


def part_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Returns the bytes of a token that has a part of a character; empty if the tokenizer does not show them."""
    token = tokenizer.id_to_token(token_id) or ""
    if fallback := _FALLBACK.fullmatch(token):
        return bytes.fromhex(fallback[1])
    values = _byte_values()
    if not _decodes_bytes(tokenizer) or not all(letter in values for letter in token):
        return b""
    return bytes(values[letter] for letter in token)


def _decodes_bytes(tokenizer: Tokenizer) -> bool:
    """Returns whether the letters of the tokenizer's tokens are bytes."""
    if tokenizer.decoder is None:
        return False
    settings = json.loads(tokenizer.decoder.__getstate__())
    return any(each["type"] == "ByteLevel" for each in settings.get("decoders", [settings]))


@cache
def _byte_values() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(_byte_letters())}


def _byte_letters() -> list[str]:
    """Returns, by byte value, the letter that represents the byte in a byte-level vocabulary. Printable bytes represent
    themselves; the others use the letters from code point 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def _max_byte_length(tokenizer: Tokenizer, content: str) -> int:
    """Returns the bytes of `content` before or after normalisation, whichever are more."""
    normalized = tokenizer.normalizer.normalize_str(content) if tokenizer.normalizer else content
    return max(len(content.encode()), len(normalized.encode()))


def _keeps_length(normalizer: Mapping[str, Any] | None) -> bool:
    """Returns whether normalised text has at least as many bytes as before."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_length, normalizer["normalizers"]))
    pattern = normalizer.get("pattern", {}).get("String") if normalizer["type"] == "Replace" else None
    return pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode())


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Returns whether the pre-tokenizer keeps all of the text."""
    if pre_tokenizer is None or pre_tokenizer["type"] in ("ByteLevel", "Digits", "Metaspace"):
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return bool(pre_tokenizer["type"] == "Split" and pre_tokenizer["behavior"] != "Removed")


def _is_byte_level(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(map(_is_byte_level, pre_tokenizer["pretokenizers"]))
    return bool(pre_tokenizer["type"] == "ByteLevel")
