"""The caches of `docs/extending/examples`, written as a user would, against oracles that decode token by token.

A run decodes two prompts twice each, one row greedy and one sampled, so that one program covers forks, ragged rows,
greedy decoding and sampling.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative.drafts import LayerSkip
from decodax.algorithms.speculative.trees import Fixed
from decodax.models.diffusion import Diffusion
from tests.extending.pages import run_page
from tests.matrix import often

pytestmark = pytest.mark.wide      # the guide runs as it stands


@functools.cache
def page():
    """The names that the page's code defines. It has assertions of its own."""
    return run_page("caches")


def kinds():
    p = page()
    rope = p["config"].layers[0].rope
    return {"dense": None, "sinks": p["sinks"], "h2o": p["h2o"], "paged": p["Paged"](48, 4),
            "wide sinks": p["Sinks"](2, 64, rope), "wide h2o": p["HeavyHitters"](30, 30, 4),
            "tight": p["Paged"](14, 4), "counted sinks": p["Counted"](p["sinks"]),
            "counted paged": p["Counted"](p["Paged"](48, 4))}


def algorithms():
    lm, network = page()["lm"], page()["network"]
    # a draft that is often right, with pages of its own
    draft = dataclasses.replace(lm, model=network.with_cache(page()["Paged"](48, 4)),
                                params=jax.tree.map(lambda x: 0.9 * x, lm.params))
    return {"plain": None, "lookup": page()["lookup"],
            "tree": dx.Speculative(dx.drafts.DraftModel(draft), shape=Fixed.balanced(2, 2, 1)),
            # a tree that grows level by level beside the cache itself
            "own layers": dx.Speculative(LayerSkip(1), shape=Fixed.balanced(2, 1, 1))}


@functools.cache
def run(kind, algorithm="plain", rows=(0, 1), chunk=512):
    p = page()
    return dx.generate(p["lm"], [p["prompts"][i] for i in rows], algorithm=algorithms()[algorithm], request_ids=rows,
                       cache=kinds()[kind], max_new_tokens=24, num_samples=2, temperature=[0.0, 0.9] * len(rows),
                       seed=5, logprobs=0, chunk=chunk)


def texts(out):
    return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]


def chosen(out):
    return np.asarray(out.logprobs.raw)


def test_the_page_runs():
    few = page()["few"]
    assert {status.name for status in few.status} == {"CAPACITY"} and 0 < few.lengths.sum() < 40


class Llama:
    """The page's model in float64, one token at a time; `rule` gives attention."""

    def __init__(self, rule):
        self.rule, self.w, self.c = rule, page()["weights"], page()["config"]

    def scores(self, text):
        """Log-probabilities of what follows each token of a text, `f64[T, V]`."""
        out = []
        array = lambda *path: np.asarray(functools.reduce(lambda tree, name: tree[name], path, self.w), np.float64)
        norm = lambda x, scale: x / np.sqrt((x ** 2).mean() + self.c.norm.eps) * scale
        for position, token in enumerate(text):
            x = array("embed")[token]
            for i in range(len(self.c.layers)):
                of = functools.partial(array, "layers", str(i))
                y = norm(x, of("attn_in", "scale"))
                q, k, v = ((y @ of("attn", name, "kernel")).reshape(-1, self.c.head_dim) for name in "qkv")
                x = x + self.rule.attend(i, position, q, k, v).ravel() @ of("attn", "o", "kernel")
                y = norm(x, of("mlp_in", "scale"))
                gate = y @ of("mlp", "gate", "kernel")
                x = x + (gate / (1 + np.exp(-gate)) * (y @ of("mlp", "up", "kernel"))) @ of("mlp", "down", "kernel")
            logits = norm(x, array("norm", "scale")) @ array("lm_head", "kernel")
            out.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        return np.array(out)


def turn(x, position):
    """Rotary embedding of `f64[..., d]`."""
    half = x.shape[-1] // 2
    angle = position * 10_000.0 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


class SinksRule:
    """StreamingLLM as its authors wrote it: unrotated keys, rotated by their index in the cache at every step."""

    def __init__(self, sinks, recent):
        self.sinks, self.recent, self.held = sinks, recent, {}

    def attend(self, layer, position, q, k, v):
        held = self.held.setdefault(layer, [])
        held.append((k, v))
        if len(held) > self.sinks + self.recent:
            del held[self.sinks]
        out = []
        for h, query in enumerate(turn(q, len(held) - 1)):
            g = h // (len(q) // len(k))
            weights = softmax(np.array([turn(k[g], i) @ query for i, (k, _) in enumerate(held)]) * len(query) ** -0.5)
            out.append(weights @ np.array([v[g] for _, v in held]))
        return np.array(out)


