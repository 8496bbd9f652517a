"""A recurrent model fits without an edit of the core: the example of `docs/extending`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.window import Window, causal
from tests.extending.pages import run_page
from tests.models.small import POLICY, PROMPTS, attention, score, shapes_in, tokens_of

pytestmark = pytest.mark.wide      # the guide runs as it stands

VOCABULARY = 64
LOOKUP = dx.Speculative(dx.drafts.PromptLookup(length=4))
TREE = dx.trees.Fixed.balanced(2, 2)


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """The names of the examples."""
    return run_page("models")


@pytest.fixture(scope="module")
def recurrent(guide: dict[str, Any]) -> Any:
    return guide["recurrent"]


def texts(prompts: list[list[int]], new: list[list[int]]) -> Window:
    """Whole texts side by side; what stands behind the shorter ones is seen by nobody that counts."""
    whole = [prompt + more for prompt, more in zip(prompts, new, strict=True)]
    width = max(map(len, whole))
    return causal(np.array([row + [0] * (width - len(row)) for row in whole]), jnp.zeros(len(whole), jnp.int32))


def test_the_guide_runs(guide: dict[str, Any]) -> None:
    assert guide["plain"].lengths.tolist() == [12, 12]
    assert guide["out"].lengths.tolist() == [8, 8]


# A recurrent model


def loop(lm: Any, text: list[int]) -> np.ndarray:
    """The gated delta net as its authors write it, one token after the other, in float64: logits `[T, V]`."""
    model, params = lm.model, jax.tree.map(lambda x: np.asarray(x, np.float64), lm.params)
    states = np.zeros((model.layers, model.heads, model.width, model.width))
    made = []
    for token in text:
        x = params["embed"][token]
        for S, p in zip(states, params["layers"], strict=True):
            y = x / np.sqrt(np.mean(x * x) + 1e-6)
            gates = 1 / (1 + np.exp(-(y @ p["gates"] + 1)))
            read = []
            for h in range(model.heads):
                own = slice(h * model.width, (h + 1) * model.width)
                q, k, v = ((y @ p[name])[own] for name in "qkv")
                q, k = q / np.linalg.norm(q), k / np.linalg.norm(k)
                S[h] = gates[h] * (S[h] - gates[model.heads + h] * np.outer(k, k @ S[h])) + gates[
                    model.heads + h] * np.outer(k, v)
                read.append(q @ S[h])
            x = x + np.concatenate(read) @ p["o"]
        made.append(x @ params["embed"].T)
    return np.array(made)


def test_a_recurrent_model_decodes_as_a_loop_over_its_whole_text(recurrent: Any) -> None:
    """Ragged prompts, in chunks and whole."""
    whole = tokens_of(recurrent, **POLICY)
    logits = score(recurrent.model, recurrent.params, texts(PROMPTS, whole))
    for i, (prompt, new) in enumerate(zip(PROMPTS, whole, strict=True)):
        want = loop(recurrent, prompt + new)
        np.testing.assert_allclose(logits[i, :len(want)], want, atol=1e-4)
        if not POLICY["temperature"][i]:
            assert want[len(prompt) - 1:-1].argmax(-1).tolist() == new
    assert len({tuple(row) for row in whole}) == len(PROMPTS)       # the texts differ
    assert tokens_of(recurrent, chunk=4, **POLICY) == whole


def test_a_prefill_holds_one_state_a_layer(recurrent: Any) -> None:
    model = recurrent.model
    state = (model.heads, model.width, model.width)

    def largest(is_prefill: bool) -> int:
        """The most states of a layer that any array of the program holds for a row."""
        def prefill(tokens: Any) -> Any:
            window = causal(tokens, jnp.zeros(2, jnp.int32)).replace(is_prefill=is_prefill)
            cache = model.init_cache(2, 512)
            out = model.apply(recurrent.params, window, cache)
            return cache.commit(out.entries, window.positions)

        found = list(shapes_in(jax.make_jaxpr(prefill)(jnp.zeros((2, 256), jnp.int32)).jaxpr))
        return max(int(np.prod(shape)) for shape in found if shape[-3:] == state) // (2 * int(np.prod(state)))

    assert largest(is_prefill=True) == 1
    assert largest(is_prefill=False) == 256          # as any other window: the claim above can fail


def test_methods_that_cut_back_or_rewrite_and_inputs_are_refused_by_name(recurrent: Any) -> None:
    with pytest.raises(ValueError, match="inputs: DeltaNet takes none"):
        tokens_of(recurrent, inputs=np.zeros((4, 1)))
    with pytest.raises(ValueError, match="model: got DeltaNet, takes a Transformer, whose layers run one by one"):
        dx.drafts.CLaSp(skips=1).for_target(recurrent)
    with pytest.raises(ValueError, match=r"cache: Speculative\(CLaSp\) needs one that supports truncation, which "
                                         "Recurrent does not"):
        tokens_of(recurrent, algorithm=dx.Speculative(dx.drafts.CLaSp(skips=1).for_target(attention())))
    from decodax.algorithms.diffusion import Adapter, Blocks, DualCache, MaskedDiffusion
    from decodax.models import Diffusion

    fills = dataclasses.replace(recurrent, diffusion=Diffusion(mask=63))
    alg = MaskedDiffusion(Adapter(63), Blocks(4), caching=DualCache())
    with pytest.raises(ValueError, match=r"cache: MaskedDiffusion needs one that supports .*rewrites.*, which "
                                         "Recurrent does not"):
        tokens_of(fills, algorithm=alg)
