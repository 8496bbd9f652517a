"""AdaDec: its rule by its definition, and the tokens of the authors' code.

`adadec.json` has the tokens that SYSUSELab/AdaDec (d3c3be1, `llm/generator.py`) writes with the weights of `sharp`,
where tokens 12 and 15 are a line's end, and 4, 8, 13 and 14 are not indented.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.contrastive.adadec import AdaDec
from decodax.core import drivers
from decodax.core.stops import StopTable
from decodax.core.types import Params
from decodax.sampling import build
from tests.algorithms.contrastive.followers import following, sharp
from tests.matrix import often
from tests.small_models import PROMPTS

pytestmark = pytest.mark.wide

EXPECTED = json.loads((Path(__file__).parent / "adadec.json").read_text())
LINES = [b"\n" if t in (12, 15) else b"x" if t in (4, 8, 13, 14) else b" b" for t in range(24)]


@pytest.mark.parametrize("length", often([2], [2, 5]))
def test_tokens_are_those_of_the_authors(length: int) -> None:
    stops = StopTable.build(LINES, ("\nx", "\n\n\n\n"), 24)
    lm = sharp()
    for threshold in (0.8, 1.5, 2.2):
        cases = [c for c in EXPECTED if c[1:3] == [threshold, length]]
        alg, batch = AdaDec(threshold, 3, length, "running"), len(cases)
        policy = build(batch, vocab_size=24).replace(stops=stops)
        params = Params(lm.params, draft=alg.weights)
        tokens = np.zeros((batch, 32), np.int32)
        for i, case in enumerate(cases):
            tokens[i, :len(case[0])] = case[0]
        lengths = np.array([len(c[0]) for c in cases], np.int32)
        s = drivers.begin(alg.bare(), lm.model, params, policy, jnp.asarray(tokens), lengths, size=48,
                          max_new=np.int32(16))
        s = drivers.prefill(alg.bare(), lm.model, params, s, width=16)
        s = drivers.advance(alg.bare(), lm.model, params, policy, s, jnp.int32(200))
        made = [np.asarray(s.tokens)[i, n:int(s.length[i])].tolist() for i, n in enumerate(lengths)]
        assert made == [c[3] for c in cases]


def test_texts_are_by_the_rule() -> None:
    """Greedy below the threshold; above it the candidate with the best mean, up to the end of its chain."""
    lm, new, threshold, length, eos = sharp(), 10, 1.3, 3, [4, 13]
    out = dx.generate(lm, PROMPTS, algorithm=AdaDec(threshold, 3, length), max_new_tokens=new, eos_token_id=eos)
    looks = 0
    for i, prompt in enumerate(PROMPTS):
        text, count = list(prompt), 0
        while len(text) - len(prompt) < new and (text == prompt or text[-1] not in eos):
            log_p = following(lm, [text])[0]
            if -(np.exp(log_p) * log_p).sum() < threshold:
                text.append(int(log_p.argmax()))
                continue
            count += 1
            chains = [[int(t)] for t in np.argsort(-log_p, kind="stable")[:3]]
            sums = [log_p[c[0]] for c in chains]
            for _ in range(length):
                ends = following(lm, [text + c for c in chains])
                for j, c in enumerate(chains):
                    if c[-1] not in eos:
                        c.append(int(ends[j].argmax()))
                        sums[j] += ends[j].max()
            text.append(chains[int(np.argmax([x / len(c) for x, c in zip(sums, chains, strict=True)]))][0])
        assert out.row(i).tolist() == text[len(prompt):]
        assert out.findings["looks"][i] == count
        looks += count
    assert 3 < looks < out.lengths.sum()


def test_forwards_are_counted_and_sure_tokens_are_plain_decoding() -> None:
    options: dict[str, Any] = dict(max_new_tokens=8, eos_token_id=[])
    given = dict(options, temperature=[0.0, 0.8, 1.0])
    plain = dx.generate(sharp(), PROMPTS, **given)
    sure = dx.generate(sharp(), PROMPTS, algorithm=AdaDec(float("inf"), length=3), **given)
    assert np.array_equal(plain.tokens, sure.tokens) and sure.stats.forwards == 8
    always = dx.generate(sharp(), PROMPTS, algorithm=AdaDec(0.0, length=3), **given)
    assert always.stats.forwards == 8 * 4 and (always.findings["looks"] == 8).all()
    banned = dx.generate(sharp(), PROMPTS, algorithm=AdaDec(0.5, length=3), suppress_tokens=[12, 13, 15], **options)
    assert not {12, 13, 15} & set(banned.tokens.reshape(-1).tolist())
    with pytest.raises(ValueError, match="threshold: got -1"):
        AdaDec(-1)
