"""Whisper against transformers: spectrograms, logits, timestamps, prompts, long audio."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import decodax as dx
from decodax.core.window import causal
from decodax.front.transcribe import transcribe
from decodax.models import EncoderAudio, EncoderText
from decodax.models.encoder_decoder.log_mel import log_mel
from decodax.sampling import Context, Timestamps
from tests.matrix import often
from tests.models.small import POLICY, attention, score, tokens_of

MELS, POSITIONS, TARGETS = 16, 50, 40
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, SILENT = 50, 51, 52, 53, 54, 55, 56
TIMES = SILENT + 1
VOCABULARY = TIMES + POSITIONS + 1
LOOKUP = dx.Speculative(dx.drafts.PromptLookup(length=4))


@functools.cache
def whisper() -> tuple[Any, Path]:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=MELS, d_model=24, encoder_layers=3, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=3, encoder_ffn_dim=32, decoder_ffn_dim=28,
        max_source_positions=POSITIONS, max_target_positions=TARGETS, pad_token_id=END, bos_token_id=END,
        eos_token_id=END, decoder_start_token_id=START, suppress_tokens=None, begin_suppress_tokens=None)
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            norm = weight.ndim == 1 and not path.endswith("bias")
            weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if norm else 0.0))
        model.model.decoder.embed_tokens.weight.mul_(1.5)
    for key, value in dict(
            lang_to_id={"<|en|>": ENGLISH, "<|de|>": GERMAN}, task_to_id={"translate": TRANSLATE,
                                                                          "transcribe": TRANSCRIBE},
            is_multilingual=True, no_timestamps_token_id=SILENT, max_initial_timestamp_index=20,
            suppress_tokens=[START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, 7], begin_suppress_tokens=[3, END],
            max_length=TARGETS, return_timestamps=False).items():
        setattr(model.generation_config, key, value)
    directory = Path(tempfile.mkdtemp())
    model.save_pretrained(directory)
    return model, directory


@functools.cache
def lm() -> Any:
    return dx.load(whisper()[1])


def sounds(*frames: int) -> list[np.ndarray]:
    """Spectrograms of some numbers of frames."""
    r = np.random.default_rng(0)
    return [r.normal(size=(MELS, n)).astype(np.float32) for n in frames]


def audio(seconds: float, seed: int = 0) -> np.ndarray:
    """A rising tone with noise."""
    t = np.arange(int(seconds * 16_000)) / 16_000
    noise = np.random.default_rng(seed).normal(size=len(t)) * 0.01
    return (0.3 * np.sin(2 * np.pi * (200 + 300 * t) * t) + noise).astype(np.float32)


@pytest.mark.wide
@pytest.mark.parametrize("size", [80, 128])
def test_spectrograms_equal_transformers(size: int) -> None:
    """An audio is shorter than 30 seconds, one is longer, and one is silent."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=size)
    for samples in (audio(2.3), audio(31.0, 1), np.zeros(1000, np.float32)):
        want = extractor(samples, sampling_rate=16_000).input_features[0]
        got = log_mel(samples, size)
        assert got.shape == want.shape == (size, 3000) and got.dtype == np.float32
        np.testing.assert_allclose(got, want, atol=1e-4)        # its transform is in float32
        whole = np.zeros(480_000)
        whole[:len(samples)] = samples[:480_000]
        exact = extractor._np_extract_fbank_features(whole[None], "cpu")[0]
        np.testing.assert_allclose(got, exact, atol=1e-6)


def test_audio_is_checked() -> None:
    with pytest.raises(ValueError, match=r"audio: got an array of float64 of shape \(2, 5\), takes the samples of one"):
        log_mel(np.zeros((2, 5)))
    with pytest.raises(ValueError, match="audio: got samples of int16, takes floats from -1 to 1"):
        log_mel(np.zeros(5, np.int16))
    with pytest.raises(ValueError, match="audio: got samples that are not finite"):
        log_mel(np.full(5, np.nan))


