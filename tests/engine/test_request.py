"""What a caller may give and how it is read: prompts in every form, arguments for each prompt and sample, what the
model's own files ask for. Programs are shared: a batch of one or two rows, plain or sampled."""

import collections
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.contrastive.contrastive_search import ContrastiveSearch, hidden_width
from decodax.core import keys
from decodax.core.state import Status
from decodax.engine.request import Request
from decodax.io.text import Tokenizer
from decodax.models.diffusion import Diffusion
from tests.small_tokenizers import byte_level, of_words, save

IDS = [[40, 41, 42, 43, 44], [50, 51]]
WARM = dict(temperature=1.0, max_new_tokens=6, eos_token_id=[])


def said(lm: dx.LM, **config) -> dx.LM:
    """The model with another generation config."""
    return dataclasses.replace(lm, generation_config=config)


def rows(result: dx.Result) -> list[list[int]]:
    return [result.row(i).tolist() for i in range(len(result))]


# batches and samples

@pytest.mark.wide
def test_a_greedy_prompt_stays_greedy_in_a_batch(lm):
    options = {**WARM, "temperature": [0.0, 1.3], "seed": [3, 4], "top_p": [1.0, 0.9]}
    whole = rows(dx.generate(lm, IDS, **options))        # the longer prompt comes first, and last in its batches
    assert rows(dx.generate(lm, IDS, batch_size=1, **options)) == whole
    assert whole[0] == rows(dx.generate(lm, IDS, **{**options, "temperature": [0.0, 0.0]}))[0]


def test_all_that_belongs_to_a_prompt_is_cut_with_it(lm):
    ids = [[40, 41], [42], [43, 44, 45]]
    given = dict(max_new_tokens=[4, 5, 6], min_new_tokens=[1, 2, 3], seed=[7, 8, 2 ** 40], request_ids=[9, 8, 7],
                 guidance_scale=[1.0, 2.0, 3.0], negative_prompts=[[60], [61, 62], [63]], temperature=[0.0, 0.5, 1.0],
                 bad_words_ids=[[[1]], None, [[2, 3]]], logit_bias=[{1: 1.0}, {2: 2.0}, {3: 3.0}],
                 eos_token_id=[[1], [2, 3], None], suppress_tokens=[[5], None, [6, 7]], top_k=[None, 3, 4],
                 sequence_bias=[{(1, 2): 1.0}, {}, {(3,): 2.0}], watermarking_config={"bias": [1.0, 2.0, 3.0]})
    few = Request.read(lm, ids, **given).select([2, 0])
    pick = lambda value: [value[2], value[0]] if isinstance(value, list) else value
    config = {"bias": [3.0, 1.0]}
    alone = Request.read(lm, pick(ids), **{**{k: pick(v) for k, v in given.items()}, "watermarking_config": config})
    assert few.prompts == alone.prompts and few.negative == alone.negative
    for name in ("max_new", "min_new", "seeds", "request_ids", "guidance"):
        assert np.array_equal(getattr(few, name), getattr(alone, name)), name
    for a, b in zip(few.policy.transforms, alone.policy.transforms, strict=True):
        assert type(a) is type(b)
        assert jax.tree.all(jax.tree.map(np.array_equal, a, b)), type(a)
    assert np.array_equal(few.policy.eos, alone.policy.eos)


def test_sampling_may_differ_from_sample_to_sample(lm):
    options = {**WARM, "num_samples": 2}
    mixed = rows(dx.generate(lm, IDS, **{**options, "temperature": [0.0, 1.0, 1.0, 0.0]}))
    warm, cold = (rows(dx.generate(lm, IDS, **{**options, "temperature": t})) for t in (1.0, [0.0] * 2))
    assert mixed == [cold[0], warm[1], warm[2], cold[3]]
    assert rows(dx.generate(lm, IDS, batch_size=1, **{**options, "temperature": [0.0, 1.0, 1.0, 0.0]})) == mixed
    chain = Request.read(lm, IDS[:1], num_samples=3, temperature=[0.1, 0.2, 0.3], mirostat_tau=[1.0, 2.0, 3.0]).policy
    assert chain.transforms[0].temperature.tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_the_state_of_a_transform_begins_with_the_samples_own_setting(lm):
    """Mirostat's mu starts at twice its tau."""
    from decodax.engine.batch import Job
    request = Request.read(lm, IDS[:1], num_samples=3, temperature=1.0, mirostat_tau=[1.0, 2.0, 3.0], max_new_tokens=4)
    assert Job.begin(request).state.policy[1][:3].tolist() == [2.0, 4.0, 6.0]


