"""Draft models with another tokenizer: by the text (`Realigned`), and on the common tokens (`Intersection`)."""

import dataclasses
import functools
import json
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import decodax as dx
from decodax.algorithms.speculative import MultiRound, Rejection, SeedExact, Speculative
from decodax.algorithms.speculative.drafts import Intersection, Realigned
from decodax.algorithms.speculative.drafts.model.tli import common
from decodax.algorithms.speculative.drafts.model.uag import AlignedVocabularies
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.algorithms.speculative.vocabulary import ByteVocabulary, Merges
from decodax.cache import dense
from decodax.cache.entry import KVEntry
from decodax.core import drivers
from decodax.core.state import Status
from decodax.core.types import Model, Out, Params
from decodax.io.load import LM
from decodax.io.text import Tokenizer
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build
from tests.contracts.verifying import ALARM, FLOORED, PROMPT, chi_square, joint
from tests.laws.cases import VOCABULARY, model, texts
from tests.laws.toy import Toy
from tests.matrix import often
from tests.small_tokenizers import CORPUS, KINDS, TEXTS, of_words

SOURCE = (Path(sysconfig.get_paths()["stdlib"]) / "textwrap.py").read_text()[:6000]


def single_bytes() -> tokenizers.Tokenizer:
    """A token for each byte, as ByT5 has."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tok


@functools.cache
def tokenizer(kind):
    if kind == "pycode":
        return dx.load("pycode").tokenizer
    backend = single_bytes() if kind == "bytes" else KINDS[kind]()
    return Tokenizer(backend, bos_id=1 if kind == "sentencepiece" else None)


@functools.cache
def cutter(kind, width):
    vocabulary = ByteVocabulary.build(tokenizer(kind))
    return jax.jit(jax.vmap(vocabulary.split))


def cut(kind, text, width=256):
    """Token ids of a text's bytes, window by window."""
    out, data = [], text
    while data:
        window = np.frombuffer(data[:width].ljust(width, b"\0"), np.uint8)
        found, final = cutter(kind, width)(window[None], np.array([min(len(data), width)], np.int32))
        end = len(data) if len(data) <= width else int(final[0]) or width
        out += [int(t) for t in np.asarray(found)[0, :end] if t >= 0]
        data = data[end:]
    return out


@pytest.mark.parametrize(("kind", "share"), [("byte-level", 1), ("gemma", 1), ("bytes", 1), ("pycode", 0.98),
                                             ("unigram", 0.7)])
def test_a_text_is_cut_nearly_as_its_tokenizer_cuts_it(kind, share):
    tok, same, total = tokenizer(kind), 0, 0
    spelled = tok.token_bytes()
    for text in [SOURCE] if kind == "pycode" else [*TEXTS, *CORPUS[:5]]:
        ids = tok.encode(text, add_special_tokens=False)
        data = b"".join(spelled[i] for i in ids)
        mine = cut(kind, data)
        places = [{(sum(len(spelled[t]) for t in row[:n]), i) for n, i in enumerate(row)} for row in (ids, mine)]
        same, total = same + len(places[0] & places[1]), total + len(ids)
        if kind != "unigram":       # it has no token for unknown characters
            assert b"".join(spelled[i] for i in mine) == data
    assert share * total <= same


def test_the_device_merges_as_the_host_does():
    """Random words, of which some have no token of their own letters."""
    tok = Tokenizer(of_words("a b c d e ab bc abc bcd de cd cde abcd ea"))
    host, split = Merges.of(tok), jax.jit(jax.vmap(ByteVocabulary.build(tok).split))
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcdefg"), draw.integers(1, 30))).encode() for _ in range(200)]
    data = np.stack([np.frombuffer(w.ljust(32, b"\0"), np.uint8) for w in words])
    found = np.asarray(split(data, np.array([len(w) for w in words], np.int32))[0])
    assert [[int(t) for t in row if t >= 0] for row in found] == [host.split(w) for w in words]


def lm_of(kind, network=None, seed=0, **options):
    """A random model with a tokenizer."""
    tok = tokenizer(kind)
    network = network or Toy(len(tok))
    weights = network.init_params(seed if isinstance(network, Toy) else jax.random.key(seed))
    return LM(model=network, params=weights, vocab_size=len(tok), tokenizer=tok, **options)


@functools.cache
def target():
    return lm_of("byte-level", Transformer(llama(vocab=len(tokenizer("byte-level")), width=32, layers=2, heads=4,
                                                 kv_heads=2, mlp=64, context=512)))


