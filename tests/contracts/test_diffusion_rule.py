"""Every sampler of masked diffusion makes progress, keeps the given tokens, returns no mask and treats rows separately.

Each entry is compiled once: how far the model leans to the mask token is data.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax.algorithms.diffusion as d
from decodax.algorithms.diffusion import MaskedDiffusion
from decodax.common.registry import ALGORITHMS
from decodax.core import drivers
from decodax.core.algorithm import most_rounds
from decodax.core.round import python_loop, run
from decodax.core.state import Status
from decodax.core.types import LayeredModel, Params
from decodax.io.load import LM
from decodax.sampling import build
from tests.contracts.diffusion import BLOCK, NEW, SPEAKS
from tests.laws.cases import MASK, VOCABULARY, decode, model, prompts, texts
from tests.matrix import often

DRAW = np.random.default_rng(3)
FILTER = d.Filter(DRAW.normal(size=(BLOCK, 6)), DRAW.normal(size=6), DRAW.normal(size=(6, BLOCK)), np.zeros(BLOCK))
# how the models of an entry speak, and options for a text of twelve tokens and a model that is never sure
CASES = {
    "llada": ("full", dict(block_length=BLOCK, steps=3)), "dream": ("shifted", dict(steps=5, size=NEW)),
    "maskgit": ("full", dict(steps=5, size=NEW)), "mdlm": ("full", dict(steps=8, size=NEW)),
    "bd3-lm": ("blocks", {}), "remdm": ("full", dict(steps=6, eta=0.3, size=NEW)),
    "fast-dllm": ("shifted", dict(block_length=BLOCK, threshold=0.15)),
    "fast-dllm-2": ("shifted-blocks", dict(small_block_size=2, threshold=0.15, cache="dual")),
    "entropy-bounded": ("full", dict(gamma=3.0, block_length=BLOCK)), "sdar": ("blocks", dict(threshold=0.15)),
    "sbd": ("canvas", dict(gamma=3.0)), "sdlm": ("prefix", dict(threshold=0.15)),
    "dparallel": ("full", dict(entropy=2.5, block_length=BLOCK)),
    "llada2": ("blocks", dict(threshold=0.15, steps=2)),
    "llada2.1": ("blocks", dict(threshold=0.15, editing_threshold=0.12)),
    "freedave": ("full", dict(block_length=BLOCK, draft_steps=3)),
    "freedave++": ("shifted", dict(block_length=BLOCK, draft_steps=3, threshold=0.15)),
    "ssd": ("blocks", dict(length=2)),
    "d2f": ("full", dict(skip_threshold=0.15, block_add_threshold=0.25, decoded_token_threshold=0.5, most=3,
                         block_length=BLOCK)),
    "d3llm": ("shifted", dict(threshold=2.5, block_add_threshold=0.25, decoded_token_threshold=0.5, most=3,
                              block_length=BLOCK, suffix=NEW)),
    "assd": ("any-subset", dict(k=3)),
    "apd": ("shifted", dict(mixture_weight=0.6, max_lookahead=6, kv_window=2)),
    "prophet": ("full", dict(block_length=BLOCK, steps=3, answer=(6, 5), gaps=(1.5, 1.0, 0.8), size=NEW)),
    "learn2pd": ("full", dict(filter=FILTER, threshold=0.6, size=NEW)),
    "adablock": ("shifted", dict(delimiters=(2, 3, 5, 7), delimiter_threshold=0.1, block_length=BLOCK, threshold=0.15,
                                 cache="dual", size=NEW)),
    "localleap": ("full", dict(threshold=0.2, relaxed_threshold=0.12, radius=1, block_length=BLOCK)),
    "ccd": ("full", dict(steps=8, grow=3.0, size=NEW)),
    "dinfer-hierarchy": ("full", dict(threshold=0.3, low_threshold=0.1, block_length=BLOCK)),
    "dinfer-credit": ("full", dict(threshold=0.15, kept=3, block_length=BLOCK)),
    "dimple": ("shifted", dict(threshold=0.15, size=NEW)),
    "diffusion-gemma": ("canvas", dict(entropy_bound=1.0, steps=4, confidence_threshold=1.0)),
    "dinfer-vicinity": ("shifted", dict(block_length=BLOCK, threshold=0.15, prefix_look=2, after_look=2)),
    "dkv-cache": ("shifted", dict(block_length=BLOCK, cache_steps=3, packed=(10,))),
    "freecache": ("full", dict(block_length=BLOCK, steps=3, suffix=8)),
    "dllm-cache": ("shifted", dict(block_length=BLOCK, prompt_interval_steps=5, gen_interval_steps=3, size=NEW)),
    "flashdlm": ("shifted", dict(top=3, window_size=6)),
    "elastic-cache": ("full", dict(window_size=4, threshold=0.15, gamma=0.998, size=NEW)),
    "recap": ("full", dict(steps=5, every=3, packed=(6,), size=NEW)),
}
FEW = ("fast-dllm",)
SAMPLERS = [n for n, e in ALGORITHMS.items() if "diffusion" in e.needs and not e.alias_of]


class Leant:
    """A network with such a head."""

    def __init__(self, network, lean):
        self.network, self.lean = network, lean

    def __getattr__(self, name):
        return getattr(self.network, name)

    def logits(self, hidden):
        return self.network.logits(hidden).at[..., MASK].add(self.lean)


@dataclasses.dataclass(frozen=True)
class Leaning(LayeredModel):
    """A model that wants MASK as much as its parameters say."""

    base: object

    def init_cache(self, batch, capacity, *, params=None, inputs=None):
        return self.base.init_cache(batch, capacity)

    def apply(self, params, window, cache, keep=None):
        out = self.base.apply(params["own"], window, cache, keep)
        return dataclasses.replace(out, head=lambda h: out.head(h).at[..., MASK].add(params["lean"]))

    @property
    def config(self):
        return self.base.config

    @property
    def depth(self):
        return self.base.depth

    def walk(self, params, window, cache):
        return self.base.walk(params["own"], window, cache)

    def pieces(self, params):
        pieces = self.base.pieces(params["own"])
        return dataclasses.replace(pieces, network=Leant(pieces.network, params["lean"]))


def made(name):
    speaks, options = CASES.get(name, ("full", {}))
    network, weights = model("llama")
    lm = LM(network, weights, VOCABULARY)
    draft = dict(draft=lm) if name in ALGORITHMS and ALGORITHMS[name].takes_draft else {}
    return ALGORITHMS[name].make(dataclasses.replace(lm, diffusion=SPEAKS[speaks]), **draft, **options)


def begun(alg, ids, *, policy=None, lean=0.0, eos=None, request=None, new=NEW, size=64, template=None):
    network, weights = model("llama")
    params = Params({"own": weights, "lean": jnp.float32(lean)}, alg.weights)
    tokens, lengths = np.zeros((len(ids), size), np.int32), np.array([len(p) for p in ids], np.int32)
    for i, given in enumerate(ids):
        tokens[i, :len(given)] = given
        if template is not None:
            tokens[i, len(given):len(given) + len(template)] = template
    # rows by turns greedy and sampled
    chain = build(len(ids), vocab_size=VOCABULARY, eos_token_id=[[MASK]] * len(ids) if eos is None else eos,
                  **(policy or dict(temperature=[0.0, 0.8, 0.8][:len(ids)], repetition_penalty=1.2)))
    request = np.arange(len(ids)) if request is None else np.asarray(request)
    s = drivers.begin(alg, Leaning(network), params, chain, jnp.asarray(tokens), lengths, size=size,
                      max_new=np.full(len(ids), new, np.int32), seed=np.uint32(5), request=request.astype(np.uint32))
    return Leaning(network), params, chain, drivers.prefill(alg, Leaning(network), params, s, width=16)


def sample(alg, ids, **options):
    network, params, chain, s = begun(alg, ids, **options)
    return drivers.advance(alg, network, params, chain, s, jnp.int32(most_rounds(alg, NEW, len(ids))))


@functools.cache
def free(name):
    return sample(made(name), prompts(3, longest=9))


def in_one_process(default, wide=()):
    """The entries, those of `wide` marked so, and others that are not in `default` marked `full`; all tests of one
    run in the same process."""
    marks = lambda n: [pytest.mark.xdist_group(f"sampler {n}"), *[pytest.mark.wide] * (n in wide),
                       *[pytest.mark.full] * (n not in default)]
    return [pytest.param(n, marks=marks(n)) for n in SAMPLERS]


ELSEWHERE = {"adablock", "apd", "assd", "d2f", "d3llm", "diffusion-gemma", "dimple", "dinfer-credit", "dkv-cache",
             "dllm-cache", "elastic-cache", "entropy-bounded", "fast-dllm-2", "flashdlm", "freecache", "freedave",
             "freedave++", "llada2", "llada2.1", "localleap", "maskgit", "mdlm", "prophet", "recap", "remdm", "sbd",
             "sdar", "sdlm", "ssd"}
"""What is decoded here only with `--all`: in default and wider tests, a comparison with its published loop under
`tests/algorithms/diffusion`, with its authors' outcomes under `tests/conformance`, or an entry with the same parts
stands for it."""


@pytest.fixture(scope="module", params=in_one_process(
    set(SAMPLERS) - ELSEWHERE, wide=("bd3-lm", "dinfer-vicinity", "dream", "fast-dllm", "learn2pd")))
def name(request):
    """Each entry in turn, with all tests of it in a row and in one process: they run the same program."""
    return request.param


def test_every_entry_has_a_case():
    assert set(CASES) == set(SAMPLERS)


def test_a_sampler_finishes_and_keeps_what_it_was_given(name):
    s, ids = free(name), prompts(3, longest=9)
    assert np.asarray(s.status).tolist() == [Status.LENGTH] * 3
    assert [len(row) for row in texts(s)] == [NEW] * 3
    assert all(0 <= t < VOCABULARY and t != MASK for row in texts(s) for t in row)
    assert [np.asarray(s.tokens)[i, :len(p)].tolist() for i, p in enumerate(ids)] == ids


def test_every_step_makes_progress_even_if_the_model_predicts_mask(name):
    alg = made(name)
    s = sample(alg, prompts(3, longest=9), lean=1e4)
    assert np.asarray(s.status).tolist() == [Status.LENGTH] * 3
    assert all(MASK not in row for row in texts(s))
    if not (isinstance(alg, MaskedDiffusion) and isinstance(alg.remask, d.ReMDM | d.Edit)):
        # a step a token, also of a last block that overhangs, and for each of four blocks at most a forward that writes
        # its entries
        spare = (BLOCK - 1) * alg.adapter.attention.overhangs
        assert (np.asarray(s.stats.rounds) <= NEW + (NEW // BLOCK + 1) + spare).all()


def test_a_row_does_not_depend_on_its_batch_mates(name):
    ids, alg = prompts(3, longest=9), made(name)
    for i in (0, 2):
        alone = sample(alg, [ids[i]] * 3, request=[i] * 3, policy=dict(
            temperature=[0.0, 0.8, 0.8][i], repetition_penalty=1.2))
        assert texts(alone) == [texts(free(name))[i]] * 3
        assert np.asarray(alone.stats.rounds)[0] == np.asarray(free(name).stats.rounds)[i]


@pytest.mark.wide
@pytest.mark.parametrize("name", in_one_process(FEW))
def test_a_batch_equals_its_rows_one_by_one(name):
    ids, alg = prompts(3, longest=9), made(name)
    row = sample(alg, ids[1:2], request=[1], policy=dict(temperature=0.8, repetition_penalty=1.2))
    assert texts(row) == texts(free(name))[1:2]


@pytest.mark.wide
@pytest.mark.parametrize("name", in_one_process(FEW))
def test_the_compiled_loop_is_the_python_loop_bit_for_bit(name):
    alg = made(name)
    network, params, chain, s = begun(alg, prompts(3, longest=9))
    s = run(alg, network, params, chain, s, 200, loop=python_loop)
    bits = lambda x: x if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.random.key_data(x)
    assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(jax.tree.leaves(s), jax.tree.leaves(free(name)),
                                                               strict=True))


def test_a_row_ends_with_its_first_end_of_sequence(name):
    if name in ("remdm", "learn2pd", "d3llm", "elastic-cache"):
        pytest.skip("ReMDM goes on behind it, the others look for it ahead")
    whole = texts(free(name))
    ends = [row[5] for row in whole]
    s = sample(made(name), prompts(3, longest=9), eos=np.array(ends)[:, None])
    for row, end, status in zip(texts(s), ends, np.asarray(s.status), strict=True):
        assert status == Status.EOS and row.index(end) == len(row) - 1
    assert all(row == full[:len(row)] for row, full in zip(texts(s), whole, strict=True))


A = d.Adapter(MASK)
BLOCKS = d.Adapter(MASK, attention=d.BlockCausal(BLOCK))
SHIFTED = d.Adapter(MASK, shift=True, attention=d.BlockCausal(BLOCK))
JOINED = d.Adapter(MASK, shift=True, attention=d.CausalPrefix(joined=True))
CAUSAL = d.Adapter(MASK, attention=d.CausalPrefix())
SURE, ANCHORED = dict(unmask=d.Threshold(0.15)), dict(unmask=d.Anchored(d.Threshold(0.15)))
FIXED, ALIGNED = d.Blocks(BLOCK), d.Blocks(BLOCK, aligned=True)
RUN = dict(windows=d.Sliding(BLOCK), score=d.Position(), unmask=d.ConfidentPrefix(0.12))
SAME = {
    "threshold-1": (MaskedDiffusion(A, FIXED, unmask=d.Threshold(1.0)), MaskedDiffusion(A, FIXED)),
    "entropy-bound-0": (MaskedDiffusion(A, FIXED, unmask=d.EntropyBound(0.0)), MaskedDiffusion(A, FIXED)),
    "factor-0": (MaskedDiffusion(A, FIXED, unmask=d.Factor(0.0)), MaskedDiffusion(A, FIXED)),
    "dual-every-step": (MaskedDiffusion(A, FIXED, **SURE, caching=d.DualCache(1)), MaskedDiffusion(A, FIXED, **SURE)),
    "vicinity-of-all": (MaskedDiffusion(A, FIXED, **SURE, caching=d.Vicinity(64, 64)),
                        MaskedDiffusion(A, FIXED, **SURE)),
    "frozen-nowhere": (MaskedDiffusion(A, FIXED, **SURE, caching=d.Frozen(64, before=64)),
                       MaskedDiffusion(A, FIXED, **SURE)),
    "delayed-tokens-0-1": (MaskedDiffusion(A, FIXED, **SURE, caching=d.DelayedTokens(0, 1)),
                           MaskedDiffusion(A, FIXED, **SURE)),
    "greedy-every-step": (MaskedDiffusion(A, FIXED, d.Random(once=True), caching=d.DKVCacheGreedy(refresh=1)),
                          MaskedDiffusion(A, FIXED, d.Random(once=True))),
    "similarity-1-1": (MaskedDiffusion(A, FIXED, **SURE, caching=d.Similarity(1, 1, size=NEW)),
                       MaskedDiffusion(A, FIXED, **SURE)),
    "similarity-all": (MaskedDiffusion(A, FIXED, **SURE, caching=d.Similarity(1, 99, 1.0, size=NEW)),
                       MaskedDiffusion(A, FIXED, **SURE)),
    "similarity-frozen": (MaskedDiffusion(A, FIXED, **SURE, caching=d.Similarity(99, 1, size=NEW)),
                          MaskedDiffusion(A, FIXED, **SURE, caching=d.Similarity(99, 99, 1.0, size=NEW))),
    "blocks-cached": (MaskedDiffusion(BLOCKS, ALIGNED, **SURE, caching=d.BlockCache()),
                      MaskedDiffusion(BLOCKS, ALIGNED, **SURE)),
    "blocks-fused": (MaskedDiffusion(BLOCKS, ALIGNED, **SURE, caching=d.FusedCache()),
                     MaskedDiffusion(BLOCKS, ALIGNED, **SURE)),
    "shifted-blocks-cached": (MaskedDiffusion(SHIFTED, ALIGNED, **SURE, caching=d.BlockCache()),
                              MaskedDiffusion(SHIFTED, ALIGNED, **SURE)),
    "shifted-blocks-fused": (MaskedDiffusion(SHIFTED, ALIGNED, **SURE, caching=d.FusedCache()),
                             MaskedDiffusion(SHIFTED, ALIGNED, **SURE)),
    "anchored-cached": (MaskedDiffusion(SHIFTED, ALIGNED, **ANCHORED, caching=d.AnchorCache()),
                        MaskedDiffusion(SHIFTED, ALIGNED, **ANCHORED)),
    "inside-a-block-of-one": (
        MaskedDiffusion(SHIFTED, d.SubBlocks(BLOCK, True, 1), **SURE, caching=d.SubBlockCache(1)),
        MaskedDiffusion(SHIFTED, d.SubBlocks(BLOCK, True, 1), **SURE, caching=d.BlockCache())),
    "joined-cached": (MaskedDiffusion(JOINED, **RUN, caching=d.BlockCache()), MaskedDiffusion(JOINED, **RUN)),
    "joined-fused": (MaskedDiffusion(JOINED, **RUN, caching=d.FusedCache()), MaskedDiffusion(JOINED, **RUN)),
    "causal-cached": (MaskedDiffusion(CAUSAL, FIXED, **SURE, caching=d.BlockCache()),
                      MaskedDiffusion(CAUSAL, FIXED, **SURE)),
    "causal-fused": (MaskedDiffusion(CAUSAL, FIXED, **SURE, caching=d.FusedCache()),
                     MaskedDiffusion(CAUSAL, FIXED, **SURE)),
    "maskgit-as-written": (MaskedDiffusion(A, d.Whole(NEW), unmask=d.All(), remask=d.MaskBottom(5)),
                           MaskedDiffusion(A, d.Whole(NEW), unmask=d.Quota(5, "cosine"))),
    "sub-blocks-of-all": (MaskedDiffusion(A, d.SubBlocks(BLOCK, sub=BLOCK)), MaskedDiffusion(A, FIXED)),
    "freedave": (MaskedDiffusion(A, FIXED, verify=d.BranchExact(3)), MaskedDiffusion(A, FIXED)),
    "freedave-quota": (MaskedDiffusion(A, d.Blocks(8), unmask=d.Quota(3), verify=d.BranchExact(3)),
                       MaskedDiffusion(A, d.Blocks(8), unmask=d.Quota(3))),
    "freedave-cached": (MaskedDiffusion(BLOCKS, ALIGNED, caching=d.BlockCache(), verify=d.BranchExact(3)),
                        MaskedDiffusion(BLOCKS, ALIGNED, caching=d.BlockCache())),
}
OFTEN = ("shifted-blocks-cached",)       # for the dual cache, Fast-dLLM's loop decides below


GREEDY = ("anchored-cached", "inside-a-block-of-one")
"""One of the two takes a forward more before it decides what stands behind the third prompt, and noise is addressed by
the number of a row's forwards."""