@pytest.mark.wide
def test_logits_equal_transformers() -> None:
    features = np.stack(sounds(100, 100))
    text = np.random.default_rng(0).integers(0, VOCABULARY, (2, 20))
    with torch.no_grad():
        want = whisper()[0](input_features=torch.tensor(features), decoder_input_ids=torch.tensor(text)).logits.numpy()
    got = score(lm().model, lm().params, causal(text, jnp.zeros(2, jnp.int32)), EncoderAudio(features=features))
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("latest", [None, 3])
def test_timestamp_rules_equal_transformers(latest: int | None) -> None:
    """After texts of all kinds: none, text, timestamps alone or in pairs."""
    config = transformers.GenerationConfig(no_timestamps_token_id=SILENT, eos_token_id=END, bos_token_id=END)
    config.max_initial_timestamp_index = latest
    r, prompt = np.random.default_rng(0), [START, ENGLISH, TRANSCRIBE]
    reference = transformers.WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt))
    rules = jax.tree.map(lambda x: x[0], Timestamps.of(1, TIMES, END, latest))
    texts = [[], [TIMES], [5], [TIMES, 5], [TIMES, 5, 6], [TIMES, 5, TIMES + 4], [TIMES, 5, TIMES + 4, TIMES + 4],
             [TIMES, 5, TIMES + 4, TIMES + 6, 8], [TIMES + 2, TIMES + 3], [TIMES + POSITIONS, 4]]
    one = jax.jit(lambda tokens, length, logits: rules.logits(None, Context(
        tokens, length, jnp.int32(len(prompt)), jax.random.key(0)), logits))
    for text in texts:
        for spread in (0.5, 3.0):       # texts alone, and timestamps alone
            logits = (r.normal(size=VOCABULARY) * spread).astype(np.float32)
            want = reference(torch.tensor([prompt + text]), torch.tensor(logits)[None])[0].numpy()
            tokens = np.full(16, -1, np.int32)
            tokens[:len(prompt + text)] = prompt + text
            got = np.asarray(one(tokens, np.int32(len(prompt + text)), logits))
            np.testing.assert_array_equal(got, want, err_msg=str(text))


@pytest.mark.wide
@pytest.mark.parametrize(("timed", "beams"), often([(True, 3), (False, 1)], [(True, 3), (True, 1), (False, 1), (
    False, 3)]))
def test_a_window_equals_transformers(timed: bool, beams: int) -> None:
    """Prompts name language and task, and the generation config suppresses some tokens."""
    features = np.stack(sounds(100, 100, 100))
    want = whisper()[0].generate(torch.tensor(features), language="de", task="translate", return_timestamps=timed,
                                 force_unique_generate_call=True, num_beams=beams).numpy()
    prompt = [START, GERMAN, TRANSLATE, *([] if timed else [SILENT])]
    rules: dict[str, Any] = dict(transforms=(Timestamps.of(3, TIMES, END, 20),)) if timed else {}
    rules |= {"algorithm": dx.algorithms.beam_search(beams)} if beams > 1 else {}
    out = dx.generate(lm(), [prompt] * 3, inputs=EncoderAudio(features=features), max_length=TARGETS, **rules)
    assert [_text(row[:n]) for row, n in zip(out.tokens, out.lengths, strict=True)] == [
        _text(row[len(prompt):] if row[0] == START else row) for row in want]


def _text(row: Any) -> list[int]:
    row = np.asarray(row).tolist()
    return row[:row.index(END)] if END in row else row


