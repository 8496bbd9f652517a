"""Builds a tokenizer from the metadata of a GGUF file.

Five kinds are read: byte-level BPE ("gpt2"), with its merges and the name of its splitting rule; SentencePiece's BPE
("llama"), with a score for each token, which becomes a BPE whose merges are the pairs that make a token, in the order
of scores, as in transformers' conversion; Gemma 4's ("gemma4"), SentencePiece's with merges in the file;
SentencePiece's unigram model ("t5"); and the longest match of RWKV ("rwkv").
"""

from __future__ import annotations

import difflib
import itertools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from decodax.common.arguments import shown
from decodax.io.files import CheckpointError
from decodax.io.gguf.longest import TEMPLATE, WORLD, longest_match, spelled
from decodax.io.gguf.reader import GgufFile
from decodax.io.gguf.splitting import RULES
from decodax.io.gguf.unigram import unigram
from decodax.io.text import Tokenizer
from decodax.sampling.neutral import is_neutral

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
"""Numbers of types of tokens in `tokenizer.ggml.token_type`."""

ENDS = frozenset(("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
                  "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
                  "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
                  "<｜end▁of▁sentence｜>", "[e~["))
"""Texts of tokens that end an answer, as in llama.cpp. Files often name only one of those that a model uses."""

FILLING = {"fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
           "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
           "fim_sep": ("<|file_sep|>",)}
"""Texts of the tokens of models of code that begin another file or repository, by the names of their ids. They end an
answer too. A text counts only if the file does not name the id."""

NOT_ENDS = {"<|end|>": ({"<|return|>", "<|call|>"}, {"<|return|>", "<|calls|>"}, {"<|flush|>", "<|call|>"},
                        {"<|flush|>", "<|calls|>"}),
            "</s>": ({"<|tool_response>"},)}
"""Texts in `ENDS` that end no answer in the formats of chats that have all tokens of one of the sets: `<|end|>` ends a
message there, and `</s>` is a tag of HTML."""

SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
            "penalty_repeat": "repetition_penalty"}
"""Keys under `general.sampling`, and their names in a generation config."""

UNREAD = {"xtc_probability": 0, "mirostat": 0, "penalty_last_n": -1, "sequence": ""}
"""Other keys there that change a text, with the values that change nothing."""

TAKES: dict[str, tuple[type, str]] = {
    "pre": (str, "a text"), "tokens": (list, "a list of texts"), "merges": (list, "a list of texts"),
    "scores": (np.ndarray, "a list of numbers"), "token_type": (np.ndarray, "a list of numbers"),
    "precompiled_charsmap": (np.ndarray, "a list of bytes")}
"""Types of entries under `tokenizer.ggml`. Ids are whole numbers, and the others true or false."""

IDS = {"eos": 1, "unknown": 2, "padding": 0}
"""Ids of T5's special tokens in files that do not name them."""

LOG = logging.getLogger("decodax")