@functools.cache
def outcome(alg, greedy=False):
    return sample(alg, prompts(3, longest=9), policy=dict(temperature=0, repetition_penalty=1.2) if greedy else None)


@pytest.mark.wide
@pytest.mark.parametrize("case", often(OFTEN, SAME))
def test_two_ways_of_saying_the_same_agree(case):
    left, right = (outcome(alg, case in GREEDY) for alg in SAME[case])
    assert texts(left) == texts(right)
    if case.startswith("freedave"):
        assert (np.asarray(left.stats.rounds) <= np.asarray(right.stats.rounds)).all()
        assert np.asarray(left.stats.accepted).sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize("name", [n for n in SAMPLERS if ALGORITHMS[n].guarantee == "seed-exact"])
def test_a_lossless_sampler_writes_what_it_speeds_up(name):
    """Token for token, greedy and sampled rows, in fewer forwards; every entry of which the registry says so."""
    alg = made(name)
    one = dict(k=1) if isinstance(alg, d.AnySubset) else dict(verify=d.Sequential())
    fast, slow = free(name), sample(plain := dataclasses.replace(alg, **one), prompts(3, longest=9))
    assert alg != plain and texts(fast) == texts(slow)
    assert np.asarray(fast.stats.rounds).sum() < np.asarray(slow.stats.rounds).sum()