@pytest.mark.wide
@pytest.mark.parametrize("kind", often(["gemma"], ["gemma", "sentencepiece", "bytes"]))
def test_reading_token_by_token_equals_reading_at_once(kind):
    """Characters of several bytes come in parts, and words grow: what was cut before is cut again."""
    ids = target().tokenizer.encode("\n".join(TEXTS).replace("\u2581", "") + "  🦜日本x")
    draft = Realigned.of(target(), lm_of(kind))
    params, alg = Params(target().params, draft.weights), Speculative(draft.bare())
    s = drivers.begin(alg, target().model, params, build(1), jnp.asarray([ids]), np.array([len(ids)], np.int32),
                      size=256, max_new=np.int32(8))
    read = jax.jit(lambda s, state: alg.draft.read_text(params.draft, s, state))
    show = lambda state: np.asarray(state.tokens)[0, :int(state.length[0])].tolist()
    once = show(read(s, s.algo[0]))
    spelled, text = tokenizer(kind).token_bytes(), b"".join(target().tokenizer.token_bytes()[i] for i in ids)
    assert b"".join(spelled[i] for i in once) == text
    if kind != "sentencepiece":       # that one puts a space before a text
        assert once == tokenizer(kind).encode(text.decode(), add_special_tokens=False)
    state, changed = s.algo[0], 0
    for n in range(1, len(ids) + 1):
        before, state = show(state), read(s.replace(length=np.array([n], np.int32)), state)
        changed += show(state)[:len(before)] != before
    assert show(state) == once
    assert changed > 0 or kind == "bytes"


MIXED = dict(temperature=[0.0, 0.8] * 3, repetition_penalty=1.2, top_p=0.95, seed=3,
             max_new_tokens=[20, 9, 16, 20, 20, 1])


@functools.cache
def plain():
    return dx.generate(target(), TEXTS, **MIXED)


@pytest.mark.wide
@pytest.mark.parametrize(("how", "kind"), often(
    [("text", "sentencepiece")], [("text", "sentencepiece"), ("text", "unigram"), ("tree", "sentencepiece")]))
def test_the_output_is_plain_decodings(how, kind):
    """Greedy and sampled rows under a penalty; the Unigram vocabulary lacks most bytes."""
    draft = lm_of(kind, seed=5)
    alg = Speculative(Realigned.of(target(), draft, 4, 6)) if how == "text" else Speculative(
        Intersection.of(target(), draft), shape=Fixed.balanced(2, 2))
    out = dx.generate(target(), TEXTS, algorithm=alg, **MIXED)
    assert np.array_equal(out.tokens, plain().tokens) and out.status == plain().status
    assert (out.stats.drafted > 0).all() or kind == "unigram"


@dataclasses.dataclass(frozen=True)
class Bigram(Model):
    """A model whose next token depends on the newest one alone: its weights are the logits, `f32[V, V]`."""

    vocabulary: int

    def init_cache(self, batch, capacity, *, params=None, inputs=None):
        return dense([(1, 1)], batch, capacity, jnp.float32)

    def apply(self, params, window, cache):
        none = jnp.zeros((*window.tokens.shape, 1, 1))
        return Out(hidden=params[window.tokens], entries=(KVEntry(none, none),), head=lambda h: h)


TEXT = "abcdefgh"


def writer(words, end_after=None):
    """A model that writes the letters of `TEXT` round and round in its own tokens, or ends behind one of them."""
    tok = Tokenizer(of_words(words, "</s>"))
    merges, V = Merges.of(tok), len(tok)
    logits = np.zeros((V, V), np.float32)
    for i, word in enumerate(words.split()):
        behind = (TEXT * 4)[TEXT.index(word[-1]) + 1:][:16] if word != "</s>" else TEXT
        ends = end_after is not None and word[-1] == end_after
        logits[i, words.split().index("</s>") if ends else merges.split(behind.encode())[0]] = 9.0
    return LM(model=Bigram(V), params=jnp.asarray(logits), vocab_size=V, tokenizer=tok)


LETTERS = "a b c d e f g h </s>"
WRITER = functools.partial(writer, LETTERS + " bc de def gh")


def decoded(lm, draft, length=4, steps=None, **options):
    given = dict(max_new_tokens=25, **options)
    alg = Speculative(Realigned.of(lm, draft, length, steps))
    ids = [lm.tokenizer.encode(text) for text in ("abcd", "e", "ghabcdefga")]
    plain, out = dx.generate(lm, ids, **given), dx.generate(lm, ids, algorithm=alg, **given)
    assert np.array_equal(out.tokens, plain.tokens)
    return out.stats


WRITERS = [("</s> h g f e d c b a ab cd ef efg ha", 6), (LETTERS, 9)]


