"""The tokenizer of T5 in GGUF files: SentencePiece's unigram model (Kudo, 2018), which splits a text into the tokens
whose scores have the largest sum."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import Regex, decoders, models, normalizers


def unigram(tokens: Sequence[str], scores: Sequence[float], unknown: int, charsmap: bytes, merges: bool, prefix: bool,
            in_bytes: bool) -> tokenizers.Tokenizer:
    """Returns a unigram model in which "▁" stands for a space.

    Args:
        tokens: the tokens by id.
        scores: their scores, logarithms of probabilities.
        unknown: id of what is no token.
        charsmap: SentencePiece's table of characters that are replaced; b"" if there is none.
        merges: True makes one space of several, and drops those at both ends.
        prefix: True begins each text with a space.
        in_bytes: True splits what is no token into tokens of bytes.
    """
    made = tokenizers.Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unknown, in_bytes))
    begins = prefix or merges       # a word has a space before it if spaces are merged
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if merges:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    steps += [normalizers.Prepend("▁")] if begins else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      *([decoders.Strip(" ", 1, 0)] if begins else [])])
    return made
