"""Ten extensions written from docs/extending alone, one file each, against the laws that their contracts promise.

None of them is the example of its page. A page that leaves out what such a file needs is wrong, and is corrected.
"""

import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.common.registry import ALGORITHMS, CACHES, SEARCHES
from decodax.core.window import causal
from decodax.models import Transformer, llama
from decodax.models.diffusion import Diffusion
from tests.extending.pages import DOCS, blocks_of

EXPERIMENTS = ["alibi_parallel", "ball_pages", "bigram", "cooldown", "judged_beam", "log_scale", "near_best",
               "noisy_attention", "rising_quota", "rwkv_layer"]
FOLDER = Path(__file__).parent / "experiments"

PROMPTS = [[1, 2, 3, 4], [9, 3], [2, 7, 1, 8] * 5 + [5, 5, 2, 7, 3, 3, 1, 2, 7, 1], [5, 5, 2, 7, 5, 5, 2]]
OTHERS = [[8, 8, 8], [4, 2, 4, 2, 6, 1, 7], PROMPTS[2], [1]]
MIXED = dict(max_new_tokens=20, temperature=[0.0, 0.8, 1.0, 0.0], seed=3)           # greedy and sampled rows

NETWORK = Transformer(llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=256))


@pytest.fixture(scope="module", autouse=True)
def experiments() -> Iterator[dict[str, ModuleType]]:
    """The modules of the experiments. The names that they register are forgotten after the tests of this module."""
    known = [(table, set(table)) for table in (ALGORITHMS, CACHES, SEARCHES)]
    modules = {name: importlib.import_module(f"tests.extending.experiments.{name}") for name in EXPERIMENTS}
    yield modules
    for table, names in known:
        for name in set(table) - names:
            del table[name]
    for module in modules.values():
        del sys.modules[module.__name__]


@pytest.fixture(scope="module")
def lm() -> dx.LM:
    weights = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, NETWORK.init_params(jax.random.key(1)))
    return dx.LM(model=NETWORK, params=weights, vocab_size=16)


@pytest.fixture(scope="module")
def small(lm: dx.LM) -> dx.LM:
    """A draft model that often agrees with `lm`."""
    return dataclasses.replace(lm, params=jax.tree.map(lambda x: 1.2 * x, lm.params))


@pytest.fixture(scope="module")
def plain(lm: dx.LM) -> list[list[int]]:
    return rows(dx.generate(lm, PROMPTS, **MIXED))


def rows(out: dx.Result) -> list[list[int]]:
    return [out.row(i).tolist() for i in range(len(out))]


# the files