class Vocabulary:
    """The tokens of a file and what they are for.

    Attributes:
        file: the file.
        kind: the name of the tokenizer's kind.
        tokens: their texts by id; those of RWKV in the characters of a byte-level BPE.
        kinds: their types by id.
        ids: their ids by text.
        ends: the ids that end a text, those that the file names first.
    """

    def __init__(self, file: GgufFile):
        self.file = file
        self.kind: str = file.metadata["tokenizer.ggml.model"]
        self.tokens: list[str] = [text or f"[EMPTY_{i}]" for i, text in enumerate(self.need("tokens"))]
        given = self.get("token_type")
        self.kinds: list[int] = [NORMAL] * len(self.tokens) if given is None else given.tolist()
        if len(self.kinds) != len(self.tokens):
            raise self.error("token_type", f"got {len(self.kinds)} entries",
                             f"one for each of {len(self.tokens)} tokens")
        if self.kind == "rwkv":
            self.tokens = [spelled(text) if kind == NORMAL else text
                           for text, kind in zip(self.tokens, self.kinds, strict=True)]
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(text for i, text in enumerate(self.tokens) if self.ids[text] != i)
            raise self.error("tokens", f"got {twice!r} twice", "different texts")
        self.ends = self._ends()
        # Converters give some of these another type, by which they would be split into pieces.
        known = ENDS.union(*FILLING.values())
        for i in self.ends:
            if self.tokens[i] in known:
                self.kinds[i] = CONTROL

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the entry `tokenizer.ggml.{key}` of the file's metadata, checked for its type; `default` if there is
        none."""
        found: Any = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if found is None:
            return default
        kind, takes = TAKES.get(key) or ((int, "an id") if key.endswith("_id") else (bool, "true or false"))
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise self.error(key, f"got {shown(found)}", takes)
        if isinstance(found, list) and not all(isinstance(text, str) for text in found):
            raise self.error(key, "got entries that are no texts", takes)
        return found

    def need(self, key: str) -> Any:
        found = self.get(key)
        if found is None:
            raise CheckpointError(f"{self.file.path}: lacks tokenizer.ggml.{key}, which its tokenizer requires")
        return found

    def error(self, key: str, got: str, takes: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: tokenizer.ggml.{key}: {got}, takes {takes}")

    def id(self, name: str) -> int | None:
        """Returns the id that the file names, such as "bos", or None."""
        found = self.get(f"{name}_token_id", IDS.get(name) if self.kind == "t5" else None)
        if found is None or found == 0xFFFFFFFF:
            return None
        if not 0 <= found < len(self.tokens):
            raise self.error(f"{name}_token_id", f"got {found}", f"0 to {len(self.tokens) - 1}")
        return int(found)

    def _ends(self) -> list[int]:
        """Returns the ids that end a text, those that the file names first."""
        own = [self.id(name) for name in ("eos", "eot", "eom")]
        by_text = [i for i, text in enumerate(self.tokens) if text in ENDS]
        filling = [self.id(name) if self.get(f"{name}_token_id") is not None else
                   next((self.ids[text] for text in texts if text in self.ids), None)
                   for name, texts in FILLING.items()]
        found = list(dict.fromkeys(i for i in (*own, *by_text, *filling) if i is not None))
        texts = {self.tokens[i] for i in found}
        return [i for i in found if not any(beside <= texts for beside in NOT_ENDS.get(self.tokens[i], ()))]


def read_tokenizer(file: GgufFile) -> Tokenizer | None:
    """Returns the tokenizer of a file, or None if it has none.

    Raises:
        CheckpointError: it is of another kind than those in `KINDS`, or an entry is missing or wrong.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None or (isinstance(kind, str) and kind in ("none", "no_vocab")):
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.model: got {shown(kind)}, supported are "
                              f"{', '.join(map(repr, KINDS))}; decodax.load(..., tokenizer=) takes another tokenizer")
    v = Vocabulary(file)
    try:
        backend, begins = KINDS[kind](v)
        backend.add_tokens([AddedToken(text, special=kind != USER, normalized=False)
                            for text, kind in zip(v.tokens, v.kinds, strict=True) if kind in (UNKNOWN, CONTROL, USER)])
    except Exception as error:          # the binding raises a bare Exception
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file.path}: its tokenizer cannot be built ({error})") from error
    bos, ends, pad = v.id("bos"), v.ends, v.id("padding")
    # Files of Gemma 4 may deny their BOS; as in llama.cpp, texts begin with it all the same.
    first = v.get("add_bos_token", begins) or kind == "gemma4"
    around = [[bos] if first and bos is not None else [],
              [ends[0]] if v.get("add_eos_token", kind == "t5") and ends else []]
    if around != [[], []]:
        special = {v.tokens[i]: i for i in itertools.chain(*around)}
        spelled = [[text for text, i in special.items() if i in ids] for ids in around]
        backend.post_processor = processors.TemplateProcessing(
            single=[*spelled[0], "$A", *spelled[1]], pair=[*spelled[0], "$A", "$B", *spelled[1]],
            special_tokens=list(special.items()))
    named = {"bos_token": bos, "eos_token": v.id("eos"), "pad_token": pad, "unk_token": v.id("unknown"),
             "sep_token": v.id("seperator"), "mask_token": v.id("mask")}      # spelled so in files
    templates = _templates(file.metadata)
    return Tokenizer(backend, bos_id=bos, eos_ids=ends, pad_id=pad,
                     special_tokens={name: v.tokens[i] for name, i in named.items() if i is not None},
                     chat_templates=templates, template_files=dict.fromkeys(templates, str(file.path)))


