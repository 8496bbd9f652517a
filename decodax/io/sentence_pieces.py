"""Tokenizers of SentencePiece files (Kudo and Richardson, 2018) whose ids are in a separate vocabulary: Marian, with a
file for each side, and M2M-100.

SentencePiece divides a text into pieces, and `vocab.json` has their ids; a piece without one is unknown. For M2M-100
the tokens of languages have the ids after the vocabulary; for Marian `>>fra<<` at the beginning of a text is a piece.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from decodax.common.arguments import is_whole, shown
from decodax.io.added_tokens import special_tokens
from decodax.io.files import CheckpointError, read_json, read_object
from decodax.io.text import Tokenizer

LANGUAGES = {
    "m2m100": "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr "
              "ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or "
              "pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu",
    "wmt21": "en ha is ja cs ru zh de"}
"""Languages in the order of the ids of their tokens, by the entry `language_codes` of tokenizer_config.json."""

CONFIG = "tokenizer_config.json"
MARIAN = ("source.spm", "target.spm", "vocab.json")
M2M = ("sentencepiece.bpe.model", "vocab.json")

NEEDS = "sentencepiece"
"""The package that divides texts, and the extra that installs it."""


def has_pieces(path: Path) -> bool:
    """Returns True if a directory has all files of such a tokenizer."""
    return any(all((path / name).is_file() for name in names) for names in (MARIAN, M2M))


def installed() -> bool:
    """Returns True if the package that divides texts is installed."""
    return importlib.util.find_spec(NEEDS) is not None


class PieceTokenizer(Tokenizer):
    """A tokenizer that divides texts by a SentencePiece model and has ids of its own for the pieces.

    Args:
        files: the files that it was made from, which `save` copies.
        model: the SentencePiece model among them.
        vocab: ids of pieces and special tokens.
        special: special tokens by name, "unk_token" and "eos_token" among them. Within texts, too, they are tokens.
        languages: further special tokens.
        prefix: ids before a text for the encoder; the end of sequence comes after it.
        coded: True if `>>fra<<` at the beginning of a text is a piece.
        source: the tokenizer of texts for the encoder; None: this one.

    Raises:
        CheckpointError: the model cannot be read, or the vocabulary lacks a special token.
    """

    def __init__(self, files: Sequence[Path], model: Path, vocab: Mapping[str, int], special: Mapping[str, str],
                 languages: Sequence[str] = (), prefix: Sequence[int] = (), coded: bool = False,
                 source: Tokenizer | None = None):
        import sentencepiece

        for name, text in special.items():
            if text not in vocab:
                raise CheckpointError(f"{files[-1]}: lacks {text!r}, which is the {name}")
        self._files, self._vocab, self._prefix = tuple(files), dict(vocab), tuple(prefix)
        self._coded = coded
        self._unknown, end = vocab[special["unk_token"]], vocab[special["eos_token"]]
        self._suffix = (end,)
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromFile(str(model))
        except (RuntimeError, OSError) as error:
            raise CheckpointError(f"{model}: takes a SentencePiece model ({error})") from error
        whole = sorted({*special.values(), *languages}, key=len, reverse=True)
        self._whole = re.compile(f"({'|'.join(map(re.escape, whole))})")
        backend = tokenizers.Tokenizer(models.WordLevel(dict(vocab), special["unk_token"]))
        backend.add_special_tokens(whole)
        backend.decoder = decoders.Metaspace("▁", prepend_scheme="always")
        id_of = lambda name: vocab.get(special.get(name, ""))
        super().__init__(backend, bos_id=id_of("bos_token"), eos_ids=(end,), pad_id=id_of("pad_token"),
                         special_tokens=special, directory=model.parent, source=source)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text; see `Tokenizer.encode`. Characters without a piece are unknown tokens."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text: got {text[error.start:error.end]!r} at position {error.start}, takes Unicode "
                             "characters (this is half of a surrogate pair)") from None
        ids: list[int] = []
        for i, part in enumerate(self._whole.split(text)):
            ids += [self._vocab[part]] if i % 2 else self._pieces_of(part)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def _pieces_of(self, text: str) -> list[int]:
        code = re.match(r">>.*?<<", text, re.DOTALL) if self._coded else None
        first = [] if code is None else [code[0]]
        found = self._processor.EncodeAsPieces(text[len(first[0]):] if first else text)
        return [self._vocab.get(piece, self._unknown) for piece in (*first, *found)]

    def save(self, path: str | Path) -> None:
        """Copies its files into a directory."""
        for file in self._files:
            if file.is_file() and file.parent.resolve() != Path(path).resolve():
                shutil.copy(file, path)


def read_pieces(path: Path) -> Tokenizer:
    """Returns the tokenizer of a directory for which `has_pieces` is True.

    Raises:
        CheckpointError: a file has invalid content, or an entry changes the tokenizer and is not supported.
    """
    config = read_object(path / CONFIG)
    if config.get("sp_model_kwargs"):
        raise CheckpointError(f"{path / CONFIG}: sp_model_kwargs: got {shown(config['sp_model_kwargs'])}, takes none")
    named = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    named |= {name: token.content for name, token in special_tokens(path, config).items()}
    marian = all((path / name).is_file() for name in MARIAN)
    return _marian(path, config, named) if marian else _m2m(path, config, named)


def _marian(path: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> Tokenizer:
    separate = config.get("separate_vocabs", False)
    if not isinstance(separate, bool):
        raise CheckpointError(f"{path / CONFIG}: separate_vocabs: got {shown(separate)}, takes true or false")
    own = path / "vocab.json"
    other = path / "target_vocab.json" if separate else own
    files = [path / CONFIG, path / "special_tokens_map.json", path / "source.spm", path / "target.spm", own, other]
    source = PieceTokenizer(files[:-1], path / "source.spm", _ids(own), special, coded=True)
    return PieceTokenizer(files, path / "target.spm", _ids(other), special, coded=True, source=source)


def _m2m(path: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> Tokenizer:
    kind, spoken = config.get("language_codes", "m2m100"), config.get("src_lang")
    if kind not in LANGUAGES:
        raise CheckpointError(f"{path / CONFIG}: language_codes: got {shown(kind)}, takes {' or '.join(LANGUAGES)}")
    vocab, codes = _ids(path / "vocab.json"), LANGUAGES[kind].split()
    spoken = "en" if spoken is None else spoken
    if spoken not in codes:
        raise CheckpointError(f"{path / CONFIG}: src_lang: got {shown(spoken)}, takes one of {', '.join(codes)}")
    languages = {f"__{code}__": len(vocab) + i for i, code in enumerate(codes)}
    files = [path / CONFIG, path / "special_tokens_map.json", path / "sentencepiece.bpe.model", path / "vocab.json"]
    special = {"bos_token": "<s>", "sep_token": "</s>", **special}
    return PieceTokenizer(files, path / "sentencepiece.bpe.model", {**vocab, **languages}, special, tuple(languages),
                          prefix=[languages[f"__{spoken}__"]])


def _ids(path: Path) -> dict[str, int]:
    """Returns a vocabulary: ids by piece."""
    found = read_json(path)
    if not found or not all(is_whole(i) and i >= 0 for i in found.values()):
        raise CheckpointError(f"{path}: takes an object with the id of each piece")
    return found