def test_all_bits_of_a_seed_count(lm):
    seeds = [3, 3 + 2 ** 32, 2 ** 63, 2 ** 64 - 1]
    texts = [rows(dx.generate(lm, IDS, seed=seed, **WARM)) for seed in seeds]
    assert len({str(t) for t in texts}) == len(seeds)
    zero = jnp.zeros(1, jnp.uint32)
    key = lambda words: jax.random.key_data(keys.row_keys(jnp.array([words], jnp.uint32), zero, zero))
    assert np.array_equal(key(7), key([0, 7])) and not np.array_equal(key(7), key([1, 7]))
    for wrong in (-1, 2 ** 64, 1.0, None, True):
        with pytest.raises(ValueError, match="seed: got"):
            dx.generate(lm, IDS, seed=wrong)


# prompts

class Encoding(collections.UserDict):
    """As transformers' BatchEncoding."""


PADDED = np.array([[40, 41, 42, 43, 44], [9, 9, 9, 50, 51]])
MASK = [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]


def forms() -> dict[str, object]:
    """Both prompts in every form."""
    torch = pytest.importorskip("torch")
    return {
        "tuples": (tuple(IDS[0]), tuple(IDS[1])), "arrays": [np.array(row, np.uint8) for row in IDS],
        "jax": [jnp.array(row) for row in IDS], "torch": [torch.tensor(row) for row in IDS],
        "iterator": iter(IDS), "generator": (row for row in IDS), "deque": collections.deque(IDS),
        "padded": Encoding(input_ids=PADDED, attention_mask=np.array(MASK)),
        "padded torch": {"input_ids": torch.tensor(PADDED), "attention_mask": torch.tensor(MASK)},
        "padded right": {"input_ids": [IDS[0], [50, 51, 9, 9, 9]], "attention_mask": [[1] * 5, [1, 1, 0, 0, 0]],
                         "token_type_ids": [[0] * 5] * 2},
        "ragged": {"input_ids": IDS}, "mixed": [np.array(IDS[0]), {"input_ids": IDS[1]}],
        "scalars": [[np.int32(t) for t in IDS[0]], [jnp.int32(t) for t in IDS[1]]]}


def test_prompts_come_in_every_form(lm):
    for name, form in forms().items():
        assert Request.read(lm, form).prompts == IDS, name
    square = [[1, 2, 3], [4, 5, 6]]
    for array in (np.array(square), jnp.array(square)):
        assert Request.read(lm, array).prompts == square             # a prompt in each row
        assert Request.read(lm, array[0]).prompts == square[:1]
    chat = [{"role": "user", "content": "hi"}]
    assert Request.read(lm, chat).prompts == Request.read(lm, [chat]).prompts == [lm.tokenizer.encode_chat(chat)]
    texts = ["ab", "c"]
    for form in (tuple(texts), np.array(texts), iter(texts), np.array(texts, object)):
        assert Request.read(lm, form).prompts == [lm.tokenizer.encode(t) for t in texts]


def test_a_text_beyond_the_models_vocabulary_is_refused(lm):
    small = dataclasses.replace(lm, vocab_size=120)
    with pytest.raises(ValueError, match=r"prompts\[1\]: the tokenizer gives token id \d+, which is outside"):
        dx.generate(small, ["!!", "def fib"])
    for bos in (120, "<s>"):
        with pytest.raises(ValueError, match=r"prompts\[0\]: is empty, and the model's BOS token is"):
            dx.generate(dataclasses.replace(small, tokenizer=None, generation_config={"bos_token_id": bos}), [[]])


def test_characters_that_a_tokenizer_would_drop_are_named():
    words = Tokenizer(of_words("a b c ab </s>", "</s>"))
    assert words.encode("abc</s>a") == [3, 2, 4, 0]
    with pytest.raises(ValueError, match="no token for 'x', ' ' and would drop them"):
        words.encode("ax b")
    for tok in (words, Tokenizer(byte_level())):
        with pytest.raises(ValueError, match=r"text: got '\\ud800' at position 1, takes Unicode characters"):
            tok.encode("a\ud800")
    assert Tokenizer(byte_level()).encode("日x")


