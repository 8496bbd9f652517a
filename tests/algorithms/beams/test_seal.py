"""Beams over a corpus, and documents found by n-grams: against the authors' code, enumeration, and plain Python.

`seal.json` has what facebookresearch/SEAL fdaf307 gives: the n-grams that `constrained_beam_search` keeps for the model
`toy`, whose index answered from plain lists of tokens, and the documents that `aggregate_evidence` scores.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.beams import Corpus, CorpusBeams, Evidence
from decodax.algorithms.beams.corpus import sorted_suffixes
from decodax.algorithms.beams.seal import ngrams
from tests.algorithms.beams.small import log_probs, small
from tests.laws.toy import Toy
from tests.matrix import often

EXPECTED = json.loads((Path(__file__).parent / "seal.json").read_text())
DOCUMENTS, V, EOS, NEW, MARK = EXPECTED["documents"], 12, 2, 5, 11
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "fixed": ({}, NEW), "ends": ({}, 0), "anywhere": (dict(may_end=True), 0)}


@functools.cache
def toy() -> dx.LM:
    network = Toy(V)
    return dx.LM(network, network.init_params(3), V, generation_config={"eos_token_id": EOS})


def within(text: tuple[int, ...], documents: Any) -> bool:
    return any(tuple(d[i:i + len(text)]) == text for d in documents for i in range(len(d) - len(text) + 1))


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "width"), often([("ends", 4)], [(kind, k) for kind in KINDS for k in (2, 4)]))
def test_ngrams_are_those_of_the_authors(kind: str, width: int) -> None:
    """In their order, with their log-probabilities."""
    cases = [c for c in EXPECTED["searches"] if (c["kind"], c["width"]) == (kind, width)]
    options, least = KINDS[kind]
    alg = CorpusBeams(width, returns=2, corpus=Corpus.build(DOCUMENTS), **options)
    out = dx.generate(toy(), [c["prompt"] for c in cases], algorithm=alg, max_new_tokens=NEW, min_new_tokens=least)
    assert cases and not all(status == dx.Status.DEAD_END for status in out.status)
    for i, case in enumerate(cases):
        for row in (2 * i, 2 * i + 1):
            found = ngrams(out.findings, row)
            assert [list(n) for n, _ in found] == [n for n, _ in case["ngrams"]]
            np.testing.assert_allclose([p for _, p in found], [p for _, p in case["ngrams"]], atol=1e-4)
            text = tuple(out.row(row).tolist())
            assert out.status[row] == dx.Status.DEAD_END or within(
                text[:-1] if kind == "anywhere" and text[-1] == EOS else text, DOCUMENTS)


@pytest.mark.parametrize("case", range(len(EXPECTED["ranks"])))
def test_documents_score_as_by_the_authors(case: int) -> None:
    c = EXPECTED["ranks"][case]
    rules = Evidence(**{name: c[name] for name in ("power", "repetition", "smoothing", "first", "rare")})
    single = None if c["unigrams"] is None else [-np.inf if p is None else p for p in c["unigrams"]]
    found = rules.rank(Corpus.build(c["documents"]), c["ngrams"], single)
    wanted = {d: (score, ngrams) for d, score, ngrams in c["matches"]}
    assert {m.document for m in found} == wanted.keys() and len(found) == len(wanted) > 3
    assert [m.score for m in found] == sorted((m.score for m in found), reverse=True)
    for match in found:
        score, grams = wanted[match.document]
        assert match.score == pytest.approx(score, abs=1e-4)
        assert sorted(n for n, _ in match.ngrams) == sorted(tuple(n) for n, _ in grams)
        weight = {tuple(n): w for n, w in grams}
        assert all(w == pytest.approx(weight[n], abs=1e-4) for n, w in match.ngrams)


TEXTS = [[1, 3, 4, 1, 3], [0, 4, 2], [5, 5, 5, 3, 1, 4, 2]]


@pytest.mark.wide
@pytest.mark.parametrize("penalty", often([1.0], [0.0, 1.0]))
def test_wide_enough_they_find_the_best_of_all_texts_of_the_corpus(penalty: float) -> None:
    new, prompts, count = 4, [(1, 3, 4), (5,)], 8
    alg = CorpusBeams(30, returns=count, length_penalty=penalty, corpus=Corpus.build(TEXTS))
    out = dx.generate(small(), [list(p) for p in prompts], algorithm=alg, max_new_tokens=new)
    for i, prompt in enumerate(prompts):
        score = {t: p.sum() / len(t) ** penalty for t, p in log_probs(prompt, new).items() if within(t, TEXTS)}
        best = sorted(score, key=score.__getitem__, reverse=True)[:count]
        rows = range(count * i, count * i + len(best))
        assert [tuple(out.row(j).tolist()) for j in rows] == best
        np.testing.assert_allclose(out.findings["score"][rows], [score[t] for t in best], rtol=1e-4)
        assert len(best) > 5 and all(s == dx.Status.DEAD_END for s in out.status[count * i + len(best):count * (i + 1)])


def test_allowed_tokens_are_those_that_follow_in_the_corpus() -> None:
    """Of a corpus with wide and narrow spans; few tokens looked up change nothing that counts."""
    rng = np.random.default_rng(0)
    documents = [np.minimum(rng.geometric(0.3, rng.integers(40, 90)) - 1, 29).tolist() for _ in range(12)]
    corpus = Corpus.build(documents)
    texts = [d[i:i + n] for d in documents[:6] for i in (0, 7) for n in (0, 1, 2, 3, 5)]
    extend = jax.jit(corpus.extend)
    spans = []
    for text in texts:
        span = corpus.whole(())
        for token in text:
            span = extend(span, jnp.array(token))
        spans.append(span)
        assert corpus.count(text) == int(span.high - span.low) == sum(
            d[i:i + len(text)] == text for d in documents for i in range(len(d) - len(text) + 1))
    span = jax.tree.map(lambda *x: jnp.stack(x), *spans)
    wanted = np.array([[within((*t, token), documents) for token in range(30)] for t in texts])
    order = jnp.where(jnp.arange(30) == 4, -jnp.inf, jnp.asarray(rng.normal(size=wanted.shape), jnp.float32))
    wanted &= np.arange(30) != 4
    allowed = jax.jit(corpus.allowed, static_argnums=(2, 3))
    assert (np.asarray(allowed(span, order, 3, 30)) == wanted).all()
    wide = np.asarray(span.high - span.low) > 64
    assert wide.any() and not wide.all()
    for need, look in ((1, 4), (5, 12)):
        got = np.asarray(allowed(span, order, need, look))
        assert not (got & ~wanted).any() and (got[~wide] == wanted[~wide]).all()
        for row, right, by in zip(got, wanted, np.asarray(order), strict=True):
            best = np.flatnonzero(right)[np.argsort(-by[right])][:need]
            assert row[best].all()


def test_suffixes_are_in_order() -> None:
    tokens = np.random.default_rng(1).integers(-1, 3, 200)
    order = sorted_suffixes(tokens)
    assert order.tolist() == sorted(range(200), key=lambda i: tokens[i:].tolist())


@pytest.mark.full
def test_looking_at_few_tokens_changes_no_search() -> None:
    corpus = Corpus.build(DOCUMENTS * 12)
    given: dict[str, Any] = dict(max_new_tokens=NEW, temperature=1.0, repetition_penalty=1.2)
    whole, few = (dx.generate(toy(), [[1, 3, 4], [5]], algorithm=CorpusBeams(2, corpus=corpus, look=look), **given)
                  for look in (256, 2))
    assert whole.tokens.tolist() == few.tokens.tolist() and ngrams(whole.findings, 1) == ngrams(few.findings, 1)
    alone = dx.generate(toy(), [5], algorithm=CorpusBeams(2, corpus=corpus), request_ids=[1], **given)
    assert alone.row(0).tolist() == whole.row(1).tolist()


@pytest.mark.full
def test_ngrams_follow_a_prefix() -> None:
    """From the first token on; the authors' first one may be any that occurs, and the text ends where it is wrong."""
    alg = dx.algorithms.make("seal", corpus=DOCUMENTS, width=6, prefix=[MARK])
    out = dx.generate(toy(), [[1, 3, 4]], algorithm=alg, max_new_tokens=3)
    wanted = {tuple(d[1:n]) for d in DOCUMENTS if d[0] == MARK for n in (2, 3, 4)}
    assert {n for n, _ in ngrams(out.findings, 0)} == wanted and tuple(out.row(0).tolist()) in wanted


