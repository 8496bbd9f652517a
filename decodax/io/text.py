"""Tokenizers of Hugging Face with their special tokens and chat templates, and conversion of token streams to text.

Streamed text and the text of a result are both made by `Detokenizer`. It never returns part of a character, nor the
beginning of a stop string.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from decodax.common.ids import named
from decodax.core.stops import first_match, held, sought, stop_strings
from decodax.io.added_tokens import add_tokens, special_tokens
from decodax.io.appended import appended
from decodax.io.files import read_object
from decodax.io.messages import ChatTemplateError, Message
from decodax.io.pieces import TokenBytes, byte_of_char, pieces


class Tokenizer:
    """A tokenizer, its special tokens and its chat templates.

    Attributes:
        backend: the `tokenizers.Tokenizer`; truncation and padding are off.
        bos_id: id of the beginning-of-sequence token, or None.
        pad_id: id of the padding token, or None.
        eos_ids: ids of tokens that end a sequence; several for many chat models, none if the files name none.
        special_tokens: the texts of "bos_token", "eos_token", ..., for chat templates.
        chat_templates: Jinja source by name; "default" is the usual one.
        template_files: the file of each template, for errors.
        directory: the directory of its files; None if it was made in memory.
        source: the tokenizer of texts for the model's encoder; None: this one.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, bos_id: int | None = None, eos_ids: Sequence[int] = (),
                 pad_id: int | None = None, special_tokens: Mapping[str, str] | None = None,
                 chat_templates: Mapping[str, str] | None = None, template_files: Mapping[str, str] | None = None,
                 directory: Path | None = None, source: Tokenizer | None = None):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_id, self.eos_ids, self.pad_id = bos_id, tuple(eos_ids), pad_id
        self.special_tokens, self.chat_templates = dict(special_tokens or {}), dict(chat_templates or {})
        self.template_files, self.directory, self.source = dict(template_files or {}), directory, source
        self._pieces: dict[bool, TokenBytes] = {}

    def __repr__(self) -> str:
        where = "" if self.directory is None else f", from {self.directory}"
        return f"<Tokenizer of {self.backend.get_vocab_size():,} tokens, eos {list(self.eos_ids)}{where}>"

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Loads a tokenizer from a local directory.

        The directory must have a tokenizer.json. If present, tokenizer_config.json, special_tokens_map.json,
        added_tokens.json, config.json, generation_config.json and chat_template.jinja are read, too. Tokens that
        tokenizer.json lacks are added from the other files, see `decodax.io.added_tokens`. A negative special token id
        counts as no id.

        Raises:
            FileNotFoundError: there is no tokenizer.json.
            ValueError: a file has invalid content; the message names it.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            seen = ", ".join(sorted(p.name for p in path.glob("*token*"))) or "no tokenizer file"
            raise FileNotFoundError(f"{path}: takes a tokenizer.json, has {seen}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except BaseException as error:       # the binding raises a bare Exception, or panics beside Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(f"{file}: {error}") from error

        config = read_object(path / "tokenizer_config.json")
        special = special_tokens(path, config)
        add_tokens(backend, path, config, special)
        model = read_object(path / "config.json")
        inner = model.get("text_config")
        sources = (read_object(path / "generation_config.json"), model, inner if isinstance(inner, dict) else {})

        def find(name: str) -> list[int]:
            key = f"{name}_token_id"
            found = next((ids for source in sources if (ids := named(source.get(key))) is not None), None)
            if found is None:
                token = special.get(f"{name}_token")
                found = None if token is None else backend.token_to_id(token.content)
            found = [] if found is None else list(found) if isinstance(found, list) else [found]
            if not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
                raise ValueError(f"{path}: {name}_token_id: got {found} in generation_config.json or config.json, "
                                 "takes a token id or a list of them")
            return found

        one = lambda name: next(iter(find(name)), None)
        templates = _chat_templates(path, config)
        return cls(backend, bos_id=one("bos"), eos_ids=find("eos"), pad_id=one("pad"),
                   special_tokens={name: token.content for name, token in special.items()},
                   chat_templates={name: source for name, (source, _) in templates.items()},
                   template_files={name: str(file) for name, (_, file) in templates.items()}, directory=path)

    def save(self, path: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, with the chat templates, into a directory."""
        path = Path(path)
        self.backend.save(str(path / "tokenizer.json"))
        templates = [{"name": name, "template": text} for name, text in self.chat_templates.items()]
        config = {**self.special_tokens, **({"chat_template": templates} if templates else {})}
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def __len__(self) -> int:
        """Returns the size of the vocabulary, including added tokens; the logits of a model may be padded beyond it."""
        return len(self.pieces().rest)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: the text.
            add_special_tokens: adds BOS and other tokens as the tokenizer's post-processor does.

        Raises:
            ValueError: the text has characters for which the tokenizer has no token and which it would drop, or it is
                not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text: got {text[error.start:error.end]!r} at position {error.start}, takes Unicode "
                             "characters (this is half of a surrogate pair)") from None
        try:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:       # the binding raises a bare Exception
            raise ValueError(f"text: the tokenizer cannot encode it ({error})") from error
        if self._alphabet is not None and self._drops(text):
            lost = [c for c in dict.fromkeys(text) if self._drops(c)] or [text]
            raise ValueError(f"text: the tokenizer has no token for {', '.join(map(repr, lost[:5]))} and would drop "
                             f"{'it' if len(lost) == 1 else 'them'}")
        return ids

    @functools.cached_property
    def _alphabet(self) -> frozenset[str] | None:
        """Characters that have tokens, if the tokenizer drops all others; None if it drops no characters.

        A BPE without an unknown token and without byte fallback drops characters that are not in its vocabulary.
        Byte-level tokenizers have tokens for all bytes.
        """
        file = json.loads(self.backend.to_str())
        model = file["model"]
        if model.get("type") != "BPE" or model.get("unk_token") is not None or model.get("byte_fallback"):
            return None
        ends = (model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or "")
        bare = {token.removeprefix(ends[0]).removesuffix(ends[1]) for token in model["vocab"]} | set(model["vocab"])
        known = frozenset(token for token in bare if len(token) == 1)
        bytewise = '"ByteLevel"' in json.dumps([file["normalizer"], file["pre_tokenizer"]])
        return None if bytewise and known >= byte_of_char().keys() else known

    def _drops(self, text: str) -> bool:
        """True if a character of `text` is not in `_alphabet`, so that the tokenizer would drop it."""
        assert self._alphabet is not None
        whole = (t for t in self.backend.get_added_tokens_decoder().values()
                 if not (t.special and self.backend.encode_special_tokens))
        added = sorted({t.content for t in whole}, key=len, reverse=True)
        parts = re.split("|".join(map(re.escape, filter(None, added))) or r"\Z", text)
        if self.backend.normalizer is not None:
            parts = [self.backend.normalizer.normalize_str(part) for part in parts]
        if self.backend.pre_tokenizer is not None:
            parts = [piece for part in parts for piece, _ in self.backend.pre_tokenizer.pre_tokenize_str(part)]
        return any(not self._alphabet.issuperset(part) for part in parts)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Returns the token ids of the chat prompt `chat_text`. No special tokens are added, since the template writes
        them."""
        return self.encode(self.chat_text(messages, **variables), add_special_tokens=False)

    def chat_text(self, messages: Sequence[Message], *, template: str | None = None, **variables: Any) -> str:
        """Returns the prompt for a chat as text, formatted by the model's template.

        Args:
            messages: messages with `role` and `content`.
            template: a name in `chat_templates`, or Jinja source. None: "tool_use" if there are tools and it exists,
                else "default".
            variables: passed on to `decodax.io.chat.render_chat`.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if template is None:
            template = "tool_use" if variables.get("tools") and "tool_use" in self.chat_templates else "default"
            if template not in self.chat_templates:
                named = ", ".join(self.chat_templates) or "none"
                raise ValueError(f"template: got None, but the model has no default chat template (it has {named})")
        from decodax.io.chat import render_chat  # imports Jinja, for which a text need not wait
        source = self.chat_templates.get(template, template)
        try:
            return render_chat(source, messages, **{**self.special_tokens, **variables})
        except ChatTemplateError as error:
            if template not in self.template_files:
                raise
            raise ChatTemplateError(f"{self.template_files[template]}: {error}") from error

    def encode_after(self, ids: Sequence[int] | None, text: str) -> list[int]:
        """Returns the token ids that, appended to `ids`, add exactly `text` to their text; see `decodax.io.appended`.
        `ids` None: the text before is not known."""
        return appended(self, ids, text)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; bytes that are not part of a character become U+FFFD."""
        return self.pieces(skip_special_tokens).join(ids)[0].decode(errors="replace")

    def continuation(self, prompt_ids: Sequence[int], new_ids: Iterable[int], *,
                     stop: str | Sequence[str] | None = None, min_new: int = 0, skip_special_tokens: bool = True,
                     include_stop: bool = False) -> str:
        """Returns the text that `new_ids` add to the text of `prompt_ids`, up to a stop string. A stream shows the same
        text.

        A character whose first bytes are in the prompt and whose last bytes are in `new_ids` belongs to the
        continuation. The other arguments are those of `Detokenizer`.
        """
        detokenizer = self.detokenizer(prompt_ids, stop=stop, min_new=min_new, include_stop=include_stop,
                                       skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(new_ids) + detokenizer.finish()

    def detokenizer(self, prompt_ids: Iterable[int] = (), *, stop: str | Sequence[str] | None = None,
                    min_new: int = 0, skip_special_tokens: bool = True, include_stop: bool = False) -> Detokenizer:
        """Returns a `Detokenizer`, which converts the tokens after `prompt_ids` to text as they arrive. For the other
        arguments see there."""
        return Detokenizer(self.pieces(skip_special_tokens), prompt_ids, stop=stop, min_new=min_new,
                           include_stop=include_stop)

    def token_bytes(self, skip_special_tokens: bool = True) -> list[bytes]:
        """Returns the bytes that each token adds to a text that is not empty. Special tokens add b"", or their name if
        they are not skipped."""
        return list(self.pieces(skip_special_tokens).rest)

    def pieces(self, skip_special_tokens: bool = True) -> TokenBytes:
        """Returns the table of bytes by which `decode` works; it is computed once."""
        if skip_special_tokens not in self._pieces:
            added = self.backend.get_added_tokens_decoder()
            skipped = frozenset(i for i, token in added.items() if token.special and skip_special_tokens)
            # Two tokens may share an id if the vocabulary has holes; decoding takes the added one.
            tokens = {i: token for token, i in self.backend.get_vocab(with_added_tokens=False).items()}
            tokens |= {i: token.content for i, token in added.items()}
            self._pieces[skip_special_tokens] = pieces(tokens, json.loads(self.backend.to_str())["decoder"], skipped)
        return self._pieces[skip_special_tokens]


class Detokenizer:
    """Converts the tokens of one row to text as they arrive.

    The strings that `feed` and `finish` return, joined, are the text of the row. A string never ends inside a
    character. Bytes that are not part of a character become U+FFFD; at the end of the text this happens only in
    `finish`. Text that may be the beginning of a stop string is held back until this is decided. No text follows a stop
    string, and by default the stop string itself is left out.

    Args:
        pieces: the tokenizer's table of bytes.
        prompt_ids: the tokens before the row's new ones. They determine whether a leading space is kept and may hold
            the first bytes of a character that the new tokens complete, but stop strings are not searched in them.
        stop: one stop string or several. They are searched in the visible text; a string that contains the name of a
            skipped special token is searched in the text with special tokens.
        min_new: a stop string counts only if it ends after this many tokens, as in the decoding loop.
        include_stop: True ends the text with the stop string.
    """

    def __init__(self, pieces: TokenBytes, prompt_ids: Iterable[int] = (), *, stop: str | Sequence[str] | None = None,
                 min_new: int = 0, include_stop: bool = False):
        self._pieces, self._include = pieces, include_stop
        self._stops, self._special = sought(stop_strings(stop), pieces.skipped.values())
        self._min_new, self._count = min_new, 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = b""
        self._written, self._apart = b"", b""       # text with special tokens, and flags of the bytes of these
        before, self._started = self._pieces.join(prompt_ids)
        self._decode.decode(before)
        self.stopped = False

    def feed(self, ids: Iterable[int]) -> str:
        """Adds `ids` and returns the text that is now certain."""
        return "".join(self._feed(int(i)) for i in ids)

    def finish(self) -> str:
        """Ends the row and returns the text that was held back."""
        rest, self._pending = self._pending, b""
        return self._decode.decode(b"" if self.stopped else rest, final=True)

    def _feed(self, token: int) -> str:
        if self.stopped:
            return ""
        new, self._started = self._pieces.join((token,), self._started)
        self._pending += new
        self._count += 1
        special = self._pieces.skipped.get(token, b"") if self._special else b""
        if self._special:
            self._written += special or new
            self._apart += (b"\1" if special else b"\0") * len(special or new)
        match = self._match(len(new), len(special or new)) if self._count > self._min_new else None
        if match is not None:
            self.stopped, (ready, _, stop) = True, match
            return self._decode.decode(self._pending[:ready] + (stop if self._include else b""))
        begun = held(self._written, self._special)
        keep = max(held(self._pending, self._stops), self._visible(-begun) if begun else 0)
        self._written, self._apart = (x[len(x) - begun:] for x in (self._written, self._apart))
        ready = len(self._pending) - keep
        out, self._pending = self._pending[:ready], self._pending[ready:]
        return self._decode.decode(out)

    def _match(self, new: int, written: int) -> tuple[int, int, bytes] | None:
        """Returns the stop string that is completed first: its begin and end in the pending bytes, and its bytes; None
        if there is none.

        Args:
            new: number of new bytes among the pending ones.
            written: number of new bytes in the text with special tokens.
        """
        found, size = [], len(self._pending)
        if (match := first_match(self._pending, self._stops, size - new)) is not None:
            found.append((*match, self._pending[slice(*match)]))
        if (match := first_match(self._written, self._special, len(self._written) - written)) is not None:
            found.append((size - self._visible(match[0]), size - self._visible(match[1]), self._written[slice(*match)]))
        return min(found, key=lambda one: (one[1], one[0]), default=None)

    def _visible(self, start: int) -> int:
        """Returns the number of bytes from index `start` on, in the text with special tokens, that belong to visible
        tokens."""
        return self._apart[start:].count(0)


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, Path]]:
    """Returns the source and the file of each chat template by name, from tokenizer_config.json (one template, or a
    list of named ones) and from *.jinja files, which take precedence."""
    given, where = config.get("chat_template") or {}, path / "tokenizer_config.json"
    try:
        named = {"default": given} if isinstance(given, str) else \
            {entry["name"]: entry["template"] for entry in given} if isinstance(given, list) else dict(given)
        if not all(isinstance(text, str) for pair in named.items() for text in pair):
            raise TypeError
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{where}: chat_template: got {given!r}, takes a text, or a list of objects with name and "
                         "template") from None
    found = {name: (source, where) for name, source in named.items()}
    for file in [path / "chat_template.jinja", *sorted((path / "additional_chat_templates").glob("*.jinja"))]:
        if file.is_file():
            try:
                source = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: not UTF-8 text ({error})") from error
            found["default" if file.stem == "chat_template" else file.stem] = source, file
    return found