@pytest.mark.full
@pytest.mark.parametrize(("words", "steps"), often(WRITERS[1:], WRITERS))
def test_two_models_that_write_the_same_text_agree_in_all_drafts(words, steps):
    stats = decoded(WRITER(), writer(words), 4, steps)
    assert stats.rounds.tolist() == [5, 5, 5]       # 4 drafts and a token of the target each
    assert (stats.accepted == 20).all()


@pytest.mark.full
def test_a_draft_ends_where_the_draft_model_does():
    stats = decoded(WRITER(), writer(LETTERS, end_after="f"), 4, 9)
    assert (stats.accepted == stats.drafted).all() and (stats.drafted < 4 * stats.rounds).all()


@pytest.mark.full
def test_bytes_that_one_vocabulary_lacks():
    stats = decoded(WRITER(), writer("a b d </s> f g h"), 4, 9)      # it reads, and writes, "abdfgh"
    assert (stats.drafted > 0).all() and (stats.accepted > 0).any() and (stats.accepted < stats.drafted).all()
    lacks = ByteVocabulary.build(Tokenizer(of_words("a b c ab")))
    draft = Realigned(Bigram(4), length=4, window=128)
    data = jnp.zeros(128, jnp.uint8).at[:6].set(jnp.asarray(list(b"abcxab"), jnp.uint8))
    found, count = jax.jit(lambda data: draft.drafts_of(lacks, data, jnp.int32(6)))(data)
    assert found[:int(count)].tolist() == [3, 2]       # "ab", "c", and no further


@pytest.mark.full
def test_a_row_without_room_goes_on_without_drafts():
    lm, draft = WRITER(), writer(LETTERS)
    for alg in (Speculative(dataclasses.replace(Realigned.of(lm, draft, 4, 9), room=1)),
                Speculative(dataclasses.replace(Intersection.of(lm, draft), room=1), shape=Chain(3))):
        ids, options = [lm.tokenizer.encode(TEXT * 24), lm.tokenizer.encode("ab")], dict(max_new_tokens=40)
        out = dx.generate(lm, ids, algorithm=alg, **options)
        assert np.array_equal(out.tokens, dx.generate(lm, ids, **options).tokens)
        assert 0 < out.stats.accepted[0] < out.stats.accepted[1]


def renamed(lm, seed=0):
    """The same model with its ids, but for added tokens, in another order."""
    order, data = np.arange(lm.vocab_size), json.loads(lm.tokenizer.backend.to_str())
    moved = np.setdiff1d(order, [token["id"] for token in data["added_tokens"]])
    order[moved] = np.random.default_rng(seed).permutation(moved)
    data["model"]["vocab"] = {name: int(order[i]) for name, i in data["model"]["vocab"].items()}
    tok = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)), eos_ids=lm.eos)
    params = dict(lm.params) | {"embed": lm.params["embed"][np.argsort(order)]}
    if "lm_head" in params:
        params["lm_head"] = {"kernel": lm.params["lm_head"]["kernel"][:, np.argsort(order)]}
    return dataclasses.replace(lm, params=params, tokenizer=tok)


@pytest.mark.full     # by default two small models that write the same text
def test_a_model_under_other_names_drafts_for_itself():
    """Nearly all: the rest is words that the device cuts otherwise than the tokenizer, and the last draft of a round,
    which may be the beginning of a longer token."""
    lm = dx.load("pycode")
    prompts = [SOURCE[i:i + 150] for i in (0, 700, 1900)]
    given = dict(max_new_tokens=40, eos_token_id=[])
    alg = Speculative(Realigned.of(lm, renamed(lm), 4, 5))
    out = dx.generate(lm, prompts, algorithm=alg, **given)
    assert np.array_equal(out.tokens, dx.generate(lm, prompts, **given).tokens)
    assert out.stats.accepted.sum() >= 0.9 * out.stats.drafted.sum() and out.stats.mean_accepted_length >= 4.5


@pytest.mark.full
def test_common_tokens_of_a_model_under_other_names_are_all_it_has():
    """Ids are mapped one to one: greedy and drawn tokens, all are accepted."""
    alg = Speculative(Intersection.of(target(), renamed(target())), shape=Chain(3))
    assert (np.asarray(alg.weights.ids) >= 0).all()
    out = dx.generate(target(), TEXTS, algorithm=alg, **MIXED)
    assert np.array_equal(out.tokens, plain().tokens)
    assert np.array_equal(out.stats.accepted, out.stats.drafted) and out.stats.mean_accepted_length > 3.9