@pytest.mark.wide
def test_frozen_tokens_stay_and_holes_are_filled():
    caching = d.DualCache()
    alg = MaskedDiffusion(dataclasses.replace(A, canvas=d.Template()), FIXED, **SURE, caching=caching)
    template = [MASK, MASK, 3, MASK, 7, 7, 7, 7, MASK, 9, MASK, 2]
    s = sample(alg, prompts(3, longest=9), template=template)
    for row in texts(s):
        assert MASK not in row and all(a in (b, MASK) for a, b in zip(template, row, strict=True))
    # each of the blocks takes a round even where nothing is open
    assert (np.asarray(s.stats.rounds) <= 6).all()
    blank = sample(alg, prompts(3, longest=9), template=[MASK] * NEW)
    plain = sample(MaskedDiffusion(A, FIXED, **SURE, caching=caching), prompts(3, longest=9))
    assert texts(blank) == texts(plain)


@pytest.mark.wide
def test_log_probabilities_are_those_of_the_round_that_unmasked():
    s = decode(MaskedDiffusion(A, d.Blocks(8), unmask=d.Quota(4)), "llama", prompts(2), dict(temperature=1.0), new=8,
               top_logprobs=2)
    raw, done = np.asarray(s.record.raw), np.asarray(s.length)
    for i, end in enumerate(done):
        assert (raw[i, end - 8:end] < 0).all() and (raw[i, end - 8:end] > -20).all()
        assert np.allclose(raw[i, end - 8:end], np.asarray(s.algo.confidence)[i, end - 8:end], atol=1e-5)