def read_generation(file: GgufFile, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the entries of a generation config: special ids and the recommended sampling.

    A file has no entry that says whether to sample. It does unless its temperature is 0 if it recommends a temperature
    or a truncation. Recommendations that a generation config has no entry for are named in a warning.
    """
    given = {key: file.metadata.get(f"general.sampling.{key}") for key in (*SAMPLING, *UNREAD)}
    found: dict[str, Any] = {}
    for key, name in SAMPLING.items():
        value = given[key]
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise CheckpointError(f"{file.path}: general.sampling.{key}: got {value!r}, takes a number")
        if value is not None:
            found[name] = float(f"{value:.7g}") if isinstance(value, float) else value
    if "temperature" in found and found["temperature"] <= 0:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"} | {"do_sample": False}
    elif any(not is_neutral(name, value) for name, value in found.items() if name != "repetition_penalty"):
        found["do_sample"] = True
    unread = {key: given[key] for key, neutral in UNREAD.items()
              if isinstance(given[key], int | float | str) and given[key] != neutral}
    if "repetition_penalty" not in found:
        unread.pop("penalty_last_n", None)
    if unread:
        LOG.warning("%s: recommended sampling that is not applied: %s", file.path,
                    ", ".join(f"{key}={value!r}" for key, value in unread.items()))
    if tokenizer is not None:
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids) or None,
               "pad_token_id": tokenizer.pad_id}
        found |= {name: value for name, value in ids.items() if value is not None}
    return found


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name."""
    key = "tokenizer.chat_template"
    found = {"default": metadata[key]} if isinstance(metadata.get(key), str) else {}
    found = {name: TEMPLATE if text == WORLD else text for name, text in found.items()}
    return found | {name.removeprefix(f"{key}."): text for name, text in metadata.items()
                    if name.startswith(f"{key}.") and isinstance(text, str)}


def _byte_level(v: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a byte-level BPE, and True if texts begin with BOS by default."""
    name = v.get("pre")
    if name is None:
        LOG.warning("%s: has no tokenizer.ggml.pre, the rule by which its tokenizer splits texts; takes the default of "
                    "llama.cpp", v.file.path)
        name = "default"
    if name not in RULES:
        near = difflib.get_close_matches(str(name), RULES, n=3, cutoff=0.4)
        raise v.error("pre", f"got {name!r}{', near to ' + ', '.join(near) if near else ''}", ", ".join(sorted(RULES)))
    rule = RULES[name]
    made = tokenizers.Tokenizer(models.BPE(v.ids, _merges(v), ignore_merges=rule.whole))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    return made, rule.begins


def _sentence_piece(v: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns SentencePiece's BPE, and True: texts begin with BOS by default."""
    return _spaced(v, _scored(v, _scores(v)), bool(v.get("add_space_prefix", True))), True


def _gemma4(v: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns the BPE of Gemma 4, and True."""
    return _spaced(v, _merges(v), bool(v.get("add_space_prefix", False))), True


def _unigram(v: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns the unigram model of T5, and False."""
    unknown, charsmap = v.id("unknown"), v.get("precompiled_charsmap")
    if unknown is None:
        raise v.error("unknown_token_id", "got none", "an id")
    return unigram(v.tokens, _scores(v), unknown, b"" if charsmap is None else charsmap.astype(np.uint8).tobytes(),
                   v.get("remove_extra_whitespaces", False), v.get("add_space_prefix", False), BYTE in v.kinds), False


def _longest(v: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns the longest match of RWKV, and False."""
    return longest_match(v.ids, [text for text, kind in zip(v.tokens, v.kinds, strict=True) if kind == NORMAL]), False


def _scores(v: Vocabulary) -> list[float]:
    """Returns the score of each token."""
    scores = v.need("scores")
    if len(scores) != len(v.tokens):
        raise v.error("scores", f"got {len(scores)} entries", f"one for each of {len(v.tokens)} tokens")
    found: list[float] = scores.tolist()
    return found


def _spaced(v: Vocabulary, merges: list[tuple[str, str]], prefix: bool) -> tokenizers.Tokenizer:
    """Returns a BPE over characters in which "▁" stands for a space, with bytes for what is no token; texts begin with
    a space if `prefix`."""
    unknown = v.id("unknown")
    made = tokenizers.Tokenizer(models.BPE(
        v.ids, merges, unk_token=None if unknown is None else v.tokens[unknown], fuse_unk=True,
        byte_fallback=BYTE in v.kinds))
    made.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if prefix else []),
                                            normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return made


def _merges(v: Vocabulary) -> list[tuple[str, str]]:
    """Returns the merges of the file whose tokens it has."""
    pairs = [(line[:at], line[at + 1:]) for line in v.need("merges") if (at := line.find(" ", 1)) > 0]
    return [(a, b) for a, b in pairs if a in v.ids and b in v.ids and a + b in v.ids]


def _scored(v: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that make a token, those of the best score first."""
    ids, found = v.ids, []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
        text = v.tokens[i]
        if len(text) > 1 and v.kinds[i] not in (UNKNOWN, CONTROL, BYTE):
            found += [(left, text[at:]) for at in range(1, len(text))
                      if (left := text[:at]) in ids and text[at:] in ids]
    return found


KINDS = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _gemma4, "rwkv": _longest, "t5": _unigram}
"""Makers of tokenizers by the names in `tokenizer.ggml.model`."""