def test_the_intersection_is_by_bytes_and_by_names():
    lm, draft = (LM(None, None, len(words.split()), Tokenizer(of_words(words, "</s>")))
                 for words in ("a b c </s> ab bc bca ca", "c </s> b a bc bca"))
    ids, pieces = common(lm, draft)
    assert ids.tolist() == [3, 2, 0, 1, -1, 4, 5, -1]
    assert pieces == [[3], [2], [0], [1], [3, 2], [4], [5], [0, 3]]


# 16 tokens of the target, of which the draft model has 9
LM16 = LM(*model("toy"), VOCABULARY, Tokenizer(of_words("a b c d e f g h ab cd abc de gh fa ha bc")))
DRAWS = 12_000       # a q that is a fifth too small shows
WORDS12 = "x h ab c b a d y cd e de xy"
CHAINS = {"chain": (Rejection(), Chain(2)), "tree": (MultiRound(), Fixed.balanced(2, 2))}


@functools.cache
def narrow():
    toy = Toy(12)
    return Intersection.of(LM16, LM(toy, toy.init_params(3), 12, Tokenizer(of_words(WORDS12))))


def decode16(alg, rows, new, **policy):
    params = Params(LM16.params, alg.weights)
    chain = build(rows, vocab_size=VOCABULARY, **policy)
    tokens, each = jnp.tile(jnp.asarray([PROMPT]), (rows, 1)), lambda x, kind=np.int32: np.full(rows, x, kind)
    s = drivers.begin(alg.bare(), LM16.model, params, chain, tokens, each(len(PROMPT)), size=16, max_new=each(new),
                      seed=each(7, np.uint32), request=np.arange(rows, dtype=np.uint32))
    s = drivers.prefill(alg.bare(), LM16.model, params, s, width=16)
    return drivers.advance(alg.bare(), LM16.model, params, chain, s, jnp.int32(500))


@pytest.mark.parametrize("case", often([], CHAINS))
def test_the_distribution_on_common_tokens_is_the_targets(case):
    """The law of tests/contracts/test_verifier.py holds for a draft model that has 9 of the 16 tokens."""
    assert (narrow().weights.ids >= 0).sum() == 9
    verify, shape = CHAINS[case]
    s = decode16(Speculative(narrow(), verify, shape), DRAWS, 3, **FLOORED["floored"])
    made = np.asarray(s.tokens)[:, len(PROMPT):len(PROMPT) + 3]
    counts = np.bincount(made @ [VOCABULARY**2, VOCABULARY, 1], minlength=VOCABULARY**3)
    assert chi_square(counts, joint("floored") * DRAWS) > ALARM
    assert 0 < np.asarray(s.stats.accepted).sum() < np.asarray(s.stats.drafted).sum()


@pytest.mark.wide
@pytest.mark.parametrize("verify", often([Rejection()], [SeedExact(), Rejection(), MultiRound()]))
def test_a_policy_that_forbids_all_common_tokens(verify):
    """Then the draft has nothing to say, and the target goes on alone."""
    banned = [[int(i)] for i in np.flatnonzero(np.asarray(narrow().weights.ids) >= 0)]
    s = decode16(Speculative(narrow(), verify, Chain(2)), 8, 8, temperature=1.0, bad_words_ids=banned)
    assert (np.asarray(s.status) == Status.LENGTH).all()
    assert not {t for row in texts(s) for t in row} & {i for i, in banned}
    if verify == SeedExact():
        plain = dx.generate(LM16, [PROMPT] * 8, max_new_tokens=8, seed=7, temperature=1.0, bad_words_ids=banned)
        assert texts(s) == plain.tokens.tolist()


def test_bad_arguments_are_refused_by_name():
    bare, lm = LM(*model("toy"), VOCABULARY, name="bare"), LM16
    for make in (Realigned.of, Intersection.of):
        with pytest.raises(ValueError, match="bare: has no tokenizer"):
            make(lm, bare)
    with pytest.raises(ValueError, match="no token in common"):
        Intersection.of(lm, LM(None, None, 2, Tokenizer(of_words("x y"))))
    with pytest.raises(ValueError, match="none of its tokens is a byte"):
        ByteVocabulary.build(Tokenizer(tokenizers.Tokenizer(models.WordLevel({"abc": 0, "de": 1}, "abc"))))
    with pytest.raises(ValueError, match="steps: got 0, takes at least 1"):
        Realigned(Toy(), steps=0)
    weights = Realigned.of(lm, lm).weights
    assert isinstance(weights, AlignedVocabularies)
    with pytest.raises(ValueError, match="window: got 4 bytes, takes 6 or more"):
        Realigned(Toy(), window=4).init(Params(None, weights), None)