def imports_of(source: str) -> set[str]:
    """Dotted names of decodax that a source imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
    return {name for name in names if name.split(".")[0] == "decodax"}


@pytest.fixture(scope="module")
def documented() -> set[str]:
    """Names of decodax that pages and examples of docs/extending import, or write out."""
    found = set()
    for path in [*(DOCS / "extending").glob("*.md"), *(DOCS / "extending" / "examples").glob("*.py")]:
        found |= set(re.findall(r"`(decodax(?:\.\w+)+)", path.read_text()))
        for _, source in blocks_of(path):
            found |= imports_of(source)
    return found


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_one_file_of_at_most_60_lines_and_of_documented_names(name, documented):
    source = (FOLDER / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 60 and ast.get_docstring(ast.parse(source))
    assert imports_of(source) <= documented
    assert not re.search(r"\b_[a-z]\w*\(|\._[a-z]", source)         # nothing private


def test_there_are_no_other_experiments():
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == EXPERIMENTS


# caches

TIGHT = {"noisy-attention": "noisy-attention:budget=10,every=4", "log-scale": "log-scale:residual_length=4",
         "ball-pages": "ball-pages:budget=12,page_size=4,recent=8,skip=()"}
ROOMY = {"noisy-attention": "noisy-attention:budget=64,every=4", "log-scale": "log-scale:residual_length=64",
         "ball-pages": "ball-pages:budget=128,page_size=4,recent=8,skip=()"}


@pytest.mark.wide
@pytest.mark.parametrize("name", TIGHT)
def test_a_cache_with_room_for_everything_is_dense(name, lm, plain):
    assert rows(dx.generate(lm, PROMPTS, cache=ROOMY[name], **MIXED)) == plain


@pytest.mark.wide
@pytest.mark.parametrize("name", TIGHT)
def test_a_tight_cache_goes_by_the_row_alone_and_speculation_keeps_its_output(name, lm, plain):
    tight = rows(dx.generate(lm, PROMPTS, cache=TIGHT[name], **MIXED))
    assert tight != plain
    assert rows(dx.generate(lm, OTHERS, cache=TIGHT[name], **MIXED))[2] == tight[2]
    drafted = dx.generate(lm, PROMPTS, cache=TIGHT[name], algorithm="prompt-lookup:length=4", **MIXED)
    assert rows(drafted) == tight and drafted.stats.accepted.sum() > 0


def test_the_codec_errs_by_its_bound(experiments):
    codec, shape = experiments["log_scale"].LogScale(), KVLayer(2, 6)
    kv = np.random.default_rng(0).normal(size=(2, 32, 12)).astype(np.float32) ** 3
    codes = codec.encode(shape, jnp.asarray(kv))
    assert codes.codes.dtype == jnp.uint8 and codes.codes.shape == (2, 32, 6)
    decoded = np.asarray(codec.decode(shape, codes, jnp.float32))
    largest = np.abs(kv.reshape(2, 32, 2, 6)).max(-1).repeat(6, -1)
    assert (np.abs(decoded - kv) <= np.maximum((2 ** 0.5 - 1) * np.abs(kv), 2 ** -6.5 * largest) * 1.0001).all()
    with pytest.raises(ValueError, match="cache: got keys of width 5, log-scale takes an even width"):
        codec.check(KVLayer(2, 5))


def test_no_key_of_a_page_scores_higher_than_the_page(experiments):
    score, rng = experiments["ball_pages"].Ball(), np.random.default_rng(1)
    keys, q = rng.normal(size=(2, 5, 4, 8)), rng.normal(size=(2, 3, 8))
    scores = score(jnp.asarray(q, jnp.float32), score.digest(jnp.asarray(keys, jnp.float32)))
    assert (np.einsum("grd,gnpd->grnp", q, keys).max(-1) <= np.asarray(scores) + 1e-4).all()


# drafts and shapes

@pytest.mark.wide(but=("bigram:length=4",))
@pytest.mark.parametrize("algorithm", ["bigram:length=4", "near-best:gap=1"])
def test_a_draft_leaves_the_output_as_it_is(algorithm, lm, small, plain):
    options = dict(draft=small) if algorithm.startswith("near-best") else {}
    fast = dx.generate(lm, PROMPTS, algorithm=algorithm, **options, **MIXED)
    assert rows(fast) == plain and fast.stats.accepted.sum() > 0


@pytest.mark.wide
def test_a_tree_is_narrower_where_the_gap_is_smaller(lm, small):
    drafted = [dx.generate(lm, PROMPTS, algorithm=f"near-best:gap={gap}", draft=small, **MIXED).stats
               for gap in (0.01, 5)]
    a_round = [(stats.drafted / stats.rounds).mean() for stats in drafted]
    assert 4 <= a_round[0] < 6 < a_round[1]                         # nearly chains of four, and trees


# masked diffusion

@pytest.fixture(scope="module")
def filler(lm: dx.LM) -> dx.LM:
    return dataclasses.replace(lm, diffusion=Diffusion(mask=15))


def test_a_rule_of_diffusion_keeps_its_schedule_and_leaves_no_mask(filler):
    options = dict(max_new_tokens=16, algorithm="rising-quota:block=8,slope=1")
    out = dx.generate(filler, PROMPTS, **options)
    assert not (out.tokens == 15).any() and out.lengths.tolist() == [16] * 4
    assert out.stats.rounds.tolist() == [8] * 4                     # 1 + 2 + 3 + 2 of each block
    assert rows(dx.generate(filler, OTHERS, **options))[2] == rows(out)[2]


@pytest.mark.wide
def test_a_rule_of_diffusion_leaves_given_tokens_as_they_are(filler):
    pieces = [[[1, 2], 4, [3, 3], 3], [[5], 9]]
    out = dx.infill(filler, pieces, algorithm="rising-quota")
    first, second = rows(out)
    assert first[4:6] == [3, 3] and len(first) == 9 and len(second) == 9 and 15 not in first + second


# sampling transforms

@pytest.mark.wide
def test_a_transform_with_a_state_does_its_work_and_is_exact_under_speculation(experiments, lm, small, plain):
    row = lambda *values: np.array(values, np.float32)
    cooldown = experiments["cooldown"].Cooldown(penalty=row(50, 0, 50, 2), fade=row(1, 1, 1, 0.5), span=6)
    options = dict(transforms=[cooldown], **MIXED)
    got = rows(dx.generate(lm, PROMPTS, **options))
    assert got[1] == plain[1] and got[3] != plain[3]
    for text in (got[0], got[2]):
        assert all(text[i] not in text[max(i - 6, 0):i] for i in range(len(text)))
    fast = dx.generate(lm, PROMPTS, algorithm="prompt-lookup:length=4", **options)
    assert rows(fast) == got


@pytest.mark.wide
def test_a_draft_model_is_held_to_a_transform_that_goes_by_the_token(experiments, lm):
    cooldown = experiments["cooldown"].Cooldown(penalty=np.float32([50] * 4), fade=np.float32([1] * 4), span=6)
    out = dx.generate(lm, PROMPTS, algorithm="seed-exact:length=3", draft=lm, transforms=[cooldown], **MIXED)
    assert rows(out) == rows(dx.generate(lm, PROMPTS, transforms=[cooldown], **MIXED))
    assert out.stats.accepted.tolist() == out.stats.drafted.tolist()


# searches

@pytest.mark.wide
def test_a_search_gives_one_text_for_each_prompt_and_the_same_one_again(lm):
    search = "judged-beam:rows=3,keep=2,step_tokens=4"
    run = lambda more="", **options: dx.generate(lm, PROMPTS[:2], search=search + more, temperature=1.0,
                                                 max_new_tokens=12, **options)
    out = run()
    assert out.tokens.shape == (2, 12) and out.findings["scores"].shape == (2, 3)
    assert out.findings["index"].tolist() == out.findings["scores"].argmax(1).tolist()
    for p, found in enumerate(rows(out)):
        assert found == list(out.findings["texts"][p][out.findings["index"][p]])
        assert len(set(found)) / len(found) == out.findings["scores"][p].max()
    assert rows(run()) == rows(out)
    assert rows(run(",bar=2")) != rows(out)             # no text pleases: each prompt begins again once
    assert rows(run(",bar=2,restarts=0")) == rows(out)


@pytest.mark.wide
def test_a_search_is_the_same_under_speculation(lm):
    options: dict[str, Any] = dict(search="judged-beam:rows=3,keep=2,step_tokens=4,bar=2", temperature=1.0,
                                   max_new_tokens=12)
    assert rows(dx.generate(lm, PROMPTS[:2], **options)) == rows(
        dx.generate(lm, PROMPTS[:2], algorithm="prompt-lookup:length=3", **options))


@pytest.mark.wide
def test_a_search_reads_sentences(tiny_model):
    search = dx.search.make("judged-beam", until="e", step_tokens=6, rows=2, keep=1)
    run = lambda: dx.generate(dx.load(tiny_model), "abc", search=search, temperature=1.0, max_new_tokens=12).text
    assert run() == run()


# models

@pytest.fixture(scope="module", params=["alibi_parallel", "rwkv_layer"])
def family(request, experiments) -> dx.LM:
    module = experiments[request.param]
    model = module.AlibiParallel(vocab=16) if request.param == "alibi_parallel" else module.Rwkv(vocab=16)
    return dx.LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=16)


@pytest.mark.wide
def test_cached_decoding_is_the_full_forward_and_drafts_leave_it_as_it_is(family):
    out = dx.generate(family, PROMPTS, logprobs=0, **MIXED)
    full = dx.score(family, list(zip(PROMPTS, rows(out), strict=True)))
    for i, expected in enumerate(full.logprobs):
        np.testing.assert_allclose(out.logprobs.raw[i][:len(expected)], expected, rtol=0, atol=1e-4)
    drafted = dx.generate(family, PROMPTS, algorithm="prompt-lookup:length=4", **MIXED)
    assert rows(drafted) == rows(out) and drafted.stats.accepted.sum() > 0


@pytest.mark.wide
def test_a_prompt_may_be_read_in_chunks_and_drafts_may_branch(family):
    plain = rows(dx.generate(family, PROMPTS, **MIXED))
    assert rows(dx.generate(family, PROMPTS, chunk=8, **MIXED)) == plain
    tree = dx.Speculative(dx.drafts.DraftModel(family), shape=dx.trees.Fixed.balanced(2, 2))
    assert rows(dx.generate(family, PROMPTS, algorithm=tree, **MIXED)) == plain


def hidden(model: Any, start: int) -> Any:
    """Hidden states of a text whose positions begin at `start`."""
    tokens = jnp.array([PROMPTS[3]])
    window = causal(tokens, jnp.array([start]), jnp.ones_like(tokens, bool))
    return model.apply(model.init_params(jax.random.key(0)), window, model.init_cache(1, 0)).hidden


def test_the_alibi_model_sees_distances_alone(experiments):
    model = experiments["alibi_parallel"].AlibiParallel(vocab=16)
    np.testing.assert_allclose(hidden(model, 0), hidden(model, 7), rtol=0, atol=1e-5)


def test_a_bias_that_is_no_function_of_keys_is_refused(experiments, monkeypatch):
    monkeypatch.setattr(experiments["alibi_parallel"], "by_position", lambda scores: scores)
    with pytest.raises(TypeError, match="bias: got a function that returns ArrayImpl, takes one of queries"):
        hidden(experiments["alibi_parallel"].AlibiParallel(vocab=16), 0)


@pytest.mark.wide
def test_the_alibi_model_takes_a_cache_or_the_cache_refuses_it_by_name(experiments):
    model: Any = experiments["alibi_parallel"].AlibiParallel(vocab=16)
    lm = dx.LM(model=model, params=model.init_params(jax.random.key(0)), vocab_size=16)
    options: dict[str, Any] = dict(cache="knorm:budget=10,every=4,skip_layers=()", **MIXED)
    tight = rows(dx.generate(lm, PROMPTS, **options))
    assert tight == rows(dx.generate(lm, PROMPTS, algorithm="prompt-lookup:length=4", **options))
    for name, cache in TIGHT.items():
        with pytest.raises(ValueError, match=f"cache: {name} takes a model without biases of its attention scores"):
            dx.generate(lm, PROMPTS, cache=cache, **MIXED)
