"""The beam search and the particle filter of docs/extending/examples, against enumeration and transformers."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import decodax as dx
from decodax.core import keys
from decodax.core.keys import Purpose, addresses
from decodax.io.saving import save_model
from decodax.sampling.draw import draw
from tests.algorithms.beams.small import SMALL, log_probs, small
from tests.algorithms.speculative.drafting import toys_logits
from tests.extending.pages import run_page
from tests.laws.cases import VOCABULARY, model, start

NEW = 5
PROMPTS = [[1, 3, 4], [5], [0, 3, 3, 1, 5, 4]]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run_page("search")


# beam search

@pytest.mark.full
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_beams_wide_enough_find_the_best_of_all_texts(page: dict[str, Any], length_penalty: float) -> None:
    # at no step have more than 750 candidates ended, of 5 ** 4 live beams at most
    width, returns, given = 750, 20, PROMPTS[:2]
    found = page["beam_search"](small(), given, width, returns, length_penalty, "never", max_new_tokens=NEW)
    for prompt, ours in zip(given, found, strict=True):
        score = {text: own.sum() / len(text) ** length_penalty for text, own in log_probs(tuple(prompt), NEW).items()}
        best = sorted(score, key=score.__getitem__, reverse=True)[:returns]
        assert [tuple(text) for text, _ in ours] == best
        np.testing.assert_allclose([x for _, x in ours], [score[text] for text in best], rtol=1e-4)
        assert len({len(text) for text in best}) > 1                # some end before the last token


@functools.cache
def theirs(directory: Path) -> Any:
    network, weights = model("llama")
    save_model(directory, network, weights)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.wide
@pytest.mark.parametrize("options", [
    dict(width=4, returns=4, eos_token_id=[4, 13]),
    dict(width=3, returns=2, eos_token_id=[4, 13], length_penalty=0.3, early_stopping=True, bad_words_ids=[[12]]),
    dict(width=2, returns=2, eos_token_id=[12], length_penalty=-1.0, early_stopping="never", min_new_tokens=3)],
    ids=["plain", "first-come-and-a-ban", "never-and-a-minimum"])
def test_beams_are_those_of_transformers(page: dict[str, Any], tmp_path_factory: pytest.TempPathFactory,
                                         options: dict[str, Any]) -> None:
    given, eos, network = page["prompts"], options["eos_token_id"], theirs(tmp_path_factory.getbasetemp() / "beams")
    ours = page["beam_search"](page["lm"], given, max_new_tokens=9, **options)
    options = {**options, "num_beams": options["width"], "num_return_sequences": options["returns"]}
    del options["width"], options["returns"]
    ended = 0
    for prompt, found in zip(given, ours, strict=True):
        ids = torch.tensor([prompt])
        out = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, pad_token_id=4,
                               do_sample=False, return_dict_in_generate=True, output_scores=True, **options)
        expected = []
        for row in out.sequences[:, len(prompt):].tolist():
            length = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
            expected.append(row[:length])
            ended += length < 9
        assert [text for text, _ in found] == expected
        np.testing.assert_allclose([score for _, score in found], out.sequences_scores.tolist(), rtol=1e-4)
    assert ended > 0


@pytest.mark.wide
def test_a_beam_without_a_text_says_so(page: dict[str, Any]) -> None:
    width = 8
    alg = page["Beams"](width)
    out = dx.generate(small(), PROMPTS, algorithm=alg, max_new_tokens=1)
    for first in range(0, len(out), 2 * width):
        pool = range(first, first + width)
        assert sorted(out.row(i).tolist() for i in pool[:SMALL]) == [[token] for token in range(SMALL)]
        assert [out.status[i] for i in pool[SMALL:]] == [dx.Status.DEAD_END] * (width - SMALL)
    assert [len(found) for found in page["beam_search"](small(), PROMPTS, width, returns=width, max_new_tokens=1)] \
        == [SMALL] * len(PROMPTS)


@pytest.mark.wide
def test_broken_logits_end_the_search(page: dict[str, Any]) -> None:
    lm = small()
    broken = dataclasses.replace(lm, params=dict(lm.params, head=lm.params["head"].at[0, 0].set(jnp.nan)))
    out = dx.generate(broken, PROMPTS, algorithm=page["Beams"](2), max_new_tokens=4)
    assert out.status == [dx.Status.INVALID] * 12


@pytest.mark.wide
def test_the_rows_of_a_prompt_are_the_methods_own(page: dict[str, Any]) -> None:
    """Also where a batch is filled up: 6 rows a prompt do not divide 8."""
    alg = page["Beams"](3)
    with pytest.raises(ValueError, match=r"num_samples: got 3, Beams works on 6 rows a prompt"):
        dx.generate(small(), PROMPTS, algorithm=alg, max_new_tokens=4, num_samples=3)
    with pytest.raises(ValueError, match=r"algorithm: Beams works on 6 rows a prompt, and stream has one"):
        dx.stream(small(), PROMPTS[0], algorithm=alg)
    whole = dx.generate(small(), PROMPTS, algorithm=alg, max_new_tokens=4)
    parts = dx.generate(small(), PROMPTS, algorithm=alg, max_new_tokens=4, batch_size=1)
    assert len(whole) == 6 * len(PROMPTS) and whole.tokens.tolist() == parts.tokens.tolist()
    np.testing.assert_allclose(whole.findings["score"], parts.findings["score"], rtol=1e-5)


# particles

@dataclasses.dataclass(frozen=True)
class Tilt:
    """A potential for each token, by their logarithms."""

    log: tuple[float, ...]

    def __call__(self, text: jax.Array, length: jax.Array) -> jax.Array:
        return jnp.asarray(self.log)[text[jnp.arange(text.shape[0]), length - 1]]


@pytest.mark.full
def test_particles_go_on_as_a_filter_by_hand_says(page: dict[str, Any]) -> None:
    size, least, prompts = 8, 0.7, PROMPTS
    tilt = tuple(np.random.default_rng(0).normal(0, 0.8, VOCABULARY).tolist())
    alg = page["Particles"](Tilt(tilt), size, least)
    ids = [prompt for prompt in prompts for _ in range(size)]
    network, params, chain, s = start(alg, "toy", ids, dict(temperature=1.0), new=7)
    step = jax.jit(functools.partial(dx.step, alg, network))
    resampled, parted = 0, 0
    while bool(s.running.any()):
        after = step(params, chain, s)
        for group in range(len(prompts)):
            rows = slice(group * size, (group + 1) * size)
            log_w = np.asarray(s.algo.log_weight, np.float64)[rows]
            w = np.exp(log_w) / np.exp(log_w).sum()
            ancestor, mean = np.arange(size), np.float64(s.algo.log_mean[rows][0])
            if 1 / (w ** 2).sum() < least * size:
                u = float(keys.uniforms(s.key[rows][:1], s.length[rows][:1, None], Purpose.ORDER)[0, 0, 0])
                ancestor = np.searchsorted(w.cumsum(), (np.arange(size) + u) / size, side="right")
                mean, log_w = mean + np.log(np.exp(log_w).mean()), np.zeros(size)
                resampled += 1
            length = int(s.length[rows][0])
            before, now = np.asarray(s.tokens)[rows, :length], np.asarray(after.tokens)[rows, :length + 1]
            assert now[:, :-1].tolist() == before[ancestor].tolist()
            # each place draws with its own key, whichever text it has taken over
            logits = jnp.stack([toys_logits(text) for text in before[ancestor]])[:, None]
            address = addresses(s.key[rows], jnp.full((size, 1), length), Purpose.TOKEN)
            assert now[:, -1].tolist() == draw(logits, address)[:, 0].tolist()
            parted += len({*map(tuple, now.tolist())}) > len({*ancestor.tolist()})
            np.testing.assert_allclose(after.algo.log_weight[rows], log_w + np.array(tilt)[now[:, -1]], atol=1e-5)
            np.testing.assert_allclose(after.algo.log_mean[rows], mean, atol=1e-5)
        s = after
    assert int(s.algo.resampled[::size].sum()) == resampled > 3 and parted > 3


@pytest.mark.wide
@pytest.mark.parametrize("least", [pytest.param(0.0, marks=pytest.mark.full), 0.8], ids=["never", "resampled"])
def test_the_estimate_is_unbiased(page: dict[str, Any], least: float) -> None:
    """Two-sided tests at 1e-5 each, of the estimate and of six frequencies: a false alarm in 7 of 100,000 runs."""
    tilt, groups, size, prompt = (0.6, -0.6, 0.4, 0.8, -0.1, 0.2), 600, 8, PROMPTS[0]
    alg = page["Particles"](Tilt(tilt), size, least)
    out = dx.generate(small(), [prompt] * groups, algorithm=alg, max_new_tokens=NEW, seed=1, temperature=1.0)
    assert (int(out.findings["resampled"].sum()) > groups) == (least > 0)
    assert {*out.status} == {dx.Status.EOS, dx.Status.LENGTH}

    mass = {text: np.exp(own.sum() + sum(tilt[token] for token in text))
            for text, own in log_probs(tuple(prompt), NEW).items()}
    total = sum(mass.values())
    by_group = lambda x: np.asarray(x, np.float64).reshape(groups, size)
    weight = np.exp(by_group(out.findings["log_weight"])) / size
    first = by_group(out.tokens[:, 0])

    def deviates(estimates: np.ndarray, exact: float) -> float:
        return float(abs(estimates.mean() - exact) / (estimates.std(ddof=1) / groups ** 0.5))

    limit = 4.417
    assert deviates(weight.sum(1), total) < limit
    for token in range(SMALL):
        exact = sum(m for text, m in mass.items() if text[0] == token)
        assert deviates((weight * (first == token)).sum(1), exact) < limit
    # the test would see the estimate of the untilted model, or one that is a fifth off
    assert deviates(weight.sum(1), 1.0) > limit and deviates(weight.sum(1), 1.2 * total) > limit


@pytest.mark.wide
def test_a_hard_potential_gives_the_probability_of_an_event(page: dict[str, Any]) -> None:
    """At 1e-5; see above."""
    groups, size, prompt, barred = 300, 8, PROMPTS[0], 3
    alg = page["Particles"](page["Without"](barred), size, 0.9)
    out = dx.generate(small(), [prompt] * groups, algorithm=alg, max_new_tokens=NEW, temperature=1.0)
    exact = sum(np.exp(own.sum()) for text, own in log_probs(tuple(prompt), NEW).items() if barred not in text)
    found = np.exp(out.findings["log_weight"].astype(np.float64)).reshape(groups, size).mean(1)
    assert abs(found.mean() - exact) / (found.std(ddof=1) / groups ** 0.5) < 4.417
    assert 0.1 < exact < 0.9 and out.findings["resampled"].sum() > 0
    texts = [out.row(i).tolist() for i in np.flatnonzero(out.findings["log_weight"] > -np.inf)]
    assert texts and not any(barred in text for text in texts)
