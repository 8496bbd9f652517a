"""Policies from keyword arguments and from generation configs: what is built, what is refused, what compiles anew."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.sampling import Custom, Policy, TopK, build, from_generation_config, generation_settings
from tests.sampling.draws import draw
from tests.sampling.oracle import row_keys


def names(policy: Policy) -> list[str]:
    return [type(t).__name__ for t in policy.transforms]


def test_the_default_is_greedy() -> None:
    assert names(build(2)) == ["Temperature"] and build(2).greedy.tolist() == [True, True]
    assert build(2, do_sample=True).greedy.tolist() == [False, False]
    assert build(2, temperature=[0.5, 0.0]).greedy.tolist() == [False, True]
    assert build(2, temperature=0.5, do_sample=[True, False]).greedy.tolist() == [False, True]
    assert build(2, temperature=1.0, do_sample=False).greedy.all()


def test_neutral_values_add_nothing_and_values_for_each_row_always_do() -> None:
    neutral = dict(top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0,
                   repetition_penalty=1.0, encoder_repetition_penalty=1.0, no_repeat_ngram_size=0,
                   encoder_no_repeat_ngram_size=0, presence_penalty=0.0, frequency_penalty=0.0, dry_multiplier=0.0,
                   xtc_probability=0.0, top_n_sigma=0.0, dynatemp_range=0.0, min_length=0, min_new_tokens=0,
                   suppress_tokens=[], bad_words_ids=[], logit_bias={})
    assert names(build(2, temperature=1.0, **neutral)) == ["Temperature"]
    assert names(build(2, temperature=1.0, top_p=[1.0, 1.0])) == ["Temperature", "TopP"]
    assert names(build(2, min_new_tokens=np.zeros(2, np.int32))) == ["Temperature"]


def test_transforms_are_in_the_order_of_transformers() -> None:
    policy = build(
        1, eos=[0], vocab_size=50, sequence_bias={(1, 2): 1.0}, logit_bias={3: 1.0}, encoder_repetition_penalty=1.1,
        repetition_penalty=1.1, presence_penalty=0.1, dry_multiplier=1.0, no_repeat_ngram_size=3,
        encoder_no_repeat_ngram_size=3, bad_words_ids=[[4]], allowed_token_ids=range(20), min_new_tokens=2,
        forced_bos_token_id=1, forced_eos_token_id=0, max_length=9, exponential_decay_length_penalty=(1, 1.1),
        suppress_tokens=[5], begin_suppress_tokens=[6], temperature=0.9, top_n_sigma=2.0, top_h=0.9, top_k=5, top_p=0.9,
        min_p=0.1, typical_p=0.9, epsilon_cutoff=0.1, eta_cutoff=0.1, xtc_probability=0.1, dynatemp_range=0.1,
        mirostat_tau=3.0, watermarking_config={}, transforms=(Custom(lambda ctx, logits: logits, needs="nothing"),))
    assert names(policy) == [
        "SequenceBias", "LogitBias", "EncoderRepetition", "Repetition", "PresenceFrequency", "Dry", "NoRepeatNgram",
        "EncoderNoRepeatNgram", "BadWords", "AllowedTokens", "MinLength", "ForcedBOS", "ForcedEOS",
        "ExponentialDecayLength", "SuppressTokens", "BeginSuppress", "Custom", "GreenList", "Temperature", "TopNSigma",
        "TopH", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta", "XTC", "DynamicTemperature", "Mirostat2",
        "GreenList"]
    assert all(x.shape[0] == 1 for x in jax.tree.leaves(policy))


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(top_p=1.5), r"top_p: got 1\.5, takes a number in \[0, 1\], or one for each of the 2 rows"),
    (dict(top_p="0.9"), r"top_p: got '0\.9', takes"),
    (dict(top_p=[0.9, 0.8, 0.7]), r"top_p: got \[0\.9, 0\.8, 0\.7\], takes .* each of the 2 rows"),
    (dict(top_k=2.5), r"top_k: got 2\.5, takes a whole number"),
    (dict(temperature=-1.0), r"temperature: got -1\.0, takes a number in \[0, inf\)"),
    (dict(temperature=float("nan")), r"temperature: got nan"),
    (dict(temperature=0.0, do_sample=True), r"temperature: got 0\.0, takes a number above 0 with do_sample=True"),
    (dict(typical_p=0.0), r"typical_p: got 0\.0, takes a number in \(0, 1\]"),
    (dict(repetition_penalty=0), r"repetition_penalty: got 0, takes a number in \(0, inf\)"),
    (dict(suppress_tokens=[1, -4]), r"suppress_tokens: .* token ids"),
    (dict(suppress_tokens=[[1], [2], [3]]), r"suppress_tokens: .* each of the 2 rows"),
    (dict(allowed_token_ids=[70], vocab_size=64), r"allowed_token_ids: got token 70, takes ids below .* 64"),
    (dict(bad_words_ids=[[1], []]), r"bad_words_ids: .* no sequence is empty"),
    (dict(bad_words_ids=[1, 2]), r"bad_words_ids: .* takes a list of token sequences"),
    (dict(sequence_bias=[[[1], "high"]]), r"sequence_bias: .* takes a dictionary"),
    (dict(logit_bias={(1, 2): 1.0}), r"logit_bias: .* single tokens"),
    (dict(logit_bias={1: float("inf")}), r"logit_bias: .* takes a dictionary"),
    (dict(min_new_tokens=3), r"min_new_tokens: got 3 without eos"),
    (dict(forced_eos_token_id=3), r"forced_eos_token_id: got no max_length"),
    (dict(exponential_decay_length_penalty=1.2), r"exponential_decay_length_penalty: .* \(start, factor\)"),
    (dict(watermarking_config={"bias": 1.0}), r"watermarking_config: got no vocab_size"),
    (dict(watermarking_config={"ngram_len": 5}, vocab_size=9), r"watermarking_config: .* greenlist_ratio"),
    (dict(watermarking_config={"seeding_scheme": "best"}, vocab_size=9), r"seeding_scheme: got 'best', takes lefthash"),
    (dict(eos=1, eos_token_id=1), r"eos and eos_token_id: got both"),
    (dict(min_tokens_to_keep=0), r"min_tokens_to_keep: got 0"),
])
def test_errors_name_the_argument_what_it_got_and_what_it_takes(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(2, **{"do_sample": True, **arguments})


def test_sampling_arguments_without_a_temperature_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"top_p: got 0\.9 without temperature"):
        build(1, top_p=0.9)
    assert build(1, top_p=0.9, temperature=0.0).greedy.all()


def test_an_unknown_argument_lists_the_near_ones() -> None:
    with pytest.raises(TypeError, match="temprature: unknown argument; did you mean temperature"):
        build(1, temprature=1.0)
    with pytest.raises(TypeError, match=r"zzz: unknown argument; build takes allowed_token_ids, .*top_p.*vocab_size"):
        build(1, zzz=1.0)


@pytest.mark.wide
def test_other_values_do_not_compile_anew() -> None:
    logits = jnp.zeros((3, 64))
    key = row_keys(3)
    settings = [
        dict(temperature=0.5, top_k=3, top_p=0.9, repetition_penalty=1.1, eos=[1], bad_words_ids=[[1]],
             logit_bias={1: 2.0}, suppress_tokens=[1], dry_multiplier=1.0, mirostat_tau=2.0,
             watermarking_config={"bias": 1.0}),
        dict(temperature=0.0, top_k=100, top_p=0.5, repetition_penalty=[1.0, 2.0, None], eos=[1, 2, 3],
             bad_words_ids=[[1, 2], [3]], logit_bias={1: 2.0, 5: -1.0}, suppress_tokens=[[1], [2, 3], None],
             dry_multiplier=0.5, dry_base=2.0, dry_sequence_breakers=[[1, 2]], mirostat_tau=9.0, mirostat_eta=0.5,
             watermarking_config={"bias": 0.5, "hashing_key": 7, "greenlist_ratio": 0.5})]
    draw(build(3, vocab_size=64, **settings[0]), logits, key).block_until_ready()
    second = build(3, vocab_size=64, **settings[1])
    with jax.no_tracing():
        draw(second, logits, key)


def test_large_k_is_found_by_bisection() -> None:
    limits = [t.limit for k in (5, 128, 129, [4, 500]) for t in build(2, do_sample=True, top_k=k).transforms
              if isinstance(t, TopK)]
    assert limits == [128, 128, None, None]


def write(path: Path, **config) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


def test_a_generation_config_gives_the_policy_that_transformers_would_use(tmp_path: Path) -> None:
    path = write(tmp_path, do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[5, 6], bos_token_id=1,
                 transformers_version="5.0", use_cache=True, num_beams=1)
    policy = from_generation_config(path, 2)
    assert names(policy) == ["Temperature", "TopK", "TopP"]
    assert policy.eos[0].tolist()[:2] == [5, 6] and policy.transforms[1].k.tolist() == [50, 50]
    np.testing.assert_allclose(policy.transforms[0].temperature, 0.6, rtol=1e-6)
    assert from_generation_config(path / "generation_config.json", 2, temperature=0.0).greedy.all()
    assert from_generation_config(path, 2, do_sample=False).greedy.all()
    assert from_generation_config(path, 2, top_k=3).transforms[1].k.tolist() == [3, 3]
    assert from_generation_config(path, 2, eos=7).eos[0, 0] == 7


def test_a_config_that_does_not_sample_is_greedy_until_asked(tmp_path: Path) -> None:
    path = write(tmp_path, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    assert names(from_generation_config(path, 1)) == ["Repetition", "Temperature"]
    assert from_generation_config(path, 1).greedy.all()
    assert names(from_generation_config(path, 1, temperature=0.8)) == ["Repetition", "Temperature", "TopP"]
    sampled = from_generation_config(path, 1, do_sample=True)
    assert names(sampled) == ["Repetition", "Temperature", "TopP"] and not sampled.greedy.any()
    with pytest.raises(ValueError, match=r"min_p: .* without temperature"):
        from_generation_config(path, 1, min_p=0.1)


@pytest.mark.parametrize("key", [dict(num_beams=4), dict(guidance_scale=1.5), dict(penalty_alpha=0.6),
                                 dict(force_words_ids=[[1]]), dict(remove_invalid_values=True)])
def test_keys_that_a_policy_cannot_express_are_named(key: dict) -> None:
    (name,) = key
    with pytest.raises(ValueError, match=f"{name}=.*cannot express"):
        generation_settings(key)
    with pytest.warns(UserWarning, match=name):
        assert generation_settings(key, strict=False) == {}


def test_unknown_keys_are_named_in_a_warning() -> None:
    with pytest.warns(UserWarning, match="own_option"):
        generation_settings({"own_option": 3})


def test_every_key_of_transformers_config_is_accounted_for() -> None:
    transformers = pytest.importorskip("transformers")
    from decodax.sampling.config import DECODING, IGNORED, UNEXPRESSED
    keys = set(transformers.GenerationConfig().to_dict()) | set(vars(transformers.GenerationConfig()))
    unread = {key for key in keys - DECODING - IGNORED - set(UNEXPRESSED) if not key.startswith("_")}
    assert not unread
    assert generation_settings(transformers.GenerationConfig().to_dict()).get("top_k") is None