# what the model's files say

def test_the_lengths_of_a_config_are_honoured(lm):
    budgets = lambda lm, **given: Request.read(lm, IDS, **given).max_new.tolist()
    assert budgets(said(lm)) == [64, 64]
    assert budgets(said(lm, max_length=30)) == [25, 28]
    assert budgets(said(lm, max_length=30, max_new_tokens=0)) == [0, 0]
    assert budgets(said(lm, max_length=30), max_new_tokens=[3, None]) == [3, 28]
    assert budgets(said(lm, max_new_tokens=5), max_length=[9, 7]) == [4, 5]
    assert Request.read(said(lm, min_new_tokens=3), IDS).min_new.tolist() == [3, 3]
    assert Request.read(said(lm, min_new_tokens=3), IDS, min_new_tokens=0).min_new.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"generation config of .*: max_length: got 4 for a prompt of 5 tokens"):
        dx.generate(said(lm, max_length=4), IDS)
    with pytest.raises(ValueError, match="max_length: got 4 for a prompt of 5 tokens"):
        dx.generate(lm, IDS, max_length=4)
    with pytest.raises(ValueError, match="max_length and max_new_tokens: got both"):
        dx.generate(lm, IDS, max_length=9, max_new_tokens=4)


def test_a_forced_end_is_where_the_call_puts_it(lm):
    config = said(lm, forced_eos_token_id=7, max_new_tokens=3, eos_token_id=7)
    (forced,) = (t for t in Request.read(config, IDS, max_new_tokens=9).policy.transforms if hasattr(t, "max_new"))
    assert forced.max_length.tolist() == [14, 11] and forced.max_new.min() > 100


def test_samples_stop_strings_and_time_of_a_config_are_honoured(lm):
    assert Request.read(said(lm, num_return_sequences=3), IDS).samples == 3
    assert Request.read(said(lm, num_return_sequences=3), IDS, num_samples=1).samples == 1
    assert Request.read(said(lm, num_return_sequences=3), IDS[0], "stream").samples == 1
    assert Request.read(said(lm, stop_strings=["a", "b"]), IDS).stop == ("a", "b")
    assert Request.read(said(lm, stop_strings="a"), IDS, stop=[]).stop == ()
    assert Request.read(said(lm, max_time=2), IDS).max_time == 2.0
    out = dx.generate(said(lm, max_time=1e-9), IDS, **{**WARM, "max_new_tokens": 60})
    assert out.status == [Status.TIME] * 2 and (out.lengths > 0).all() and (out.lengths < 60).all()
    whole = dx.generate(lm, IDS, **{**WARM, "max_new_tokens": 60})
    assert [row[:len(cut)] for row, cut in zip(rows(whole), rows(out), strict=True)] == rows(out)
    stream = dx.stream(lm, IDS[0], max_time=1e-9, **{**WARM, "max_new_tokens": 60})
    assert "".join(stream) == stream.result.text[0] and stream.result.status == [Status.TIME]


def test_unsupported_settings_of_a_generation_config_say_how_to_go_on(lm):
    contrasts = said(lm, penalty_alpha=0.6, top_k=5)
    assert Request.read(contrasts, IDS).algorithm == ContrastiveSearch(hidden_width(lm), 0.6, 5)
    assert isinstance(Request.read(contrasts, IDS, algorithm="autoregressive").algorithm, dx.Autoregressive)
    held = said(lm, force_words_ids=[[1]])
    with pytest.raises(ValueError, match=r"force_words_ids=\[\[1\]\]: .*; pass force_words_ids=None"):
        dx.generate(held, IDS)
    beams = said(lm, num_beams=4)
    assert Request.read(beams, IDS).samples == 4
    assert Request.read(beams, IDS, algorithm="prompt-lookup").samples == 1


def test_a_wrong_value_of_a_config_is_named_with_its_file(lm):
    for config in (dict(temperature="hot", do_sample=True), dict(max_new_tokens=1.5), dict(num_return_sequences=0),
                   dict(max_time=-1), dict(stop_strings=[3]), dict(eos_token_id="</s>"), dict(guidance_scale="much"),
                   dict(min_new_tokens=-1), dict(repetition_penalty=0), dict(do_sample="yes")):
        (name, *_) = config
        with pytest.raises((ValueError, TypeError), match=f"generation config of '{lm.name}': ({name}|stop): "):
            dx.generate(said(lm, **config), IDS)


