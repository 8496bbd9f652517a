"""Soft prompts: models that read embeddings beside the ids of a prompt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.models import Embeddings
from tests.models.small import NEW, PROMPTS, attention, tokens_of

pytestmark = pytest.mark.wide

LOOKUP = dx.Speculative(dx.drafts.PromptLookup(length=4))
TREE = dx.trees.Fixed.balanced(2, 2)

SOFT = [[5, 9, 2, 6, 5, 3], [8, 9, 7]]


def embeddings(values: list[np.ndarray]) -> Embeddings:
    """Embeddings at the first places of each row, of different numbers."""
    most = max(map(len, values))
    padded = np.stack([np.pad(np.asarray(row, np.float32), ((0, most - len(row)), (0, 0))) for row in values])
    return Embeddings(values=padded, given=np.arange(most) < np.array([[len(row)] for row in values]))


@pytest.mark.full
def test_the_models_own_embeddings_give_the_results_of_their_ids() -> None:
    """In samples, batches, prompt chunks, behind drafts and in trees."""
    lm = attention()
    soft = embeddings([np.asarray(lm.params["embed"])[row] for row in SOFT])
    ids = [[*row, *PROMPTS[0][:4 + i]] for i, row in enumerate(SOFT)]
    blank = [[63] * len(row) + PROMPTS[0][:4 + i] for i, row in enumerate(SOFT)]
    tree = dx.Speculative(dx.drafts.DraftModel(lm), shape=TREE)
    policy: dict[str, Any] = dict(temperature=[0.0, 1.0], seed=3, num_samples=2)
    want = tokens_of(lm, ids, **policy)
    assert tokens_of(lm, blank, **policy) != want
    more: dict[str, Any]
    for more in ({"batch_size": 1}, {"algorithm": LOOKUP, "chunk": 2}, {"algorithm": tree}, {}):
        assert tokens_of(lm, blank, inputs=soft, **policy, **more) == want
    # a prompt may be soft to its end
    whole = [row[:len(values)] for row, values in zip(blank, SOFT, strict=True)]
    assert tokens_of(lm, whole, inputs=soft, **policy) == tokens_of(lm, SOFT, **policy)


@pytest.mark.parametrize("alg", [None, pytest.param(LOOKUP, marks=pytest.mark.full)], ids=["plain", "lookup"])
def test_a_soft_prompt_equals_transformers_inputs_embeds(tmp_path: Path, alg: Any) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.models.tiny import saved

    reference = saved("llama", tmp_path)
    reference.generation_config.eos_token_id = None
    lm = dx.load(tmp_path)
    r = np.random.default_rng(0)
    soft, ids = [r.normal(0, 0.4, (n, 32)).astype(np.float32) for n in (5, 2)], [[4, 5, 6], [7]]
    want = []
    for values, own in zip(soft, ids, strict=True):
        rest = reference.get_input_embeddings()(torch.tensor([own]))
        whole = torch.cat([torch.tensor(values)[None], rest], 1)
        want.append(reference.generate(inputs_embeds=whole, attention_mask=torch.ones(whole.shape[:2]).long(),
                                       max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist())
    prompts = [[0] * len(values) + own for values, own in zip(soft, ids, strict=True)]
    assert tokens_of(lm, prompts, inputs=embeddings(soft), algorithm=alg, eos_token_id=[]) == want
    assert tokens_of(lm, prompts, eos_token_id=[]) != want


def test_inputs_that_a_model_does_not_take_are_refused_by_name() -> None:
    soft = Embeddings(values=np.zeros((2, 3, 16), np.float32), given=np.ones((2, 3), bool))
    with pytest.raises(ValueError, match="inputs: got an array, takes Embeddings or AdapterRows"):
        tokens_of(attention(), PROMPTS[:2], inputs=soft.values)
    wide = soft.replace(values=np.zeros((2, 3, 8), np.float32))
    with pytest.raises(ValueError, match=r"inputs: got embeddings of width 8, takes 16"):
        tokens_of(attention(), PROMPTS[:2], inputs=wide)