def test_a_policy_that_reads_left_to_right_is_refused():
    with pytest.raises(ValueError, match=r"NoRepeatNgram.*left to right"):
        decode(MaskedDiffusion(A, FIXED), "llama", prompts(2), dict(no_repeat_ngram_size=2))


def test_parts_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="steps: got 0, takes 1 or more"):
        d.Quota(0)
    with pytest.raises(ValueError, match="block_length: got 8, the model was trained with blocks of 4"):
        ALGORITHMS["llada"].make(LM(*model("llama"), VOCABULARY, diffusion=SPEAKS["blocks"]), block_length=8)
    with pytest.raises(ValueError, match="which is autoregressive, takes a diffusion model"):
        ALGORITHMS["llada"].make(LM(*model("llama"), VOCABULARY))
    with pytest.raises(ValueError, match=r"caching: got Dual.*takes one that persists"):
        MaskedDiffusion(CAUSAL, FIXED, caching=d.DualCache())
    with pytest.raises(ValueError, match="without shift, which alone has use for the last token"):
        d.Adapter(MASK, attention=d.CausalPrefix(ordered=True))
    with pytest.raises(ValueError, match="joined: got True, takes False with ordered"):
        d.CausalPrefix(joined=True, ordered=True)
    with pytest.raises(ValueError, match="cache: got 'dual', takes 'none' for BlockCausal"):
        ALGORITHMS["freedave"].make(LM(*model("llama"), VOCABULARY, diffusion=SPEAKS["blocks"]), cache="dual")
    with pytest.raises(ValueError, match=r"lm: got Full.*takes causal-prefix attention without shift"):
        ALGORITHMS["sbd"].make(LM(*model("llama"), VOCABULARY, diffusion=SPEAKS["full"]))
