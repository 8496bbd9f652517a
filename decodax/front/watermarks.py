"""Detection of the watermark that `generate(..., watermarking_config=...)` puts into texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decodax.common.arguments import shown
from decodax.common.registry import FUNCTIONS
from decodax.engine.result import Result
from decodax.io.load import LM
from decodax.io.prompts import read_prompts
from decodax.sampling import Detection, GreenList, build, detect


@FUNCTIONS.register("detect_watermark", "A Watermark for Large Language Models", "Kirchenbauer et al. 2023",
                    "whether a text bears a watermark of the policy")
def detect_watermark(lm: LM, texts: Any, watermarking_config: Any, *, prompts: Any = None, unique: bool = True
                     ) -> Detection:
    """Tests texts for a watermark by counting green tokens (Kirchenbauer et al., 2023).

    Args:
        lm: a result of `load`; only its vocabulary and tokenizer are used.
        texts: a result of `generate`, or texts or lists of token ids. Tokenizing a text again may give other tokens
            than were generated, which lowers the count a little.
        watermarking_config: the configuration that was given to `generate`, of either scheme ("lefthash", "selfhash").
        prompts: the text before each text. It is not scored, but it is the context of the first tokens of the text.
            None: the first tokens of the text serve as context and are not scored.
        unique: True counts a token with the same context once, since repetitions are no new evidence.

    Returns:
        For each text the z-score, its p-value, and the counts. A p-value is the probability of such a z-score in a text
        without the watermark: if many texts are tested, this share of them is wrongly detected.

    Raises:
        ValueError: an invalid configuration, a wrong number of prompts, or a text without tokens that can be scored.

    >>> import decodax as dx
    >>> lm, mark = dx.load("pycode"), {"bias": 4.0, "hashing_key": 7}
    >>> out = dx.generate(lm, "def area(", max_new_tokens=48, temperature=1.0, watermarking_config=mark)
    >>> found = dx.detect_watermark(lm, out, mark, prompts="def area(")
    >>> bool(found.p_value[0] < 1e-4), bool(dx.detect_watermark(lm, out, {"hashing_key": 8}).p_value[0] > 1e-3)
    (True, True)
    """
    ids = [texts.row(i).tolist() for i in range(len(texts))] if isinstance(texts, Result) else read_prompts(
        lm, texts, "texts")
    before: Sequence[Sequence[int]] = [[] for _ in ids]
    if prompts is not None:
        before = read_prompts(lm, prompts, "prompts")
        if not before or len(ids) % len(before):
            raise ValueError(f"prompts: got {len(before)} for {len(ids)} texts, takes one for each, or for each of its "
                             "samples")
        before = [prompt for prompt in before for _ in range(len(ids) // len(before))]
    if watermarking_config is None:
        raise ValueError(f"watermarking_config: got {shown(watermarking_config)}, takes the one that generate had")
    chain = build(len(ids), do_sample=True, vocab_size=lm.vocab_size, watermarking_config=watermarking_config)
    mark = next(t for t in chain.transforms if isinstance(t, GreenList))
    return detect(mark, [[*prompt, *text] for prompt, text in zip(before, ids, strict=True)], lm.vocab_size,
                  skip=[len(prompt) for prompt in before], unique=unique)
