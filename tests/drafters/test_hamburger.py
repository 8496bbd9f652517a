"""HAMburger: the authors' numbers, and decoding is what the whole text gives without a cache."""

import dataclasses
import itertools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import algorithms
from decodax.algorithms.speculative.heads import drafting_source
from decodax.io.drafters import TrainedDrafter, load_drafter, save_drafter
from decodax.io.drafters.hamburger import read_hamburger
from decodax.io.load import LM
from decodax.models import Transformer, llama
from decodax.models.drafters.hamburger import HamburgerHead
from decodax.models.names import flatten, sources
from decodax.train.tuning import ExampleRows, HamburgerLoss, grouped
from decodax.train.tuning.hamburger import group_starts
from tests.drafters.fresh import fresh
from tests.laws.cases import lm, model, prompts
from tests.matrix import often

SHAPE = llama(vocab=40, width=64, layers=16, heads=4, kv_heads=2, mlp=96, context=256)

# Jingyu6/hamburger 8df2e4b with torch 2.13 and transformers 5.24, float32: `HAMburgerLlama.forward` and its losses, its
# `_macro_step` for each group with the position of the group's last token, and `decreasing_v2` of its strategies
LOGITS = [[1.58344, -2.45386, 0.21151], [0.12, -7.37185, -5.80111], [-0.02427, -1.03195, -0.14943],
          [-12.28452, -17.15871, 21.13904], [-0.4816, -0.14064, -3.82742]]
STOPS = [2.19662, -2.92622, -2.03215, 0.4013, -19.69672, 1.89172, -11.94777, -2.85189, 7.31145]
MEAN, CROSS_ENTROPY, STOP = 4.803238, 16.143198, 2.487370
PROMPTS = [[7, 12, 33], [4, 19, 28, 2, 36, 10]]
TEXTS = {
    0.9: [[[33], [36], [33], [33], [33], [33], [33], [33]],
          [[15], [8, 32, 29], [2], [28], [20, 19, 2], [15, 12], [0, 12, 12, 12], [1]]],
    0.5: [[[33, 19, 3], [33, 19], [33, 19, 19], [4, 5, 2, 7], [37], [33, 19], [35], [37]],
          [[15], [8, 32, 29, 3], [39, 7, 7, 7], [13, 35], [30, 29, 28], [2, 29], [8, 21, 10, 4], [4, 3]]],
    0.2: [[[33, 19, 3], [33, 19, 14], [33, 19, 14], [5], [33], [33, 19], [5, 26], [0]],
          [[15], [8, 32, 29, 3], [39, 7, 7, 7], [13, 35], [30, 29, 28], [2, 29], [8, 21, 10, 4], [4, 3]]]}
