"""The models of `docs/extending/model.md`, as a user would write them."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from decodax.core.window import causal

GUIDE = Path(__file__).parents[2] / "docs" / "extending" / "model.md"


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """The guide's names after each of its code blocks."""
    names: dict[str, Any] = {"__name__": __name__}
    after = []
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(block, str(GUIDE), "exec", dont_inherit=True), names)
        after.append(dict(names))
    return after


@pytest.mark.wide
def test_the_guides_models_generate(runs: list[dict[str, Any]]) -> None:
    for names in runs:
        assert names["out"].lengths.tolist() == [8, 8]


@pytest.mark.wide
def test_the_guides_models_decode_as_they_score(runs: list[dict[str, Any]]) -> None:
    """What greedy decoding with a cache made is the argmax of one window over the whole sequence."""
    plain, wrapped = (names["lm"] for names in runs)
    out = runs[0]["dx"].generate(plain, [[3, 1, 4], [1, 5]], max_new_tokens=8)
    for lm, result in ((plain, out), (wrapped, runs[1]["out"])):
        for prompt, tokens in zip([[3, 1, 4], [1, 5]], result.tokens.tolist(), strict=True):
            whole = jnp.array([prompt + tokens])
            logits = lm.model.apply(lm.params, causal(whole, jnp.zeros(1)), lm.model.init_cache(1, 0)).logits()
            assert logits[0, len(prompt) - 1:-1].argmax(-1).tolist() == tokens


def test_the_guides_model_is_twenty_lines() -> None:
    block = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    body = block[block.index("@dataclasses"):block.index("shapes =")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20
