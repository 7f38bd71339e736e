"""Conversion between text and tokens, with the base model's tokenizer and chat template, without transformers or torch.

The gateway encodes prompts, since it must know their length to place them. Nodes decode generated tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cluster.base_templates import read_templates, special_tokens
from cluster.chat_template import ERRORS, render
from cluster.token_bytes import token_bytes

SHORT_CHARACTERS = 512
"""Maximum length in characters of text that is tokenised with the GIL held. That takes less time than another thread
would need to start."""


REPLACEMENT = "\ufffd"
"""Character that tokenizers emit for bytes that do not form a character (yet)."""
CONTEXT_TOKENS = 8
"""Number of earlier tokens with which a token is decoded. They hold more bytes than a character."""


class TextError(ValueError):
    """The prompt or the messages can't be converted into tokens. The message has the reason, and may be shown to the
    caller."""


class TextTooLong(TextError):
    """The text certainly has more tokens than allowed, and was not tokenised."""


class BaseText:
    """Tokenizer, special tokens and chat template of one base model directory."""

    def __init__(self, directory: Path) -> None:
        """Raises TextError if the directory's tokenizer can't be used."""
        self.tokenizer = _read_tokenizer(directory)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        settings = _read_json(directory / "tokenizer_config.json")
        config = _read_json(directory / "config.json")
        self.special: Mapping[str, str] = special_tokens(directory, settings)
        """Texts of the special tokens, by the names that chat templates use."""
        self.bos_id = _bos_id(self.tokenizer, self.special.get("bos_token"), config)
        self.eos_ids = end_token_ids(directory)
        self.templates = read_templates(directory, settings)
        self.template = self.templates.source(tools=True)
        """Source of the chat template for calls with tools; empty if the base has none"""
        self.template_problem = self.templates.problem
        """Reason why chats without a template of their own are refused; empty if the base's template works"""
        self._token_bytes = token_bytes(self.tokenizer)
        self._added = _added_tokens(self.tokenizer)

    def encode_prompt(
        self, prompt: str, limit: int | None = None, keep: int | None = None, *, special: bool = True
    ) -> list[int]:
        """Returns the token ids of a raw prompt; BOS alone for an empty prompt. `special`: with the tokenizer's special
        tokens.

        `keep`: maximum number of tokens, including the special tokens that the tokenizer adds; only the last ones are
        kept. Raises TextTooLong, without tokenising, when the prompt certainly has more than `limit` tokens.
        """
        if not prompt:
            return [self.bos_id]
        ids = self._ids(prompt, limit, special=special)
        if keep is None or len(ids) <= keep:
            return ids
        before, after = self._added if special else (0, 0)
        room = max(keep - before - after, 0)
        return [*ids[:before], *ids[len(ids) - after - room : len(ids) - after], *ids[len(ids) - after :]][:keep]

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the token sequences of each word, like vLLM. The first is that of the word at the beginning of a
        text. The second, that of the word after a space, is included if it has the same length and another first
        token."""
        sequences: list[list[int]] = []
        for word in words:
            bare, spaced = (self._ids(space + word.lstrip(), None, special=False) for space in ("", " "))
            sequences.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                sequences.append(spaced)
        return sequences

    def encode_plain(self, text: str) -> list[int]:
        """Returns the token ids of the text without special tokens; empty for empty text."""
        return self._ids(text, None, special=False) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the tokens, including special tokens. Raises TextError for an unknown token id."""
        self.token_strings(token_ids)
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def token_offsets(self, token_ids: Sequence[int], text: str, *, skip_special: bool) -> list[int]:
        """Returns the number of characters of `text`, the text of all tokens, before each token. Tokens that together
        are one character have the same."""
        offsets: list[int] = []
        window: list[int] = []
        at = shown = 0
        for token_id in token_ids:
            offsets.append(at)
            window.append(token_id)
            decoded = self.tokenizer.decode(window, skip_special_tokens=skip_special)
            is_whole = not decoded.endswith(REPLACEMENT)
            if is_whole:
                at, shown = at + len(decoded) - shown, len(decoded)
            if is_whole and len(window) >= 2 * CONTEXT_TOKENS:
                window = window[-CONTEXT_TOKENS:]
                shown = len(self.tokenizer.decode(window, skip_special_tokens=skip_special))
        if at != len(text):  # the tokenizer has changed the text before it was tokenised
            stated = self.tokenizer.encode(text).offsets
            offsets = [begin for begin, _ in stated] if len(stated) == len(offsets) else offsets
        return [min(offset, len(text)) for offset in offsets]

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Returns each token as written in the vocabulary. Raises TextError for an unknown token id."""
        tokens: list[str] = []
        for place, token_id in enumerate(token_ids):
            token = self.tokenizer.id_to_token(token_id)
            if token is None:
                raise TextError(f"the base model has no token {token_id} (entry {place} of the list)")
            tokens.append(token)
        return tokens

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        limit: int | None = None,
        *,
        answer: bool = True,
        continues: bool = False,
        special: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation.

        `answer`, `continues`, `variables`: as in cluster.chat_template.render. `special`: also add the special tokens
        that a raw prompt gets, before and after the text. Raises TextError, and TextTooLong as `encode_prompt` does.
        """
        template = self.templates.template(tools=bool((variables or {}).get("tools")))
        if template is None:
            problem = self.template_problem or "the base model has no chat template"
            raise TextError(f"{problem}; send `prompt` instead of `messages`, or set defaults.chat_template")
        try:
            text = render(template, messages, self.special, answer=answer, continues=continues, variables=variables)
        except ERRORS as error:
            raise TextError(f"the chat template refused the messages: {error}") from error
        return self._ids(text, limit, special=special)

    def encode_rendered(self, text: str, limit: int | None = None, *, special: bool = False) -> list[int]:
        """Returns the token ids of `text`, a conversation that was rendered with a template other than the base model's
        own. Special tokens in the text are recognised. `special`: also add the special tokens that a raw prompt gets,
        before and after the text. Raises TextTooLong as `encode_prompt` does."""
        return self._ids(text, limit, special=special)

    def _ids(self, text: str, limit: int | None, special: bool) -> list[int]:
        if limit is not None and self._token_bytes and self._token_bytes.fewest_tokens(text) > limit:
            raise TextTooLong(f"the text has more than {limit} tokens")
        if len(text) <= SHORT_CHARACTERS:
            encoding = self.tokenizer.encode(text, add_special_tokens=special)
        else:  # `encode` would hold the GIL for its whole time; this releases it, and computes no offsets
            (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids or [self.bos_id]


def _read_tokenizer(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise TextError(
            f"{directory} has no tokenizer.json; fetch it, or write it with transformers: "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise TextError(f"{file} is no tokenizer that can be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TextError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise TextError(f"{path} does not hold a JSON object")
    return value


def _added_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns the numbers of special tokens that the tokenizer adds before and after a text."""
    mask = tokenizer.encode("a", add_special_tokens=True).special_tokens_mask
    before = next((place for place, special in enumerate(mask) if not special), 0)
    after = next((place for place, special in enumerate(reversed(mask)) if not special), 0)
    return before, after


def _bos_id(tokenizer: Tokenizer, token: str | None, config: dict[str, Any]) -> int:
    token_id = tokenizer.token_to_id(token) if token else config.get("bos_token_id")
    if not isinstance(token_id, int):
        raise TextError("the base model names no BOS token; an empty prompt would have no tokens")
    return token_id


def end_token_ids(directory: Path) -> frozenset[int]:
    """Returns the ids of the end tokens in both config files: chat models often list the end-of-turn token in only one
    of them."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    return frozenset(ids)