STEPS = [[2, 1, 1, 1, 1, 1, 3, 1, 1, 1, 2, 1, 1, 1, 1, 3, 1, 4, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1],
         [1, 4, 1, 4, 4, 1, 2, 3, 1, 1, 1, 2, 3, 2, 1, 1, 2, 1, 4, 1]]


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A random tensor of a checkpoint, the same for a name everywhere."""
    x = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if name.endswith("norm.weight"):
        x = 1 + 0.1 * x
    elif name.endswith("bias"):
        x = 0.1 * x
    else:
        x = 0.5 * x if "embed_tokens" in name or name.endswith("pos") else 1.5 * x / np.sqrt(shape[-1])
    return (3 * x if "stop_head.4" in name else x).astype(np.float32)


def checkpoint() -> tuple[LM, TrainedDrafter]:
    """A model, embedder and decoder with random weights in the layout of the authors' checkpoints."""
    network, D = Transformer(SHAPE), SHAPE.width
    shapes = network.abstract_params()
    made = {}
    for path, source in sources("llama", SHAPE, shapes, ["model.embed_tokens.weight"]).items():
        shape = flatten(shapes)[path].shape
        x = drawn(f"model.{source.tensors[0]}", shape[::-1] if source.transpose else shape)
        made[path] = jnp.asarray(x.T if source.transpose else x)
    params = jax.tree.unflatten(jax.tree.structure(shapes), [made[path] for path in flatten(shapes)])
    linear = {"comp_embedder.merger.q_proj": (D, D), "comp_embedder.merger.k_proj": (D, D + D // 2),
              "comp_embedder.merger.v_proj": (D, D + D // 2), "comp_embedder.out_proj": (D, D),
              **{f"micro_step_decoder.stop_head.{i}": (1 if i == 4 else D, D) for i in (0, 2, 4)}}
    tensors = {"comp_embedder.merger.pos": (4, D // 2), **{f"{name}.weight": shape for name, shape in linear.items()},
               **{f"{name}.bias": shape[:1] for name, shape in linear.items()}}
    parts = {"self_attn.q_proj": (D, D), "self_attn.k_proj": (D // 2, D), "self_attn.v_proj": (D // 2, D),
             "self_attn.o_proj": (D, D), "mlp.gate_proj": (96, D), "mlp.up_proj": (96, D), "mlp.down_proj": (D, 96),
             "input_layernorm": (D,), "post_attention_layernorm": (D,)}
    tensors |= {f"micro_step_decoder.decoders.{i}.{part}.weight": shape for i in range(4)
                for part, shape in parts.items()}
    given = {name: drawn(name, shape) for name, shape in tensors.items()}
    given["comp_embedder.embedding.weight"] = np.asarray(params["embed"])
    head, weights = read_hamburger(given, SHAPE)
    assert head == dataclasses.replace(HamburgerHead.of(SHAPE), merge_heads=64)
    return LM(model=network, params=params, vocab_size=40), TrainedDrafter("hamburger", head, weights)


def groups_of(texts: list[list[list[int]]], given: int, size: int) -> tuple[jnp.ndarray, ...]:
    """`Groups` of texts, each a list of groups, of which the first `given` are not learned."""
    tokens, count = np.zeros((len(texts), size, 4), np.int32), np.zeros((len(texts), size), np.int32)
    for row, text in enumerate(texts):
        for i, group in enumerate(text):
            tokens[row, i, :len(group)], count[row, i] = group, len(group)
    return jnp.asarray(tokens), jnp.asarray(count), jnp.asarray((count > 0) & (np.arange(size) >= given))


def test_logits_ends_and_losses_are_those_of_the_authors_training():
    target, drafter = checkpoint()
    loss = HamburgerLoss(target.model, drafter.head)
    text = [[3], [17], [5], [9], [22, 30], [1], [8, 14, 25, 6], [2, 11]]
    groups, params = groups_of([text], 4, 9), (target.params, drafter.params)
    logits, stops = jax.jit(loss.outputs)(params, groups)
    made = [(i - 1, j) for i in range(4, 8) for j in range(len(text[i]))]
    logits, stops = (np.stack([np.asarray(x[0, i, j]) for i, j in made]) for x in (logits, stops))
    np.testing.assert_allclose(logits[[0, 1, 2, 5, 8], :3], LOGITS, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(stops, STOPS, rtol=1e-4, atol=1e-3)
    assert np.abs(logits).mean() == pytest.approx(MEAN, rel=1e-4)
    scalars = jax.jit(loss)(params, groups, None)[1]
    assert float(scalars["cross_entropy"]) == pytest.approx(CROSS_ENTROPY, rel=1e-4)
    assert float(scalars["stop"]) == pytest.approx(STOP, rel=1e-4)


def test_a_teacher_reads_the_text_token_by_token_and_groups_are_compared_with_it():
    """If all groups have one token, the model and a teacher with the same weights give the same distributions."""
    target, drafter = checkpoint()
    loss = HamburgerLoss(target.model, drafter.head, distill=2.0)
    texts = [[[3], [17], [22, 30], [1], [8, 14, 25, 6]], [[5], [9, 2], [11]]]
    groups, params = groups_of(texts, 2, 6), (target.params, drafter.params)
    teacher = jax.tree.map(lambda x: x * 1.1, target.params)
    logits = jax.nn.log_softmax(jax.jit(loss.outputs)(params, groups)[0])
    apart = []
    for row, text in enumerate(texts):
        whole = jnp.asarray([[*itertools.chain(*text)]])
        known = jax.nn.log_softmax(target.model.forward(teacher, whole)[0])
        at = [(i - 1, j) for i in range(1, len(text)) for j in range(len(text[i]))]
        apart += [float((jnp.exp(p) * (p - logits[row, i, j])).sum())
                  for p, (i, j) in zip(known, at, strict=False) if i + 1 >= 2]
    found, scalars = jax.jit(loss)(params, groups, teacher)
    assert float(scalars["kl"]) == pytest.approx(np.mean(apart), rel=1e-4)
    assert float(found) == pytest.approx(float(scalars["cross_entropy"] + 0.5 * scalars["stop"] + 2 * scalars["kl"]))
    alone = groups_of([[[token] for token in (3, 17, 5, 9)]], 1, 4)
    assert float(jax.jit(loss)(params, alone, target.params)[1]["kl"]) == pytest.approx(0, abs=1e-5)
    assert "kl" not in jax.jit(HamburgerLoss(target.model, drafter.head))(params, groups, None)[1]


@pytest.mark.wide
@pytest.mark.parametrize("confidence", often([0.5], TEXTS))
def test_the_text_is_that_of_the_authors_loop(confidence):
    """Two prompts of different lengths in a batch; the authors decode one at a time. A round more than groups: the last
    group is read before a row can end."""
    target, drafter = checkpoint()
    method = algorithms.make("hamburger", target, drafter, confidence=confidence)
    new = min(sum(map(len, groups)) for groups in TEXTS[confidence])
    out = dx.generate(target, PROMPTS, algorithm=method, max_new_tokens=new, eos_token_id=[])
    for row, groups in zip(np.asarray(out.tokens), TEXTS[confidence], strict=True):
        assert row[:new].tolist() == [*itertools.chain(*groups)][:new]
    ends = [np.cumsum([len(group) for group in groups]) for groups in TEXTS[confidence]]
    assert out.stats.rounds.tolist() == [2 + int((end < new).sum()) for end in ends]


@pytest.mark.wide
@pytest.mark.parametrize(("confidence", "which"), often([(0.6, "llama")], [
    (confidence, which) for confidence in (0.0, 0.6) for which in ("llama", "sliding")]))
def test_a_cache_of_groups_is_the_whole_text_without_a_cache(confidence, which):
    """By the network of the training, a token at a time: ragged rows, whose log-probabilities are the text's."""
    (network, weights), target = model(which), lm(which)
    drafter = fresh("hamburger", target)
    outputs = jax.jit(HamburgerLoss(network, drafter.head).outputs)

    def next_of(groups, group):
        given = groups_of([[*groups, [*group, 0]]], 0, 48)
        logits, stops = outputs((weights, drafter.params), given)
        at = len(groups) - 1, len(group)
        return jax.nn.log_softmax(logits[0][at]), 1 / (1 + np.exp(stops[0][at]))

    ids = [row for row in prompts(6) if len(row) > 3][:3]
    method = algorithms.make("hamburger", target, drafter, confidence=confidence)
    out = dx.generate(target, ids, algorithm=method, max_new_tokens=14, eos_token_id=[], logprobs=0)
    assert len({len(row) for row in ids}) > 1
    for row, found, noted, rounds in zip(ids, out.tokens, out.logprobs.raw, out.stats.rounds, strict=True):
        groups, made, scores = [[token] for token in row], [], []
        while len(made) < 14:
            groups.append([])
            for _ in range(4):
                logs, goes = next_of(groups[:-1], groups[-1])
                groups[-1].append(int(logs.argmax()))
                scores.append(float(logs.max()))
                if goes < confidence:
                    break
            made += groups[-1]
        assert found.tolist() == made[:14] and rounds == 1 + len(groups) - len(row)
        np.testing.assert_allclose(noted, scores[:14], atol=2e-4)


@pytest.mark.wide
def test_constraints_and_stop_strings_hold_inside_groups():
    """A stop string ends the text before the constraint does; all groups have four tokens."""
    target = lm("llama")
    method = algorithms.make("hamburger", target, fresh("hamburger", target), confidence=0)
    out = dx.generate(target, prompts(3), algorithm=method, max_new_tokens=30, temperature=0.8, eos_token_id=[1],
                      constraint="regex:(ab|cd|de){6}h(ab){9}", stop="h")
    assert all(re.fullmatch("(ab|cd|de){6}h?", text) for text in out.text)
    assert (out.stats.rounds < out.stats.tokens).all()


def test_a_drafter_is_stored_and_goes_with_this_method_alone(tmp_path):
    target, drafter = lm("llama"), fresh("hamburger", lm("llama"))
    save_drafter(tmp_path, drafter)
    assert load_drafter(tmp_path, target).head == drafter.head
    with pytest.raises(ValueError, match="only 'hamburger' takes it"):
        drafting_source(target, drafter)
    with pytest.raises(ValueError, match="length: got 5, takes 1 to 4"):
        algorithms.make("hamburger", target, drafter, length=5)
    with pytest.raises(ValueError, match="merge_heads: got 5 for a width of 16"):
        HamburgerHead((), 16, config=drafter.head.config, merge_heads=5)


def test_groups_are_those_of_the_authors_rule():
    for seed, steps in enumerate(STEPS):
        values = np.random.default_rng(seed).gamma(0.4, 1.0, (1, 40))
        assert np.diff(np.flatnonzero([*group_starts(values, np.ones((1, 40), bool), 4)[0], True])).tolist() == steps


def test_examples_become_groups():
    """Tokens of a prompt stay single, and no token is lost."""
    target, draw = lm("llama"), np.random.default_rng(3)
    tokens, learned = draw.integers(2, 16, (5, 12)), np.zeros((5, 12), bool)
    for row, (first, end) in enumerate([(1, 12), (4, 9), (11, 12), (2, 3), (6, 12)]):
        learned[row, first:end] = True
        tokens[row, end:] = 0
    made, count, known = grouped(target, ExampleRows(tokens.astype(np.int32), learned), 3, size=2)
    for row in range(5):
        each = [made[row, i, :n].tolist() for i, n in enumerate(count[row]) if n]
        assert [*itertools.chain(*each)] == tokens[row, :12 - learned[row, ::-1].argmax()].tolist()
        assert count[row][known[row]].sum() == learned[row].sum() and (count[row][~known[row]] <= 1).all()
