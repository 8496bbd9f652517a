"""The models of `docs/extending`, as a user would write them."""

import re
from typing import Any

import jax.numpy as jnp
import pytest

import decodax as dx
from decodax.core.window import causal
from tests.extending.pages import DOCS, run_file, run_page

GUIDE = DOCS / "extending" / "model.md"
PROMPTS = [[3, 1, 4], [1, 5]]


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """The guide's model, and the one of flax.nnx."""
    return [run_file(GUIDE)["lm"], run_page("models")["split"]]


@pytest.mark.wide
def test_the_guides_models_decode_as_they_score(models: list[Any]) -> None:
    """What greedy decoding with a cache made is the argmax of one window over the whole sequence."""
    for lm in models:
        out = dx.generate(lm, PROMPTS, max_new_tokens=8)
        assert out.lengths.tolist() == [8, 8]
        for prompt, tokens in zip(PROMPTS, out.tokens.tolist(), strict=True):
            whole = jnp.array([prompt + tokens])
            logits = lm.model.apply(lm.params, causal(whole, jnp.zeros(1)), lm.model.init_cache(1, 0)).logits()
            assert logits[0, len(prompt) - 1:-1].argmax(-1).tolist() == tokens


def test_the_guides_model_is_twenty_lines() -> None:
    block = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    body = block[block.index("@dataclasses"):block.index("shapes =")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20
