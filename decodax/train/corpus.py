"""The training data of the shipped Python models: the standard library's source, its tokenizer, and its batches.

The corpus is the `.py` files in the running interpreter's standard library directory (PSF licence), in a fixed order. A
file is held out if the SHA-256 of its path inside that directory is 0 modulo 50, so the split needs no list, is the
same on every machine, and does not change when files are added. The tokenizer is a byte-level BPE (Sennrich et al.,
2016; byte alphabet as in GPT-2): any text round-trips, because every byte is a token.

A batch is a pure function of (seed, step), so a resumed run sees the same data.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_MODULUS = 50
MAX_FILE_BYTES = 400_000

# generated tables, bundled wheels and deliberately broken files, which are useless as training text
EXCLUDED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "ensurepip", "encodings", "pydoc_data", "lib2to3", "__phello__",
     "data", "tokenizedata", "cjkencodings", "badsyntax", "lib-dynload"})
EXCLUDED_PREFIXES = ("_sysconfigdata", "test/encoded_modules", "test/bad", "test/mp_", "test/pickletester_data")

# Pre-tokenization for code. Blank lines and the indentation after them are one piece, so that "\n        " can be one
# token; an identifier (with underscores) takes the space or dot before it. Newlines never merge with punctuation before
# them: a prompt that ends in "):" must be followed by a newline token that the model has seen in that place.
PIECES = r"\s*\n[ \t]*|[ .]?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Document:
    """One source file: its path inside the standard library directory (with "/") and its text."""

    path: str
    text: str


def held_out(path: str) -> bool:
    """True if the file at `path` (inside the standard library directory, with "/") is held out of training.

    >>> held_out("argparse.py"), sum(held_out(f"{i}.py") for i in range(5000))
    (False, 92)
    """
    return int.from_bytes(hashlib.sha256(path.encode()).digest(), "big") % HELD_OUT_MODULUS == 0


def wanted(path: str) -> bool:
    """True if the file at `path` belongs to the corpus, for training or held out."""
    return not EXCLUDED_DIRECTORIES.intersection(path.split("/")[:-1]) and not path.startswith(EXCLUDED_PREFIXES)


def load_corpus(root: Path | None = None) -> tuple[list[Document], list[Document]]:
    """Reads the standard library's source.

    Args:
        root: the directory to read; None takes the running interpreter's standard library.

    Returns:
        (training, held-out) documents, each ordered by the SHA-256 of the path (a fixed shuffle). Files that are
        empty, over 400 kB, not UTF-8, or copies of another file are left out.

    Raises:
        FileNotFoundError: `root` holds no usable `.py` file.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found: list[Document] = []
    seen: set[str] = set()
    for file in sorted(_source_files(root)):
        path = file.relative_to(root).as_posix()
        if not wanted(path) or not 0 < file.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        text = text.replace("\r\n", "\n")
        if text not in seen:
            seen.add(text)
            found.append(Document(path, text))
    if not found:
        raise FileNotFoundError(f"root: {root} has no usable .py file, takes a Python standard library directory")
    found.sort(key=lambda d: hashlib.sha256(d.path.encode()).digest())
    return [d for d in found if not held_out(d.path)], [d for d in found if held_out(d.path)]


def _source_files(root: Path) -> Iterator[Path]:
    """Yields the .py files below a directory without entering excluded ones, which may be large."""
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in EXCLUDED_DIRECTORIES]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def corpus_name() -> str:
    """Returns the name of the corpus with its version and licence, for a model card."""
    return f"{platform.python_implementation()} {platform.python_version()} standard library source (PSF-2.0 licence)"


def train_tokenizer(documents: list[Document], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer with up to `vocab_size` tokens. Token 0 is `<|endoftext|>`, tokens 1 to 256 are
    the bytes, sorted by the characters that stand for them in byte-level BPE; merges follow."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator((d.text for d in documents), trainer)
    return tokenizer


def pack(tokenizer: Tokenizer, documents: list[Document]) -> np.ndarray:
    """Returns all documents as one stream `i32[N]`; `<|endoftext|>` precedes each document and ends the stream."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False)
    pieces = [np.asarray([end, *e.ids], np.int32) for e in encoded]
    return np.concatenate([*pieces, np.asarray([end], np.int32)])


@dataclass(frozen=True)
class Batches:
    """Windows of a packed stream of tokens: `Batches(stream, ...)[step]` is `i32[batch, length + 1]`, the same at every
    call.

    Each epoch cuts the stream into windows at another random offset and visits every window once, in another random
    order.

    Attributes:
        stream: `i32[N]`.
        batch: number of windows in a batch.
        length: number of predicted tokens in a window.
        seed: seed of offsets and orders.
        fixed: True if the windows of all epochs begin at multiples of `length`.
    """

    stream: np.ndarray
    batch: int
    length: int
    seed: int = 0
    fixed: bool = False

    @property
    def per_epoch(self) -> int:
        """Number of windows in one epoch."""
        return (len(self.stream) - 1) // self.length - 1

    def __post_init__(self) -> None:
        if self.per_epoch < 1:
            raise ValueError(f"stream: got {len(self.stream)} tokens, takes at least {2 * self.length + 1} for windows "
                             f"of {self.length}")

    def _starts(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        offset = 0 if self.fixed else rng.integers(self.length)
        return offset + self.length * rng.permutation(self.per_epoch)

    def starts(self, step: int) -> np.ndarray:
        """Returns the first tokens of the windows of a step, `i64[batch]`."""
        first = step * self.batch
        rows = range(first, first + self.batch)
        epochs = {e: self._starts(e) for e in range(rows[0] // self.per_epoch, rows[-1] // self.per_epoch + 1)}
        return np.asarray([epochs[row // self.per_epoch][row % self.per_epoch] for row in rows])

    def windows(self, starts: np.ndarray) -> np.ndarray:
        """Returns the windows `i32[B, length + 1]` that begin at `starts` (`i64[B]`)."""
        return self.stream[starts[:, None] + np.arange(self.length + 1)]

    def __getitem__(self, step: int) -> np.ndarray:
        return self.windows(self.starts(step))