def test_a_models_own_end_and_beginning_are_read_without_a_tokenizer(tiny_model, tmp_path):
    bare = shutil.copytree(tiny_model, tmp_path / "bare", ignore=shutil.ignore_patterns("token*", "generation*"))
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "eos_token_id": [5, 6], "bos_token_id": 4}))
    lm = dx.load(bare)
    assert (lm.eos, lm.bos, lm.pad) == ([5, 6], 4, 5)
    assert Request.read(lm, [[]]).prompts == [[4]]
    assert Request.read(lm, [[1]]).policy.eos[0].tolist()[:2] == [5, 6]
    (bare / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert dx.load(bare).eos == [9]


# algorithms and models

def test_an_algorithm_that_does_not_fit_the_model_is_refused_by_name(lm):
    sampler = dx.MaskedDiffusion(dx.algorithms.diffusion.Adapter(mask=3), dx.algorithms.diffusion.Blocks(8))
    with pytest.raises(ValueError, match=r"algorithm: got MaskedDiffusion, a sampler of masked diffusion, for .* auto"):
        dx.generate(lm, IDS, algorithm=sampler)
    for attention, block in (("full", None), ("block-causal", 4)):
        fills = dataclasses.replace(lm, diffusion=Diffusion(3, attention=attention, block=block))
        with pytest.raises(ValueError, match=r"algorithm: got Autoregressive for .* fills masks"):
            dx.stream(fills, IDS[0], algorithm=dx.Autoregressive())
    writes = dataclasses.replace(lm, diffusion=Diffusion(3, shift=True, attention="causal-prefix", block=4))
    assert Request.read(writes, IDS, algorithm=dx.Autoregressive()).algorithm == dx.Autoregressive()


def test_algorithms_and_models_are_taken_by_name(lm, tiny_model):
    named = Request.read(lm, IDS, algorithm="prompt-lookup:length=3").algorithm
    assert named == dx.algorithms.make("prompt-lookup", length=3)
    text = dx.generate(lm, "a b a b a b", max_new_tokens=6, algorithm="prompt-lookup:length=3").text
    assert text == dx.generate(str(tiny_model), "a b a b a b", max_new_tokens=6).text
    from decodax.engine.methods import model
    assert model(tiny_model) is model(str(tiny_model))       # loaded once
    with pytest.raises(ValueError, match=r"algorithm: .*unknown name 'prompt-lokup'; near ones: prompt-lookup"):
        dx.generate(lm, IDS, algorithm="prompt-lokup")
    with pytest.raises(ValueError, match=r"^draft: 'seed-exact' needs a draft model: generate\(draft=decodax\.load"):
        dx.generate(lm, IDS, algorithm="seed-exact")
    with pytest.raises(ValueError, match="did you mean pycode"):
        dx.generate("pycod", "x")


def test_a_batch_that_fits_no_memory_is_refused_with_its_size(lm):
    for options, message in ((dict(max_new_tokens=10 ** 9), r"max_new_tokens: 2 rows of up to 1,000,000,005 tokens"),
                             (dict(max_length=2 ** 31 - 1), r"max_length: 2 rows of up to 2,147,483,647 tokens"),
                             (dict(num_samples=10 ** 9), r"max_new_tokens: 2,000,000,000 rows of up to 69 tokens")):
        with pytest.raises(ValueError, match=rf"{message} take about \d+(\.\d+)? [GTPE]B of memory"):
            dx.generate(lm, IDS, **options)


# texts and streams

@pytest.mark.full
def test_special_tokens_and_stop_strings_are_shown_on_request(lm):
    special = lm.tokenizer.backend.token_to_id("<|im_start|>")
    force = dict(max_new_tokens=6, logit_bias={special: 1000.0})
    assert dx.generate(lm, IDS, **force).text == ["", ""]
    shown = dx.generate(lm, IDS, skip_special_tokens=False, **force)
    assert shown.text == ["<|im_start|>" * 6] * 2
    stops = dict(stop="start|><|im", skip_special_tokens=False, **force)
    cut, kept = (dx.generate(lm, IDS, include_stop=keep, **stops) for keep in (False, True))
    assert cut.text == ["<|im_"] * 2 and kept.text == ["<|im_start|><|im"] * 2
    assert cut.status == [Status.STOP] * 2 and rows(cut) == rows(kept) == [[special] * 2] * 2
    stream = dx.stream(lm, IDS[0], include_stop=True, **stops)
    assert "".join(stream) == kept.text[0]


def test_a_stream_takes_what_generate_takes(lm):
    given = dict(max_length=11, min_new_tokens=[2], seed=[5], request_ids=3, stop=("zz",), include_stop=True,
                 logprobs=2, skip_special_tokens=False, chunk=32, algorithm="autoregressive", temperature=[0.9],
                 max_time=600.0, guidance_scale=None, negative_prompts=None, num_samples=1, progress=False)
    stream, whole = dx.stream(lm, IDS[:1], **given), dx.generate(lm, IDS[:1], **given)
    assert "".join(stream) == whole.text[0] == stream.result.text[0]
    assert np.array_equal(stream.result.logprobs.raw, whole.logprobs.raw)
    for name, value in (("num_samples", 2), ("batch_size", 4), ("progress", True), ("num_samples", 1.0)):
        with pytest.raises(ValueError, match=f"{name}: got {value}; for generate only, a stream is one row"):
            dx.stream(lm, IDS[0], **{name: value})
    with pytest.raises(ValueError, match="stream: takes one prompt, got 2"):
        dx.stream(lm, IDS)


def test_arguments_of_other_libraries_are_recognised(lm):
    for name, hint in (("batch", "batch_size="), ("vocab_size", "the model's own"), ("max_tokens", "max_new_tokens="),
                       ("streamer", "decodax.stream"), ("stop_strings", "stop="), ("attention_mask", "input_ids"),
                       ("num_sample", "did you mean num_samples")):
        with pytest.raises(TypeError, match=f"{name}: .*{hint}"):
            dx.generate(lm, IDS, **{name: 2})
    filling = dataclasses.replace(lm, diffusion=Diffusion(3))
    with pytest.raises(TypeError, match="stop: infill takes no such argument"):
        dx.infill(filling, ["a", 3], stop="x")


def test_a_least_length_needs_no_end_of_sequence(lm):
    endless = dataclasses.replace(lm, tokenizer=None, generation_config={})
    out = dx.generate(endless, IDS, min_new_tokens=3, max_new_tokens=6, min_length=2)
    assert out.lengths.tolist() == [6, 6] and out.text is None


def test_each_tokenizer_keeps_its_table(monkeypatch):
    from decodax.io import text
    made = []
    monkeypatch.setattr(text, "pieces", lambda *args, real=text.pieces: made.append(1) or real(*args))
    several = [Tokenizer(byte_level()) for _ in range(3)]
    for _ in range(4):
        for tok in several:
            assert tok.decode(tok.encode("hi")) == "hi"
    assert len(made) == 3


def test_a_broken_file_is_named(tiny_model, tmp_path):
    def broken(name: str, content: str | bytes) -> Path:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(tiny_model, path)
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    for name, content in (("tokenizer.json", "{"), ("tokenizer_config.json", "[]"), ("generation_config.json", "{"),
                          ("generation_config.json", "3"), ("special_tokens_map.json", "{,}"), ("config.json", "]"),
                          ("chat_template.jinja", b"\xff\xfe\xff"), ("tokenizer_config.json", '{"chat_template": 3}'),
                          ("generation_config.json", "[" * 100_000)):
        with pytest.raises(ValueError, match=name):
            dx.load(broken(name, content))
    for name, content in (("tokenizer_config.json", '{"eos_token": {"text": "x"}}'),
                          ("generation_config.json", '{"eos_token_id": "</s>"}')):
        with pytest.raises(ValueError, match=rf"(?=.*eos_token)(?=.*{name})"):
            dx.load(broken(name, content))
    path = save(byte_level(), tmp_path / "template", tokenizer_config={"chat_template": "{% for %}"})
    with pytest.raises(ValueError, match=r"template/tokenizer_config\.json: chat template, line 1"):
        Tokenizer.from_dir(path).chat_text([{"role": "user", "content": "x"}])
