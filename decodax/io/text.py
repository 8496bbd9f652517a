"""Text in and out: a Hugging Face tokenizer with its special ids and chat template, and text from token streams.

Streamed text and the text of a result come from one place, the `Detokenizer`: it never shows half a character, nor the
beginning of a stop string.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from decodax.core.stops import first_match, held, stop_strings
from decodax.io.chat import Message, render_chat
from decodax.io.pieces import Pieces, pieces


class Tokenizer:
    """A tokenizer with what decoding needs to know around it.

    Attributes:
        backend: the `tokenizers.Tokenizer`; truncation and padding are off.
        bos_id, pad_id: ids, or None.
        eos_ids: ids that end a sequence; several for many chat models, none if the files name none.
        special_tokens: "bos_token", "eos_token", ... as text, for chat templates.
        chat_templates: Jinja source by name; "default" is the usual one.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, bos_id: int | None = None, eos_ids: Sequence[int] = (),
                 pad_id: int | None = None, special_tokens: Mapping[str, str] | None = None,
                 chat_templates: Mapping[str, str] | None = None):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_id, self.eos_ids, self.pad_id = bos_id, tuple(eos_ids), pad_id
        self.special_tokens, self.chat_templates = dict(special_tokens or {}), dict(chat_templates or {})

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json, config.json,
        generation_config.json and chat_template.jinja of a local directory.

        Raises:
            FileNotFoundError: there is no tokenizer.json.
            ValueError: a file is not valid JSON, or tokenizer.json is not a tokenizer.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            seen = ", ".join(sorted(p.name for p in path.glob("*token*"))) or "no tokenizer file"
            raise FileNotFoundError(f"{path}: takes a tokenizer.json, has {seen}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:       # the binding raises a bare Exception
            raise ValueError(f"{file}: {error}") from error

        config = _read_json(path / "tokenizer_config.json")
        tokens = {**_read_json(path / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
        special = {k: v["content"] if isinstance(v, dict) else v for k, v in tokens.items() if k.endswith("_token")}
        special = {k: v for k, v in special.items() if isinstance(v, str)}
        model = _read_json(path / "config.json")
        inner = model.get("text_config")
        ids = {**(inner if isinstance(inner, dict) else {}), **model, **_read_json(path / "generation_config.json")}

        def find(name: str) -> list[int]:
            found = ids.get(f"{name}_token_id")
            if found is None:
                found = backend.token_to_id(special.get(f"{name}_token", ""))
            return [] if found is None else list(found) if isinstance(found, list) else [found]

        one = lambda name: next(iter(find(name)), None)
        return cls(backend, bos_id=one("bos"), eos_ids=find("eos"), pad_id=one("pad"), special_tokens=special,
                   chat_templates=_chat_templates(path, config))

    def __len__(self) -> int:
        """Entries of the vocabulary, added tokens included; a model's may be padded beyond it."""
        return len(self.pieces().rest)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the BOS and others that the tokenizer's post-processor adds."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of `chat_text`; the template writes the special tokens itself."""
        return self.encode(self.chat_text(messages, **variables), add_special_tokens=False)

    def chat_text(self, messages: Sequence[Message], *, template: str | None = None, **variables: Any) -> str:
        """The prompt for a chat by the model's template.

        Args:
            template: a name of `chat_templates`, or Jinja source; None takes "tool_use" if there are
                tools, else "default".
            variables: passed on; see `decodax.io.chat.render_chat`.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        if template is None:
            template = "tool_use" if variables.get("tools") and "tool_use" in self.chat_templates else "default"
            if template not in self.chat_templates:
                named = ", ".join(self.chat_templates) or "none"
                raise ValueError(f"messages: the model has no default chat template (it has {named}); pass template=")
        source = self.chat_templates.get(template, template)
        return render_chat(source, messages, **{**self.special_tokens, **variables})

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no character become U+FFFD."""
        return self.pieces(skip_special_tokens).join(ids)[0].decode(errors="replace")

    def continuation(self, prompt_ids: Sequence[int], new_ids: Iterable[int], *,
                     stop: str | Sequence[str] | None = None, min_new: int = 0) -> str:
        """What `new_ids` add to the text of `prompt_ids`, up to a stop string; equal to what a stream shows.

        A character that the prompt began and `new_ids` complete belongs to the continuation.
        """
        detokenizer = self.detokenizer(prompt_ids, stop=stop, min_new=min_new)
        return detokenizer.feed(new_ids) + detokenizer.finish()

    def detokenizer(self, prompt_ids: Iterable[int] = (), *, stop: str | Sequence[str] | None = None,
                    min_new: int = 0) -> Detokenizer:
        """For the tokens that follow `prompt_ids`, one by one or in batches."""
        return Detokenizer(self.pieces(), prompt_ids, stop=stop, min_new=min_new)

    def token_bytes(self, skip_special_tokens: bool = True) -> list[bytes]:
        """The bytes that each token adds to a text that has begun; b"" for special tokens (or their literal)."""
        return list(self.pieces(skip_special_tokens).rest)

    @functools.lru_cache(maxsize=2)  # noqa: B019  (two entries a tokenizer, which lives as long as its model)
    def pieces(self, skip_special_tokens: bool = True) -> Pieces:
        """The table behind `decode`."""
        added = self.backend.get_added_tokens_decoder()
        skipped = frozenset(i for i, token in added.items() if token.special) if skip_special_tokens else frozenset()
        tokens = {i: token for token, i in self.backend.get_vocab(with_added_tokens=True).items()}
        return pieces(tokens, json.loads(self.backend.to_str())["decoder"], skipped)


class Detokenizer:
    """Turns one row's tokens into text as they come.

    The pieces that `feed` and `finish` return, joined, are the row's text. A piece never ends inside a character; bytes
    that are no character show as U+FFFD, at the end of the text only by `finish`. A beginning of a stop string is held
    back until it is clear that it is none; nothing follows a stop string, and it is left out itself.

    Args:
        pieces: the tokenizer's table.
        prompt_ids: what stands before; it decides whether a leading space is kept and completes characters, but does
            not count towards stop strings.
        stop: one stop string or several.
        min_new: a stop string counts only if it ends after this many tokens, as the decoding loop has it.
    """

    def __init__(self, pieces: Pieces, prompt_ids: Iterable[int] = (), *, stop: str | Sequence[str] | None = None,
                 min_new: int = 0):
        self._pieces = pieces
        self._stops = [s.encode() for s in stop_strings(stop)]
        self._min_new, self._count = min_new, 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = b""
        before, self._started = self._pieces.join(prompt_ids)
        self._decode.decode(before)
        self.stopped = False

    def feed(self, ids: Iterable[int]) -> str:
        """The text that `ids` make certain."""
        return "".join(self._feed(int(i)) for i in ids)

    def finish(self) -> str:
        """What was held back."""
        rest, self._pending = self._pending, b""
        return self._decode.decode(b"" if self.stopped else rest, final=True)

    def _feed(self, token: int) -> str:
        if self.stopped:
            return ""
        new, self._started = self._pieces.join((token,), self._started)
        old = len(self._pending)
        self._pending += new
        self._count += 1
        match = first_match(self._pending, self._stops, after=old) if self._count > self._min_new else None
        if match is not None:
            self.stopped, keep = True, len(self._pending) - match[0]
        else:
            keep = held(self._pending, self._stops)
        ready = len(self._pending) - keep
        out, self._pending = self._pending[:ready], self._pending[ready:]
        return self._decode.decode(out)


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or {} without the file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: got {type(found).__name__}, takes a JSON object")
    return found


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: from tokenizer_config.json (one, or a list of named ones) and, before it, *.jinja files."""
    found = config.get("chat_template") or {}
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    elif isinstance(found, str):
        found = {"default": found}
    for file in [path / "chat_template.jinja", *sorted((path / "additional_chat_templates").glob("*.jinja"))]:
        if file.is_file():
            name = "default" if file.stem == "chat_template" else file.stem
            found[name] = file.read_text(encoding="utf-8")
    return found
