"""Small tokenizers of the kinds that models come with, trained on a few lines."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n", "Héllo wörld, déjà vu! naïve café.",
          "日本語のテキスト", "emoji 🎉🦜 and more", "I don't know, it's what we've got. ' quoted ' ?"] * 4

TEXTS = ["def f(n):\n    return fib(n)", "Héllo 日本 🦜!", "  two leading spaces", "it's what we don't know.",
         "ÿ\u2581 odd \x00", "tab\tand\r\nend   "]


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False,
                                                        special_tokens=["<|endoftext|>", "<|im_start|>"]))
    tok.add_tokens([AddedToken("<think>", special=False), AddedToken("né w", special=False)])
    return tok


def sentencepiece(leading: bool = True) -> Tokenizer:
    """Llama 2, Mistral, Phi-3 (`leading`), Gemma (not): U+2581 for the space, bytes where a character is unknown."""
    tok = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    replace = normalizers.Replace(" ", "▁")
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if leading else replace
    fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tok.decoder = decoders.Sequence([*fuse, decoders.Strip(" ", 1, 0)] if leading else fuse)
    special = ["<unk>", "<s>", "</s>"]
    tok.train_from_iterator([c for c in CORPUS if c.isascii()], trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=special))
    # a trained BPE lacks the byte tokens, so they are put into its file
    data = json.loads(tok.to_str())
    vocab = data["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tok = Tokenizer.from_str(json.dumps(data))
    tok.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tok


def letters(special: str = "<|end|>") -> Tokenizer:
    """As `sentencepiece`, of letters with and without a space before them: `<s>`, `</s>` and `special` come first."""
    names = ["<s>", "</s>", special, *[f"▁{c}" for c in "abcdefgh"], *"abcdefgh", "▁"]
    tok = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[("▁", c) for c in "abcdefgh"]))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tok.add_special_tokens(["<s>", "</s>", special])
    return tok


def unigram() -> Tokenizer:
    """T5, ALBERT."""
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    tok.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=150, show_progress=False, unk_token="<unk>",
                                                            special_tokens=["<pad>", "</s>", "<unk>"]))
    return tok


def word_piece() -> Tokenizer:
    """BERT."""
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece()
    tok.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=250, show_progress=False,
                                                              special_tokens=["[PAD]", "[UNK]", "[CLS]"]))
    return tok


def word_level() -> Tokenizer:
    """No decoder at all: words joined by spaces."""
    tok = Tokenizer(models.WordLevel(unk_token="?"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.train_from_iterator(CORPUS, trainers.WordLevelTrainer(vocab_size=60, show_progress=False, special_tokens=["?"]))
    return tok


def of_words(words: str, end: str | None = None) -> Tokenizer:
    """BPE whose tokens are `words`, in the order of their ids; a longer one is made of its beginning and last letter.
    `end` is special."""
    names = words.split()
    merges = [(word[:-1], word[-1]) for word in names if len(word) > 1 and word != end]
    tok = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(names)}, merges=merges))
    tok.decoder = decoders.ByteLevel()
    if end is not None:
        tok.add_special_tokens([end])
    return tok


KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece, "gemma": lambda: sentencepiece(leading=False),
         "unigram": unigram, "word-piece": word_piece, "word-level": word_level}


def save(tok: Tokenizer, path: Path, **files: object) -> Path:
    """Writes a directory with tokenizer.json and other JSON files by stem."""
    path.mkdir(parents=True, exist_ok=True)
    tok.save(str(path / "tokenizer.json"))
    for name, data in files.items():
        (path / f"{name}.json").write_text(json.dumps(data))
    return path
