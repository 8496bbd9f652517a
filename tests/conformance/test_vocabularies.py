"""Draft models with another vocabulary against transformers: the same tokens, in the same number of forwards.

`vocabularies/NAME.json` is as `cases/`. Every token is a byte, and the draft model is a checkpoint under other ids:
`order` is the draft model's id of each of the target's tokens.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import decodax as dx
from decodax.io.text import Tokenizer
from tests.conformance.checkpoints import VOCABULARY, digest
from tests.conformance.loading import loaded

FILES = {f.stem: json.loads(f.read_text()) for f in sorted((Path(__file__).parent / "vocabularies").glob("*.json"))}
# 94 visible characters and three controls, by their names in a byte-level vocabulary; no blank, which tidying moves
BYTES = [*map(chr, range(33, 127)), *(chr(256 + byte) for byte in (9, 10, 13))]
assert len(BYTES) == VOCABULARY


def tokenizer(order: list[int]) -> tokenizers.Tokenizer:
    """One token a byte, the i-th with id `order[i]`."""
    tok = tokenizers.Tokenizer(models.BPE(vocab={name: order[i] for i, name in enumerate(BYTES)}, merges=[]))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tok


@pytest.mark.wide
@pytest.mark.parametrize(("name", "case"), [
    pytest.param(name, case, id=f"{name}-{i}", marks=[pytest.mark.full] if i else [])
    for name, data in FILES.items() for i, case in enumerate(data["cases"])])
def test_drafts_of_another_vocabulary_are_the_authors(name: str, case: dict[str, Any], directory: Path) -> None:
    data = FILES[name]
    assert digest(data["model"]) == data["digest"]
    target, draft, order = loaded(data["model"], directory), loaded(case["draft"], directory), case["order"]
    ids = np.argsort(order)
    params = {**draft.params, "embed": draft.params["embed"][ids],
              "lm_head": {"kernel": draft.params["lm_head"]["kernel"][:, ids]}}
    target = dataclasses.replace(target, tokenizer=Tokenizer(tokenizer(list(range(VOCABULARY)))))
    draft = dataclasses.replace(draft, params=params, tokenizer=Tokenizer(tokenizer(order)))
    algorithm = dx.algorithms.make(data["system"], target, draft, **case["options"])
    out = dx.generate(target, case["prompts"], algorithm=algorithm, **case["generate"])
    assert [out.row(i).tolist() for i in range(len(out))] == case["tokens"]
    assert out.stats.rounds.tolist() == case.get("forwards_here", case["forwards"])
