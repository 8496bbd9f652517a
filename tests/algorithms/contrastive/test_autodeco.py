"""AutoDeco's heads: figures of the authors' code, and draws by their definition."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.contrastive.autodeco import COLDEST, Heads, autodeco, losses
from tests.algorithms.contrastive.followers import following, sharp
from tests.small_models import PROMPTS

pytestmark = pytest.mark.wide

D, V = 6, 11
# what the heads and the losses of Zacks917/AutoDeco (6e347ba, `model/templlm_auto.py`) give for `tensors` and `text`,
# without the positions that are left out at random
TEMPERATURE = [[1.906139, 0.714415, 0.994366, 0.868363, 1.798059, 0.823314, 1.095559],
               [0.77917, 1.056778, 1.096755, 1.810562, 1.59802, 1.36828, 0.187826]]
TOP_P = [[0.629007, 0.97059, 0.13051, 0.674615, 0.357983, 0.991224, 0.96172],
         [0.984556, 0.918152, 0.32925, 0.947887, 0.818521, 0.975502, 0.991953]]
LOSSES = 0.08090091, 0.12318534


def numbers(seed: int, shape: tuple[int, ...], scale: float) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def tensors(width: int = D) -> dict[str, np.ndarray]:
    out = {}
    for i, (name, size) in enumerate((("temp_head", width), ("top_p_head", width + 5))):
        parts = (("0.weight", (256, size), 0.4), ("0.bias", (256,), 0.3), ("2.weight", (1, 256), 0.15),
                 ("2.bias", (1,), 0.3))
        for j, (part, shape, scale) in enumerate(parts):
            out[f"{name}.mlp.{part}"] = numbers(10 * i + j, shape, scale)
    return out


def text() -> tuple[Any, Any, Any]:
    labels = np.random.default_rng(52).integers(0, V, (2, 7))
    labels[0, 3] = -100
    return numbers(50, (2, 7, D), 1.0), numbers(51, (2, 7, V), 2.0), jnp.asarray(labels)


def test_heads_and_losses_are_those_of_the_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, (hidden, logits, labels) = Heads.of(tensors()), text()
    temperature, top_p = jax.jit(lambda h, x: heads(h, x))(hidden, logits)
    np.testing.assert_allclose(temperature, TEMPERATURE, atol=3e-6)
    np.testing.assert_allclose(top_p, TOP_P, atol=3e-6)
    hidden, logits, labels = hidden[:, :-1], logits[:, :-1], labels[:, 1:]      # they shift them there
    assert (np.argmax(logits, -1) == np.asarray(labels)).any()
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.ones(shape))
    np.testing.assert_allclose(losses(heads, hidden, logits, labels, jax.random.key(0)), LOSSES, rtol=1e-5)
    monkeypatch.undo()
    left_out = [float(losses(heads, hidden, logits, labels, jax.random.key(i))[0]) for i in range(4)]
    assert len(set(left_out)) > 1
    with pytest.raises(ValueError, match=r"no 'temp_head\.mlp\.0\.weight' among 1 tensors"):
        Heads.of({"x": 1})


@functools.cache
def model() -> dx.LM:
    return autodeco(sharp(), tensors(16))


def test_draws_are_by_temperature_and_top_p_of_each_position() -> None:
    """The share of each first token, against the definition; 4,000 draws, false alarm 1e-4 a prompt."""
    from scipy.stats import chi2

    lm, n = model(), 4000
    for prompt in PROMPTS[:2]:
        out = dx.generate(lm, [prompt], num_samples=n, temperature=1.0, max_new_tokens=1, eos_token_id=[])
        hidden, logits = _read(sharp(), prompt)
        t, p = (float(x) for x in lm.params[1](hidden, logits))
        q = np.exp(np.asarray(logits, np.float64) / max(t, COLDEST) - np.max(logits / max(t, COLDEST)))
        q /= q.sum()
        order = np.argsort(-q, kind="stable")
        kept = order[:int((np.cumsum(q[order]) < p).sum()) + 1]
        q = np.where(np.isin(np.arange(24), kept), q, 0) / q[kept].sum()
        counts = np.bincount(out.tokens[:, 0], minlength=24)
        assert counts[q == 0].sum() == 0 and 0 < len(kept) < 24
        often = q * n > 4
        rest = max(q[~often].sum() * n, 1e-9)
        statistic = ((counts - q * n)[often] ** 2 / (q * n)[often]).sum()
        statistic += (counts[~often].sum() - rest) ** 2 / max(rest, 1.0)
        assert chi2.sf(statistic, max(often.sum() - 1, 1)) > 1e-4


def _read(lm: dx.LM, prompt: list[int]) -> tuple[Any, Any]:
    from decodax.core.window import causal

    tokens = jnp.asarray([prompt], jnp.int32)
    out = lm.model.apply(lm.params, causal(tokens, jnp.zeros(1, jnp.int32)), lm.model.init_cache(1, 16))
    return out.hidden[0, -1], out.logits()[0, -1]


def test_drafts_change_nothing_and_greedy_rows_are_the_models_own() -> None:
    options: dict[str, Any] = dict(max_new_tokens=12, temperature=[0.0, 1.0, 1.0])
    plain = dx.generate(model(), PROMPTS, **options)
    drafted = dx.generate(model(), PROMPTS, algorithm="prompt-lookup:length=4", **options)
    assert np.array_equal(plain.tokens, drafted.tokens)
    own = dx.generate(sharp(), PROMPTS[:1], max_new_tokens=12)
    assert plain.row(0).tolist() == own.row(0).tolist()
    assert following(sharp(), [[*PROMPTS[0], *own.row(0)[:3].tolist()]]).argmax() == own.row(0)[3]


def test_training_makes_the_losses_smaller() -> None:
    import optax

    hidden, logits, labels = text()     # behind each position stands any token
    heads, adam = Heads.init(jax.random.key(1), D), optax.adam(1e-2)

    @jax.jit
    def step(heads: Heads, state: Any, key: Any) -> Any:
        value, slope = jax.value_and_grad(lambda h: sum(losses(h, hidden, logits, labels, key)))(heads)
        update, state = adam.update(slope, state)
        return optax.apply_updates(heads, update), state, value

    state, values = adam.init(heads), []
    for i in range(60):
        heads, state, value = step(heads, state, jax.random.key(i))
        values.append(float(value))
    assert np.mean(values[-10:]) < 0.8 * np.mean(values[:10])
    assert dataclasses.is_dataclass(heads)
