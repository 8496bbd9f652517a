"""The contract of models: what every architecture does, on small ones with random weights.

What a model says of a text does not depend on how the text came into its cache: as a prompt in chunks, token by token,
as drafts, in trees or beside other rows. The numbers of the papers and of transformers are in `tests/models`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import models
from decodax.core.types import Model
from decodax.core.window import Window, causal
from decodax.io.load import LM
from decodax.models import (
    EncoderText,
    Experts,
    Layer,
    Mamba,
    Mamba2,
    Mamba2Config,
    MambaConfig,
    NormConfig,
    OutputGate,
    Rope,
    Rwkv7,
    Rwkv7Config,
    RwkvX,
    RwkvXConfig,
    Transformer,
    cla,
    diffqkv,
    dual_chunk,
    echo_att,
    jrt,
    linear,
    linearized,
    llama,
    phd,
    yoco,
)
from decodax.models.blocks.options import BlockIndex
from decodax.models.latent.shape import Indexer, Latent
from decodax.models.recurrent.options import GatedDelta, RgLru, SelectiveScan, ShortConv, Ssd
from decodax.models.residual.options import LayerInputs
from decodax.models.rope import Proportional
from decodax.models.routing import ClippedSwiGLU
from tests.caches.small import PROMPTS
from tests.extending.pages import DOCS, run_page
from tests.laws.cases import padded
from tests.matrix import often
from tests.models.small import scored

BASE = llama(vocab=16, width=16, layers=3, heads=4, kv_heads=2, mlp=24, context=256)
ROOT = DOCS.parent
RWKV = dict(vocab=16, width=16, layers=2, head_dim=4, decay=3, rate=3, value=2, gate=4)
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: Transformer(BASE), "cla": lambda: Transformer(cla(BASE)),
    "cla of 3": lambda: Transformer(cla(BASE, 3)), "yoco": lambda: Transformer(yoco(BASE, 8)),
    "diffqkv": lambda: Transformer(diffqkv(llama(vocab=16, width=16, layers=1, heads=8, kv_heads=4, head_dim=4, mlp=24,
                                                 context=256), key_heads=2)),
    "echoes": lambda: Transformer(echo_att(dataclasses.replace(BASE, layers=BASE.layers[:1] * 5), ((1, 2, 3),))),
    "echoes of fewer keys": lambda: Transformer(echo_att(diffqkv(dataclasses.replace(
        BASE, kv_heads=4, layers=BASE.layers[:1] * 5), 2), ((1, 2, 3),))),
    "experts": lambda: Transformer(dataclasses.replace(BASE, layers=(*BASE.layers[:2], dataclasses.replace(
        BASE.layers[2], experts=Experts(count=6, chosen=2, width=12))))),
    "layer inputs": lambda: Transformer(dataclasses.replace(
        BASE, layers=(dataclasses.replace(BASE.layers[0], sliding=5), Layer(
            rope=Rope(8, scaling=Proportional(2)), head_dim=8, kv_heads=1, keys_as_values=True, mlp=20),
            dataclasses.replace(BASE.layers[0], sliding=5, reads=0)),
        value_norm=NormConfig(scaled=False), layer_inputs=LayerInputs(5, 14), layer_scale=True)),
    "experts beside an MLP": lambda: Transformer(dataclasses.replace(BASE, layers=(BASE.layers[0], dataclasses.replace(
        BASE.layers[1], experts=Experts(6, 2, 12, shared=20, logit_scale=0.25, expert_scale=True, branch_norms=True)))),
    ),
    "heads and norms of each place": lambda: Transformer(dataclasses.replace(
        BASE, block="sandwich", embed_norm=True, embed_norm_kind=NormConfig(scaled=False), out_norm_kind=NormConfig(
            eps=0.3), last_norm_kind=NormConfig(eps=0.1, unit_offset=True), layers=(
            dataclasses.replace(BASE.layers[0], heads=6, sliding=5, output_gate=OutputGate("heads", "softplus")),
            dataclasses.replace(BASE.layers[1], heads=2, sinks=True, output_gate=OutputGate("channels", bias=True)),
            dataclasses.replace(BASE.layers[2], heads=8, reads=1)))),
    "dual chunks": lambda: Transformer(dual_chunk(BASE, 12, 4)),
    "elu": lambda: Transformer(linear(BASE)), "elu beside softmax": lambda: Transformer(linear(BASE, layers=(0, 2))),
    "linearized": lambda: Transformer(linearized(BASE, group=8, kernel=9)),
    "linearized beside softmax": lambda: Transformer(linearized(BASE, (0, 2), group=4, kernel=13)),
    "based": lambda: Transformer(jrt(BASE, (1,), window=6, width=4, prefix=False)),
    "jrt": lambda: Transformer(jrt(BASE, (0, 1), window=6, width=4)),
    "griffin": lambda: Transformer(dataclasses.replace(BASE, layers=(
        Layer(recurrent=RgLru(12, 4)), Layer(recurrent=RgLru(12, 4, 2)), dataclasses.replace(
            BASE.layers[2], sliding=5)))),
    "latent": lambda: Transformer(dataclasses.replace(BASE, kv_heads=4, head_dim=7, layers=(
        Layer(rope=Rope(4, interleaved=True), latent=Latent(6, 5, 7)),
        Layer(rope=Rope(4), latent=Latent(8, 3), experts=Experts(count=6, chosen=2, width=12))))),
    "indexed latent": lambda: Transformer(dataclasses.replace(BASE, kv_heads=4, head_dim=7, layers=(
        Layer(rope=Rope(4), latent=Latent(6, 5, 7, indexer=Indexer(3, 5, 4))),) * 2)),
    "indexed blocks": lambda: Transformer(dataclasses.replace(BASE, glu=ClippedSwiGLU(limit=0.5), layers=(
        dataclasses.replace(BASE.layers[0], index=BlockIndex(2, 10, 3, 2)),
        dataclasses.replace(BASE.layers[1], index=BlockIndex(4, 8, 4, 3, 2))))),
    "gated delta": lambda: Transformer(dataclasses.replace(BASE, layers=(
        Layer(recurrent=GatedDelta(2, 4, 6, 5, chunk=8)),
        dataclasses.replace(BASE.layers[1], output_gate=OutputGate("channels")),
        Layer(recurrent=GatedDelta(1, 2, 4, 4, conv=2, rate=2.0), block="post")))),
    "kimi delta": lambda: Transformer(dataclasses.replace(BASE, layers=(
        Layer(recurrent=GatedDelta(2, 2, 6, 5, rank=3, chunk=8)), BASE.layers[1]))),
    "short convolution": lambda: Transformer(dataclasses.replace(BASE, layers=(
        Layer(recurrent=ShortConv(16)), BASE.layers[1], Layer(recurrent=ShortConv(16, 4, bias=True))))),
    "state-space halves": lambda: Transformer(dataclasses.replace(BASE, gated=False, activation="relu2", layers=(
        Layer(recurrent=Ssd(4, 8, 2, 6, chunk=8), half="attention"), Layer(half="mlp"), Layer(half="attention"),
        Layer(half="mlp", experts=Experts(count=6, chosen=2, width=12, shared=10, latent=8))))),
    "state space beside attention": lambda: Transformer(dataclasses.replace(
        BASE, gate_scale=0.8, mlp_scale=0.7, layers=(dataclasses.replace(BASE.layers[0], beside=True, recurrent=Ssd(
            4, 8, 1, 6, chunk=8, norm=None, factors=(0.5, 0.6, 0.7, 0.8, 0.9), out_factor=0.5)),) * 2)),
    "selective scan": lambda: Transformer(dataclasses.replace(BASE, layers=(
        Layer(recurrent=SelectiveScan(32, 3, 6, eps=1e-5)), Layer(), BASE.layers[2]))),
    "phd-2": lambda: phd(BASE), "phd-3": lambda: phd(BASE, 3), "phd-swa-3": lambda: phd(BASE, 3, 5),
    "phd-cswa-2": lambda: phd(BASE, 2, 4, 6), "phd-cswa-3": lambda: phd(BASE, 3, 6, 5),
    "mamba": lambda: Mamba(MambaConfig(vocab=16, width=16, layers=2, inner=32, state=6, rank=3)),
    "mamba-2": lambda: Mamba2(Mamba2Config(vocab=16, width=16, layers=2, heads=4, head_dim=8, groups=2, state=6,
                                           chunk=8)),
    "rwkv-7": lambda: Rwkv7(Rwkv7Config(**RWKV)),       # type: ignore[arg-type]
    "rwkv-x": lambda: RwkvX(RwkvXConfig(**RWKV | dict(layers=4), sparse=2, chunk=4, top=2, limit=None)),  # type: ignore
}
ELSEWHERE = {"EncoderDecoder": "tests/models/encoder_decoder/test_encoder_decoder.py",
             "MaskPredictor": "tests/drafters/test_specdec.py",
             "QuantizedMamba2": "tests/models/formats/test_quamba2.py"}
"""Networks with tests of their own: one reads another text than it writes, one is made of another network."""
BASES = {"ReadsAudio", "ReadsText", "RecurrentNetwork", "StateSpace"}
GUIDE = "the recurrent layer of the guide"
NAMES = [*MODELS, GUIDE]
READS_INPUTS = ("jrt",)
"""An encoder reads the prompt, so these are no draft models and score no texts."""
NO_TREE_BUFFER = ("rwkv-x",)
FIRST_COPIES = ("phd-2", "phd-3")
"""These read a prompt by the first copy of each token, which predicts nothing."""
OFTEN = ["mamba-2", "gated delta", "linearized beside softmax", "yoco", "phd-cswa-3", GUIDE]
LOOKUP = dx.Speculative(dx.drafts.PromptLookup(length=4))
TREE = dx.trees.Fixed.balanced(2, 2)


@functools.cache
def lm(name: str) -> LM:
    if name == GUIDE:
        return run_page("models")["recurrent"]
    model = MODELS[name]()
    params = model.init_params(jax.random.key(3))
    if name != "rwkv-7":
        params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
    for layer in params["layers"].values() if isinstance(params.get("layers"), dict) else ():
        for own in {"factor", "taps"} & set(layer.get("attn", ())):     # of linear attention, which begin as zeros
            layer["attn"][own] = jax.random.normal(jax.random.key(4), layer["attn"][own].shape)
    return LM(model=model, params=params, vocab_size=16)


def inputs(name: str, prompts: list[list[int]]) -> EncoderText | None:
    return EncoderText.of(prompts) if name in READS_INPUTS else None


@functools.cache
def run(name: str, algorithm: Any = None, chunk: int = 512, new: int = 12, rows: tuple[int, ...] = (0, 1, 2)) -> Any:
    prompts = [PROMPTS[i] for i in rows]
    return dx.generate(lm(name), prompts, algorithm=algorithm, chunk=chunk, max_new_tokens=new, seed=5, eos_token_id=[],
                       temperature=[(0.0, 0.9, 0.0)[i] for i in rows], request_ids=rows, inputs=inputs(name, prompts))


def empty(name: str, prompts: list[list[int]]) -> Any:
    """An empty cache of a row for each prompt."""
    return lm(name).model.init_cache(len(prompts), 64, params=lm(name).params, inputs=inputs(name, prompts))


def whole(name: str, texts: list[list[int]], prompts: list[list[int]]) -> list[np.ndarray]:
    """Logits `[T, V]` of texts that begin with prompts, each read at once."""
    window = causal(jnp.asarray(padded(texts, 64)[0]), jnp.zeros(len(texts), jnp.int32))
    window = window.replace(is_prefill=name not in FIRST_COPIES)
    logits, _ = scored(lm(name).model, lm(name).params, window, empty(name, prompts))
    return [np.asarray(row)[:len(text)] for row, text in zip(logits, texts, strict=True)]


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_every_network_is_here_or_has_tests_of_its_own() -> None:
    networks = {kind.__name__ for kind in subclasses(Model) if kind.__module__.startswith("decodax.models.")
                and not kind.__name__.startswith("_")} - BASES
    assert networks == {type(make()).__name__ for make in MODELS.values()} | ELSEWHERE.keys()
    assert all((ROOT / path).is_file() and name in (ROOT / path).read_text() for name, path in ELSEWHERE.items())


def test_every_change_of_a_decoder_is_here() -> None:
    """Functions that make a configuration or a network out of another configuration."""
    makers = {name for name in models.__all__ if inspect.isfunction(getattr(models, name))} - {"linear_weights"}
    used = {name for make in MODELS.values() for name in make.__code__.co_names}
    assert len(makers) > 7 and makers - used - {"llama", "t5"} == set()


@pytest.mark.wide(but=("linearized beside softmax",))
@pytest.mark.parametrize("name", often(OFTEN, NAMES))
def test_greedy_tokens_are_those_of_the_whole_text_whatever_the_chunks_of_the_prompt(name: str) -> None:
    plain = run(name)
    texts = [PROMPTS[row] + plain.tokens[row].tolist() for row in (0, 2)]
    for row, logits in zip((0, 2), whole(name, texts, PROMPTS[::2]), strict=True):
        assert logits[len(PROMPTS[row]) - 1:-1].argmax(-1).tolist() == plain.tokens[row].tolist()
    assert run(name, chunk=3).tokens.tolist() == plain.tokens.tolist()
    assert run(name, rows=(1,)).tokens.tolist() == plain.tokens[1:2].tolist()
    assert run(name, rows=(2, 1, 0)).tokens.tolist() == plain.tokens[::-1].tolist()
    assert name == GUIDE or len(set(plain.tokens[1].tolist())) > 2     # whose fresh weights repeat a token


@pytest.mark.wide(but=("linearized beside softmax",))
@pytest.mark.parametrize("name", often(OFTEN, NAMES))
def test_drafts_and_trees_change_no_token(name: str) -> None:
    plain = run(name).tokens.tolist()
    trees = dx.Speculative(dx.drafts.DraftModel(lm("llama")), shape=TREE)
    assert run(name, LOOKUP, chunk=4).tokens.tolist() == run(name, trees).tokens.tolist() == plain


@pytest.mark.wide
@pytest.mark.parametrize("shape", often([TREE], [dx.trees.Chain(3), TREE]), ids=["chain", "tree"])
@pytest.mark.parametrize("name", often(
    OFTEN, [name for name in NAMES if name not in (*NO_TREE_BUFFER, *READS_INPUTS)]))
def test_a_model_that_drafts_for_itself_is_always_right(name: str, shape: Any) -> None:
    drafts = dx.Speculative(dx.drafts.DraftModel(lm(name)), shape=shape)
    assert run("llama", drafts).tokens.tolist() == run("llama").tokens.tolist()
    out = run(name, drafts)
    assert out.tokens.tolist() == run(name).tokens.tolist()
    assert out.stats.rounds.tolist() == [12 // (shape.length + 1)] * 3


@pytest.mark.wide
@pytest.mark.parametrize("skip", often(["1"], ["1", "2", "12"]))
@pytest.mark.parametrize("name", often(["griffin"], ["llama", "linearized beside softmax", "griffin"]))
def test_a_model_that_drafts_with_some_of_its_layers_changes_no_token(name: str, skip: str) -> None:
    """The layers that are left out are all of one kind, or some of each."""
    drafts = dx.Speculative(dx.drafts.LayerSkip(skip=tuple(map(int, skip))), shape=TREE)
    assert run(name, drafts).tokens.tolist() == run(name).tokens.tolist()


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OFTEN, NAMES))
def test_each_path_of_a_tree_is_scored_as_a_text(name: str) -> None:
    """In one window beside a dead node, and level by level in a tree buffer; then the text goes on from a path."""
    model, params, text = lm(name).model, lm(name).params, PROMPTS[1][:14]
    new, parent = [3, 1, 5, 9, 2, 6, 8], [-1, 0, 0, 1, 1, 2, 3]
    paths = [[0]]
    for i in range(1, 7):
        paths.append([*paths[parent[i]], i])
    mask = np.array([[j in path for j in range(7)] for path in paths])
    depth = np.array([len(text) + len(path) - 1 for path in paths], np.int32)
    alive = np.arange(7) != 5
    want = np.stack([logits[-1] for logits in whole(
        name, [[*text, *(new[i] for i in path)] for path in paths], [text] * len(paths))])
    close = functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-3)

    cache = empty(name, [text])
    read = causal(jnp.array([text]), jnp.zeros(1, jnp.int32)).replace(is_prefill=True)
    cache = cache.commit(scored(model, params, read, cache)[1], read.positions)
    tree = Window(tokens=jnp.array([new]), positions=jnp.asarray(depth)[None], mask=jnp.asarray(mask)[None],
                  live=jnp.asarray(alive)[None])
    logits, entries = scored(model, params, tree, cache)
    close(logits[0][alive], want[alive])
    slots = jnp.array([[14, 15, -1, 16, -1, -1, 17]])       # the path 3 1 9 8 was true
    ends = [cache.commit(entries, slots)]
    if name not in NO_TREE_BUFFER:
        buffer, found, above = cache.tree_buffer(entries, 7), [], mask & ~np.eye(7, dtype=bool)
        for first, level in ((0, [0]), (1, [1, 2]), (3, [3, 4, 5]), (6, [6])):
            part = Window(tokens=jnp.array([[new[i] for i in level]]), positions=jnp.asarray(depth[level])[None],
                          mask=jnp.eye(len(level), dtype=bool)[None], live=jnp.ones((1, len(level)), bool))
            logits, more = scored(model, params, part, buffer.seen_by(jnp.asarray(above[level])[None]))
            buffer = buffer.append(more, part.positions, jnp.int32(first))
            found.append(logits[0])
        close(np.concatenate(found), want)
        ends.append(buffer.commit(slots))
    for after in ends:
        assert after.length.tolist() == [18]
        logits, _ = scored(model, params, causal(jnp.array([[7]]), jnp.array([18])), after)
        close(logits[0, 0], whole(name, [[*text, 3, 1, 9, 8, 7]], [text])[0][-1])


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OFTEN, [name for name in NAMES if name not in READS_INPUTS]))
def test_texts_are_scored_by_their_full_forward(name: str) -> None:
    texts = [PROMPTS[0], PROMPTS[2]]
    for text, found, logits in zip(texts, dx.score(lm(name), texts, chunk=16).logprobs, whole(name, texts, texts),
                                   strict=True):
        want = jax.nn.log_softmax(logits)
        np.testing.assert_allclose(found, want[np.arange(len(text) - 1), text[1:]], atol=2e-3)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OFTEN, NAMES))
def test_a_second_call_traces_nothing(name: str) -> None:
    call = lambda prompts, seed: dx.generate(
        lm(name), prompts, max_new_tokens=12, seed=seed, temperature=[0.5, 0.0, 1.0], eos_token_id=[],
        inputs=inputs(name, PROMPTS))
    call(PROMPTS, 5)        # programs of `run` may have been dropped since
    with jax.no_tracing(True):
        call([prompt[::-1] for prompt in PROMPTS], 6)