@pytest.mark.full
def test_drafts_samples_chunks_and_batches_leave_the_tokens_as_they_are() -> None:
    """Drafts in chains and trees; samples of a prompt share its encoder; rows alone are those of the batch."""
    features = np.stack(sounds(*[100] * 4))
    prompts = [[START, ENGLISH, TRANSCRIBE], [START, GERMAN, TRANSLATE, SILENT], [START], [START, ENGLISH, TRANSCRIBE]]
    run = functools.partial(tokens_of, lm(), prompts, eos_token_id=END, inputs=EncoderAudio(features=features),
                            transforms=(Timestamps.of(4, TIMES, END),), **POLICY)
    plain = run()
    assert len(set(map(tuple, plain))) == 4
    tree = dx.Speculative(dx.drafts.DraftModel(attention(VOCABULARY)), shape=dx.trees.Fixed.balanced(2, 2))
    assert run(algorithm=LOOKUP) == plain and run(algorithm=tree) == plain
    assert run(chunk=2) == plain and run(batch_size=2) == plain
    assert run(num_samples=2)[::2] == plain
    alone = [tokens_of(lm(), prompts[i:i + 1], eos_token_id=END, inputs=EncoderAudio(features=features[i:i + 1]),
                       transforms=(Timestamps.of(1, TIMES, END),), temperature=POLICY["temperature"][i],
                       top_p=POLICY["top_p"], seed=POLICY["seed"][i], request_ids=[i]) for i in range(4)]
    assert [row for rows in alone for row in rows] == plain


@pytest.mark.wide
def test_long_audio_equals_transformers() -> None:
    """In windows that begin where the last whole segment ended."""
    heard = sounds(330)[0]
    mask = torch.ones(1, heard.shape[1], dtype=torch.long)
    want = whisper()[0].generate(torch.tensor(heard)[None], attention_mask=mask, language="en", task="transcribe",
                                 return_timestamps=True, return_segments=True)["segments"][0]
    got = transcribe(lm(), None, features=[heard], language="en")[0]
    assert got.language == "<|en|>" and len(got.segments) == len(want) > 4
    for ours, theirs in zip(got.segments, want, strict=True):
        np.testing.assert_allclose([ours.start, ours.end], [float(theirs["start"]), float(theirs["end"])], atol=1e-6)
        tokens = theirs["tokens"].tolist()
        # transformers keeps the first timestamp of what it leaves to the next window
        assert ours.tokens in (tokens, tokens[:-1])


@pytest.mark.wide
def test_audios_of_several_lengths_equal_each_alone() -> None:
    """Their languages are detected, as by transformers."""
    audios = [audio(2.6), audio(0.7, 1), audio(1.0, 2)]
    together = transcribe(lm(), audios, max_new_tokens=12)
    assert together == [transcribe(lm(), each, max_new_tokens=12)[0] for each in audios]
    features = torch.tensor(EncoderAudio.read(lm(), audios).features)
    ids = whisper()[0].detect_language(features, num_segment_frames=2 * POSITIONS).tolist()
    assert [x.language for x in transcribe(lm(), None, features=list(features.numpy()), max_new_tokens=2)] == [
        {ENGLISH: "<|en|>", GERMAN: "<|de|>"}[i] for i in ids]


@pytest.mark.wide
def test_a_short_audio_is_padded_with_silence() -> None:
    """The feature extractor of transformers gives the same numbers."""
    samples, prompt = audio(0.6), [START, ENGLISH, TRANSCRIBE, SILENT]
    out = dx.generate(lm(), prompt, inputs=EncoderAudio.read(lm(), samples), max_new_tokens=12)
    got = transcribe(lm(), samples, language="en", timestamps=False, max_new_tokens=12)[0]
    assert got.tokens == _text(out.tokens[0, :out.lengths[0]])
    assert [(x.start, x.end) for x in got.segments] == [(0.0, 0.6)]


@pytest.mark.wide
def test_what_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="language: got 'fr', takes one of de, en"):
        transcribe(lm(), audio(0.5), language="fr")
    with pytest.raises(ValueError, match="task: got 'sing', 'tmp"):
        transcribe(lm(), audio(0.5), task="sing")
    with pytest.raises(ValueError, match="num_samples: transcribe does not take it"):
        transcribe(lm(), audio(0.5), num_samples=2)
    with pytest.raises(ValueError, match=r"inputs: got features \(16, 90\), takes \(16, 100\)"):
        tokens_of(lm(), [[START]], inputs=EncoderAudio(features=sounds(90)[0][None]))
    with pytest.raises(ValueError, match="inputs: got a EncoderText, an encoder-decoder takes an EncoderAudio"):
        tokens_of(lm(), [[START]], inputs=EncoderText.of([[4]]))
    with pytest.raises(ValueError, match="that reads no audio"):
        transcribe("pycode", audio(0.5))
