"""For every model family, through `dx.generate`: cached decoding agrees with a full forward, and speculation gives the
tokens of plain sampling."""

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.io.checkpoint import load_model

pytest.importorskip("torch")
pytest.importorskip("transformers")
from decodax.algorithms.speculative.drafts import TokenRecycling
from decodax.algorithms.speculative.trees import Fixed
from tests.matrix import often
from tests.models.tiny import ALIKE, CASES, saved

# sliding beside full attention; the toy of the other laws has learned positions
OFTEN = ["gemma3"]
FAMILIES = ["gpt2", "llama3", "mistral", "qwen2-sliding", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2",
            "stablelm-parallel", "granite", "cohere2", "glm4", "olmo3", "phi", "smollm3-sliding"]
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9], [3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4]]
SAMPLING = dict(temperature=0.9, top_p=0.9, repetition_penalty=1.2, bad_words_ids=[[8], [11, 12]], seed=3)


@pytest.mark.parametrize("family", often(OFTEN, FAMILIES))
def test_decoding_agrees_with_itself_and_with_a_full_forward(family, tmp_path):
    saved(family, tmp_path)
    model, params = load_model(tmp_path)
    lm = dx.LM(model=model, params=params, vocab_size=97)
    plain = dx.generate(lm, PROMPTS, max_new_tokens=14, logprobs=0, **SAMPLING)
    drafted = dx.generate(lm, PROMPTS, max_new_tokens=14, algorithm=dx.Speculative(dx.drafts.PromptLookup(length=3)),
                          **SAMPLING)
    assert np.array_equal(drafted.tokens, plain.tokens)
    assert drafted.stats.drafted.sum() > 0
    text = np.zeros((3, 26), np.int32)
    for row, prompt, made in zip(text, PROMPTS, plain.tokens, strict=True):
        row[:len(prompt) + 14] = prompt + made.tolist()
    full = np.asarray(jax.nn.log_softmax(jax.jit(model.forward)(params, text)))
    for i, prompt in enumerate(PROMPTS):
        at = np.arange(len(prompt), len(prompt) + 14)
        assert np.allclose(plain.logprobs.raw[i], full[i, at - 1, plain.tokens[i]], atol=1e-4)


BEFORE = list(CASES)[:list(CASES).index("gpt-neox")]
"""Cases whose parts nearly all later ones have as well; they run in the tier `full`, but for those used most."""
MOST_USED = {"llama3", "qwen3", "gemma3", "mixtral"}
SLOW = {"falcon-h1", "granite-h", "jamba", "kimi-linear"}
"""Others have most of their parts."""
WIDE = [name for name in CASES if name in MOST_USED or name not in {*BEFORE, *SLOW, *ALIKE}]
NEW = {"llama-dynamic": 4, "phi3-longrope-long": 4}
"""Numbers of new tokens of cases that have no room for 9 after the longest prompt."""
TREE = dx.Speculative(TokenRecycling(Fixed.balanced(2, 2), k=2, rows=97))


@pytest.mark.wide
@pytest.mark.parametrize("family", often(WIDE, CASES))
def test_greedy_tokens_of_ragged_prompts_are_those_of_transformers_however_they_are_decoded(family, tmp_path):
    """In chains and trees, of a row alone, of two samples of a prompt, and after a prefill in chunks."""
    import torch

    reference = saved(family, tmp_path)
    lm = dx.load(tmp_path)
    options = dict(max_new_tokens=NEW.get(family, 9), eos_token_id=[])
    plain = dx.generate(lm, PROMPTS, **options).tokens
    reference.generation_config.eos_token_id = None
    for prompt, made in zip(PROMPTS, plain, strict=True):
        # Each row alone: left padding changes what transformers 5.24 generates with Llama 4 and RecurrentGemma.
        ids = torch.tensor([prompt])
        want = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                                  max_new_tokens=options["max_new_tokens"])
        assert made.tolist() == want[0, len(prompt):].tolist()
    for algorithm in (dx.Speculative(dx.drafts.PromptLookup(length=3)), TREE):
        assert dx.generate(lm, PROMPTS, algorithm=algorithm, **options).tokens.tolist() == plain.tolist()
    alone = dx.generate(lm, PROMPTS[1:2], **options).tokens
    assert alone.tolist() == plain[1:2].tolist()
    several = dx.generate(lm, PROMPTS, num_samples=2, **options).tokens
    assert several.tolist() == [row for row in plain.tolist() for _ in range(2)]
    assert dx.generate(lm, PROMPTS, chunk=5, **options).tokens.tolist() == plain.tolist()