@pytest.mark.full
def test_another_corpus_of_the_same_size_is_another_search() -> None:
    alg = CorpusBeams(4, corpus=Corpus.build([[3, 4, 5, 6]]))
    other = CorpusBeams(4, corpus=Corpus.build([[7, 8, 9, 3]]))
    first, second = (dx.generate(toy(), [5], algorithm=a, max_new_tokens=4) for a in (alg, other))
    assert first.row(0).tolist() == [3, 4, 5, 6] and second.row(0).tolist() == [7, 8, 9, 3]
    none = dx.generate(toy(), [5], algorithm=alg, max_new_tokens=5)
    assert none.status == [dx.Status.DEAD_END] and (3, 4, 5, 6) in dict(ngrams(none.findings, 0))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Corpus.build([]), "documents: got none"), (lambda: Corpus.build([[1], []]), r"got document 1: \[\]"),
    (lambda: Corpus.build([[1, -1]]), "each a list of token ids"),
    (lambda: CorpusBeams(2, groups=2), "groups: got 2 with a corpus"), (lambda: CorpusBeams(2, look=0), "look: got 0"),
    (lambda: CorpusBeams(2, corpus=Corpus.build([[1]]), prefix=(2,)), "which is nowhere in the corpus"),
    (lambda: dx.generate(toy(), [5], algorithm=CorpusBeams(2), max_new_tokens=2), "corpus: got None"),
    (lambda: Evidence(rare=0), "rare: got 0"), (lambda: Evidence(repetition=1.5), "takes at most 1"),
    (lambda: dx.algorithms.make("seal"), "needs corpus=")])
def test_bad_arguments_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_seal_by_name_reads_a_corpus_or_its_documents() -> None:
    alg = dx.algorithms.make("seal", corpus=DOCUMENTS, width=3, prefix=[MARK])
    assert (alg.width, alg.prefix, alg.corpus.documents) == (3, (MARK,), len(DOCUMENTS))
    assert dx.algorithms.make("seal", corpus=alg.corpus).corpus is alg.corpus