class HeavyHittersRule:
    """H2O, token by token, with slack: each head evicts `every` tokens when it holds so many more than it keeps."""

    def __init__(self, heavy, recent, every):
        self.heavy, self.recent, self.every, self.held = heavy, recent, every, {}

    def attend(self, layer, position, q, k, v):
        group, out = len(q) // len(k), []
        for g in range(len(k)):
            held = self.held.setdefault((layer, g), [])
            held.append([turn(k[g], position), v[g], 0.0])
            for query in turn(q[g * group:(g + 1) * group], position):
                weights = softmax(np.array([key @ query for key, _, _ in held]) * len(query) ** -0.5)
                out.append(weights @ np.array([value for _, value, _ in held]))
                for entry, weight in zip(held, weights, strict=True):
                    entry[2] += weight
            if len(held) == self.heavy + self.recent + self.every:
                old = held[:-self.recent]
                best = sorted(sorted(range(len(old)), key=lambda i: -old[i][2])[:self.heavy])
                self.held[layer, g] = [old[i] for i in best] + held[-self.recent:]
        return np.array(out)


@pytest.mark.parametrize(("kind", "rule"), [
    ("sinks", lambda: SinksRule(2, 6)), ("h2o", lambda: HeavyHittersRule(4, 4, 4))], ids=["sinks", "h2o"])
def test_a_cache_is_its_rule_run_token_by_token(kind, rule):
    out = run(kind)
    for row, text in enumerate(texts(out)):
        prompt = page()["prompts"][row // 2]
        scores = Llama(rule()).scores(prompt + text)[len(prompt) - 1:-1]
        assert np.allclose(chosen(out)[row, :len(text)], scores[np.arange(len(text)), text], atol=2e-4)
        if row % 2 == 0:
            assert scores.argmax(-1).tolist() == text
    assert not np.allclose(chosen(out), chosen(run("dense")), atol=1e-2)        # and that is not what dense does


# sinks and h2o with a lookup are assertions of the page
@pytest.mark.parametrize(("kind", "algorithm"), often([], [
    ("sinks", "lookup"), ("sinks", "tree"), ("sinks", "own layers"), ("h2o", "lookup"), ("h2o", "tree"),
    ("h2o", "own layers"), ("paged", "lookup"), ("paged", "tree")]))
def test_drafts_give_the_tokens_of_plain_decoding_with_the_same_cache(kind, algorithm):
    plain, drafted = run(kind), run(kind, algorithm)
    assert texts(plain) == texts(drafted)
    assert np.allclose(chosen(plain), chosen(drafted), atol=1e-4)
    assert (drafted.stats.accepted > 0).all()


@pytest.mark.parametrize("kind", often(["wide sinks"], ["wide sinks", "wide h2o"]))
def test_a_budget_that_holds_everything_is_the_dense_cache(kind):
    assert texts(run(kind)) == texts(run("dense"))
    assert np.allclose(chosen(run(kind)), chosen(run("dense")), atol=1e-5)


def test_pages_are_the_dense_cache():
    """Two samples of a prompt share its full pages and fill the last one apart. But for rounding: the gather of pages
    is fused into other kernels."""
    assert texts(run("paged")) == texts(run("dense"))
    assert np.allclose(chosen(run("paged")), chosen(run("dense")), atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "chunk"), often([("sinks", 5)], [("h2o", 1), ("h2o", 5), ("sinks", 5)]))
def test_a_prompt_may_be_read_in_chunks_of_any_width(kind, chunk):
    assert texts(run(kind, chunk=chunk)) == texts(run(kind))
    assert np.allclose(chosen(run(kind, chunk=chunk)), chosen(run(kind)), atol=1e-5)


@pytest.mark.parametrize("kind", often(["sinks"], ["sinks", "h2o"]))
def test_a_row_does_not_depend_on_its_batch_mates(kind):
    alone = run(kind, rows=(1,))
    assert texts(alone) == texts(run(kind))[2:]
    assert np.allclose(chosen(alone), chosen(run(kind))[2:], atol=1e-5)


@pytest.mark.parametrize("algorithm", often(["plain"], ["plain", "lookup"]))
def test_a_pool_that_is_too_small_ends_rows_and_writes_nowhere_else(algorithm):
    out, whole = run("tight", algorithm), run("dense")
    assert {status.name for status in out.status} == {"CAPACITY"}
    for text, full in zip(texts(out), texts(whole), strict=True):
        assert 0 < len(text) < len(full) and text == full[:len(text)]
    assert sum(out.lengths) > 14         # 14 pages hold 56 positions, 26 + 6 of the prompts


@pytest.mark.parametrize("kind", often(["paged"], ["sinks", "paged"]))
def test_a_wrapped_cache_decodes_as_the_cache(kind):
    assert texts(run(f"counted {kind}")) == texts(run(kind))


@pytest.mark.parametrize(("kind", "system", "message"), [
    ("sinks", "fast-dllm", "rewrites and subsets, which SinkCache does not"),
    ("h2o", "fast-dllm", "rewrites and subsets, which HeavyHitterCache does not"),
    ("paged", "fast-dllm", "rewrites, which PagedCache does not"),
    ("counted sinks", "fast-dllm", "rewrites and subsets, which Counting does not"),
    ("h2o", "clasp", "truncation, which HeavyHitterCache does not"),
])
def test_an_algorithm_that_needs_what_a_cache_lacks_is_refused_by_name(kind, system, message):
    lm = page()["lm"]
    lm = dataclasses.replace(lm, diffusion=Diffusion(mask=15)) if system == "fast-dllm" else lm
    with pytest.raises(ValueError, match=message):
        dx.generate(lm, page()["prompts"], algorithm=system, cache=kinds()[kind], max_new_tokens=8)
