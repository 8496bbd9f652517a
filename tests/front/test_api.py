"""The front door on the smaller shipped model: prompts in every form, samples, stops, streams, batches, errors."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import decodax as dx
from decodax.common.progress import compiling
from decodax.constraints import matching
from decodax.core.state import Status
from decodax.models.diffusion import Diffusion

PROMPTS = ["def fib(n):\n", "import os\nclass A:\n    def", "x"]
LOOKUP = dx.Speculative(dx.drafts.PromptLookup(length=4))


@pytest.fixture(scope="module")
def lm():
    return dx.load("pycode-draft")


def test_prompts_may_be_text_ids_or_arrays(lm):
    ids = lm.tokenizer.encode(PROMPTS[0])
    forms = [PROMPTS[0], [PROMPTS[0]], ids, [ids], [np.array(ids)]]
    assert len({dx.generate(lm, form, max_new_tokens=8).text[0] for form in forms}) == 1


def test_an_empty_prompt_begins_with_the_bos_token(lm):
    bos = dataclasses.replace(lm, tokenizer=None, generation_config={"bos_token_id": 0, "eos_token_id": 0})
    assert len(dx.generate(bos, [[]], max_new_tokens=4, min_new_tokens=4).row(0)) == 4
    with pytest.raises(ValueError, match=r"prompts\[0\]: is empty"):
        dx.generate(dataclasses.replace(bos, generation_config={}), [[]])


def test_samples_of_a_prompt_differ_and_come_side_by_side(lm):
    many = dx.generate(lm, PROMPTS[:2], max_new_tokens=12, num_samples=3, temperature=1.0)
    assert len(many) == 6 and len(set(many.text)) == 6
    one = dx.generate(lm, PROMPTS[:2], max_new_tokens=12, temperature=1.0)
    assert [many.text[0], many.text[3]] == one.text            # the first sample is the one without samples


def test_a_stream_is_the_text_in_pieces(lm):
    whole = dx.generate(lm, PROMPTS[0], max_new_tokens=24, temperature=0.9)
    stream = dx.stream(lm, PROMPTS[0], max_new_tokens=24, temperature=0.9)
    pieces = list(stream)
    assert "".join(pieces) == whole.text[0] == stream.result.text[0]
    assert len(pieces) > 1
    assert np.array_equal(stream.result.tokens, whole.tokens)


def test_a_stop_string_ends_text_and_stream(lm):
    free = dx.generate(lm, PROMPTS[0], max_new_tokens=24).text[0]
    stop = free[len(free) // 2:len(free) // 2 + 3]
    cut = dx.generate(lm, PROMPTS[0], max_new_tokens=24, stop=stop)
    assert cut.text[0] == free[:free.index(stop)] and cut.status == [Status.STOP]
    assert "".join(dx.stream(lm, PROMPTS[0], max_new_tokens=24, stop=[stop])) == cut.text[0]


def test_the_time_is_looked_at_while_constraints_are_built(lm, monkeypatch):
    """What is left of them is not built, and no text is written without them."""
    built, clock = [], [0.0]
    language = matching.language

    def slow(key):
        built.append(key)
        clock[0] += 10
        return language(key)

    monkeypatch.setattr(matching, "language", slow)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    options = dict(constraint=[dx.constraints.regex("[ab]{3}"), dx.constraints.regex("[cd]{3}"),
                               dx.constraints.regex("[ef]{3}")], max_time=15, logprobs=1, num_samples=2)
    out = dx.generate(lm, PROMPTS, **options)
    assert len(built) == 2
    assert out.status == [Status.TIME] * 6 and out.text == [""] * 6 and out.lengths.tolist() == [0] * 6
    one = {"prompt": "x", "regex": "[gh]{3}", "max_time": 5}
    served = next(dx.serve(lm, [one], slots=1)).result
    assert served.status == [Status.TIME] and served.text == [""]
    with pytest.raises(TimeoutError, match="max_time: was out when 1 of 1 constraints had been built"):
        dx.stream(lm, "x", constraint=dx.constraints.regex("[ij]{3}"), max_time=5)


def test_a_listener_hears_of_programs_that_compile():
    program = jax.jit(lambda x: x * 3 + len(PROMPTS))
    seen = []
    with compiling(lambda found: seen.append(found.now)) as found:
        program(np.arange(5)).block_until_ready()
        first = len(seen)
        program(np.arange(5)).block_until_ready()
    program(np.arange(6)).block_until_ready()
    assert seen[:2] == [True, False] and first == len(seen) and found.seconds > 0


def test_batches_are_put_together_in_the_order_of_the_prompts(lm):
    options = dict(max_new_tokens=10, temperature=0.9, num_samples=2, logprobs=1)
    whole = dx.generate(lm, PROMPTS, **options)
    parts = dx.generate(lm, PROMPTS, batch_size=2, progress=True, **options)
    assert parts.text == whole.text and parts.status == whole.status
    assert np.array_equal(parts.tokens, whole.tokens)
    assert np.allclose(parts.logprobs.raw, whole.logprobs.raw, atol=1e-5)
    assert parts.stats.tokens.sum() == whole.stats.tokens.sum()


def test_log_probabilities_are_those_of_the_tokens(lm):
    out = dx.generate(lm, PROMPTS[0], max_new_tokens=8, logprobs=3)
    assert out.logprobs.raw.shape == (1, 8) and out.logprobs.top_ids.shape == (1, 8, 3)
    assert np.array_equal(out.logprobs.top_ids[0, :, 0], out.tokens[0])      # greedy takes the most likely
    assert np.allclose(out.logprobs.top[0, :, 0], out.logprobs.raw[0])
    assert (out.logprobs.processed == 0).all()


def test_rows_have_budgets_and_seeds_of_their_own(lm):
    out = dx.generate(lm, PROMPTS, max_new_tokens=[3, 0, 7], seed=[1, 2, 3], temperature=1.0)
    assert out.lengths.tolist() == [3, 0, 7]
    alone = dx.generate(lm, PROMPTS[2], max_new_tokens=7, seed=3, request_ids=[2], temperature=1.0)
    assert alone.text[0] == out.text[2]


def test_a_masked_diffusion_sampler_runs_from_the_front_door(lm):
    alg = dx.MaskedDiffusion(dx.algorithms.diffusion.Adapter(mask=lm.vocab_size - 1), dx.algorithms.diffusion.Blocks(8),
                             unmask=dx.algorithms.diffusion.Quota(2))
    filling = dataclasses.replace(lm, diffusion=Diffusion(mask=lm.vocab_size - 1))
    out = dx.generate(filling, PROMPTS[:2], max_new_tokens=16, algorithm=alg)
    assert out.lengths.tolist() == [16, 16] and out.stats.forwards == 4 and out.stats.prefill_forwards == 0


@pytest.mark.mesh
def test_a_mesh_gives_the_text_of_one_device():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    lm, wide = dx.load("pycode"), dx.load("pycode", mesh=mesh)      # whose heads can be split
    options = dict(max_new_tokens=12, temperature=0.9, stop="\n\n")
    out = dx.generate(wide, PROMPTS[:2], algorithm=LOOKUP, **options)
    assert out.text == dx.generate(lm, PROMPTS[:2], **options).text


def test_nothing_is_traced_again(lm):
    dx.generate(lm, "a first prompt", max_new_tokens=5, temperature=0.5, stop="a")
    with jax.no_tracing(True):
        for i, temperature in enumerate((0.0, 0.9)):
            dx.generate(lm, f"other {i}", max_new_tokens=6 + i, temperature=temperature, seed=i, stop="bc",
                        eos_token_id=[i])


@pytest.mark.parametrize(("options", "message"), [
    (dict(temperatur=1.0), "temperatur.*temperature"),
    (dict(num_samples=0), "num_samples: got 0"),
    (dict(max_new_tokens=-1), "max_new_tokens: got -1"),
    (dict(max_new_tokens=[1, 2]), "max_new_tokens: got 2 values for 1 prompts"),
    (dict(stop=""), "stop"),
    (dict(top_p=1.5, temperature=1.0), "top_p"),
])
def test_a_wrong_argument_is_named(lm, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dx.generate(lm, "x", **options)


def test_more_tokens_than_the_model_was_made_for_is_a_warning(lm):
    with pytest.warns(UserWarning, match="prompt and new tokens are 999, the model was made for"):
        dx.generate(lm, [[1, 2]], max_new_tokens=997, eos_token_id=list(range(lm.vocab_size)))


def test_an_unknown_model_lists_near_ones():
    with pytest.raises(ValueError, match="did you mean pycode"):
        dx.load("pycod")


@pytest.mark.full
def test_guidance_equals_that_of_transformers(lm, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from decodax.io.load import find
    reference = transformers.AutoModelForCausalLM.from_pretrained(find("pycode-draft"), dtype=torch.float32)
    prompts = ["def fib(n):\n", "class Stack:\n    def push"]
    for negative, alg in ((None, None), ("import sys\n", LOOKUP)):
        wanted = []
        for prompt in prompts:
            ids = torch.tensor([lm.tokenizer.encode(prompt)])
            other = None if negative is None else torch.tensor([lm.tokenizer.encode(negative)])
            wanted.append(reference.generate(ids, guidance_scale=1.7, negative_prompt_ids=other, max_new_tokens=10,
                                             min_new_tokens=10, do_sample=False)[0, ids.shape[1]:].tolist())
        out = dx.generate(lm, prompts, guidance_scale=1.7, max_new_tokens=10, min_new_tokens=10, algorithm=alg,
                          negative_prompts=negative)
        assert out.tokens.tolist() == wanted
