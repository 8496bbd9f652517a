"""Speech to text with a model that reads audio, such as Whisper (Radford et al., 2023), also of long audio."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from decodax.common.arguments import flag, shown
from decodax.common.ids import named
from decodax.engine.methods import model as loaded
from decodax.front.generate import generate
from decodax.front.options import TranscribeOptions
from decodax.io.load import LM
from decodax.models import EncoderAudio, EncoderDecoder
from decodax.models.encoder_decoder.log_mel import HOP, checked_audio, log_mel
from decodax.sampling.timestamps import Timestamps

STEP = 0.02
"""Seconds between two timestamps."""

FRAMES = 2
"""Frames of a spectrogram between two timestamps."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of an audio that was transcribed.

    Attributes:
        start: seconds at which it begins.
        end: seconds at which it ends.
        tokens: its token ids, timestamps included.
        text: its text; None for a model without a tokenizer.
    """

    start: float
    end: float
    tokens: list[int]
    text: str | None


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The text of an audio.

    Attributes:
        segments: its parts in order.
        language: the token of its language; None for a model of one language.
    """

    segments: list[Segment]
    language: str | None

    @property
    def tokens(self) -> list[int]:
        """Token ids of all segments."""
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def text(self) -> str | None:
        """The text of all segments; None for a model without a tokenizer."""
        texts = [segment.text for segment in self.segments]
        return None if None in texts else "".join(text for text in texts if text is not None)


def transcribe(lm: LM | str | os.PathLike[str], audio: Any, *, language: str | Sequence[str] | None = None,
               task: str = "transcribe", timestamps: bool = True, features: Any = None,
               **options: Unpack[TranscribeOptions]) -> list[Transcript]:
    """Transcribes or translates speech.

    An audio is read in windows of the model's length, 30 seconds for Whisper. With timestamps, a window begins where
    the last whole segment before it ended; without, at the end of the one before. A window is decoded once: there is no
    second attempt at a higher temperature, no test for silence, and the text before a window is not part of its prompt.

    Args:
        lm: a model that reads audio, as in `generate`.
        audio: samples at 16 kHz from -1 to 1, one-dimensional, or a list of several.
        language: the language as in the model's tokens, such as "en" for "<|en|>", one or one for each audio. None: the
            most likely one of the first window, if the model has several.
        task: "transcribe", or "translate" into English.
        timestamps: True decodes timestamps, by the rules of `decodax.sampling.Timestamps`.
        features: a log-mel spectrogram `f32[F, T]` in place of `audio`, which is then None, or a list of several.
        options: further arguments of `generate`, such as `algorithm` or `batch_size`. Default of `max_new_tokens`: as
            many as the model has positions for.

    Returns:
        A transcript for each audio.

    Raises:
        ValueError: the model reads no audio, has no such language or task, or no token for timestamps; or an audio is
            not one-dimensional.
    """
    lm = loaded(lm)
    model = lm.model
    if not isinstance(model, EncoderDecoder) or model.config.features is None:
        raise ValueError(f"lm: got {lm.name!r}, a {type(model).__name__} that reads no audio; takes a model such as "
                         "Whisper")
    timed = flag("timestamps", timestamps)
    if refused := sorted(options.keys() & {"inputs", "num_samples", "num_return_sequences", "search", "select"}):
        raise ValueError(f"{refused[0]}: transcribe does not take it")
    if (audio is None) == (features is None):
        raise ValueError("audio and features: takes one of them")
    length = FRAMES * model.config.encoder.positions.count      # type: ignore[union-attr]
    heard, ends = _spectrograms(audio, features, model.config.features, length)
    prompts, languages = _prompts(lm, heard, length, language, task, timed)
    begin = _timestamp_begin(lm) if timed else None
    parts: list[list[Segment]] = [[] for _ in heard]
    seek = [0] * len(heard)
    while rows := [i for i, end in enumerate(ends) if seek[i] < end]:
        windows = np.stack([_window(heard[i], seek[i], length) for i in rows])
        rules = {} if begin is None else {"transforms": (*options.get("transforms", ()), Timestamps.of(
            len(rows), begin, lm.eos[0], lm.generation_config.get("max_initial_timestamp_index")))}
        budget = {} if options.keys() & {"max_new_tokens", "max_length"} else {
            "max_new_tokens": [(model.max_positions or 448) - len(prompts[i]) for i in rows]}
        given: dict[str, Any] = {**options, **budget, **rules}
        out = generate(lm, [prompts[i] for i in rows], inputs=EncoderAudio(features=windows),   # type: ignore[arg-type]
                       **given)
        for i, tokens, count in zip(rows, out.tokens, out.lengths, strict=True):
            new = [token for token in tokens[:count].tolist() if token not in lm.eos]
            read = min(ends[i] - seek[i], length)
            found, on = _segments(lm, new, seek[i] * STEP / FRAMES, read, begin)
            parts[i] += found
            seek[i] += on
    return [Transcript(segments, language) for segments, language in zip(parts, languages, strict=True)]


def _spectrograms(audio: Any, features: Any, size: int, length: int) -> tuple[list[np.ndarray], list[int]]:
    """Returns the spectrogram of each audio, `f32[F, T]`, and its number of frames that are not padding. An audio of
    less than a window is padded with silence to `length` frames, as in training."""
    given = audio if features is None else features
    single = 1 if features is None else 2
    rows = [given] if getattr(given, "ndim", 0) == single else list(given)
    if features is None and rows and np.ndim(rows[0]) == 0:
        rows = [np.asarray(given, np.float32)]
    if not rows:
        raise ValueError("audio: got none, takes at least one")
    if features is None:
        counts = [-(-len(x) // HOP) for x in map(checked_audio, rows)]
        return [log_mel(x, size, max(n, length)) for x, n in zip(rows, counts, strict=True)], counts
    arrays = [np.asarray(row, np.float32) for row in rows]
    if bad := next((x for x in arrays if x.ndim != 2 or x.shape[0] != size or not x.shape[1]), None):
        raise ValueError(f"features: got shape {bad.shape}, takes ({size}, frames)")
    return arrays, [x.shape[1] for x in arrays]


def _window(heard: np.ndarray, start: int, length: int) -> np.ndarray:
    part = heard[:, start:start + length]
    return np.pad(part, ((0, 0), (0, length - part.shape[1])))


def _prompts(lm: LM, heard: list[np.ndarray], length: int, language: str | Sequence[str] | None, task: str,
             timed: bool) -> tuple[list[list[int]], list[str | None]]:
    """Returns the prompt of each audio, and its language."""
    config, count = lm.generation_config, len(heard)
    if lm.start is None:
        raise ValueError(f"lm: {lm.name!r} has no decoder_start_token_id in its files")
    known: dict[str, int] = config.get("lang_to_id") or {}
    tasks: dict[str, int] = config.get("task_to_id") or {}
    if task not in ("transcribe", "translate") or (task not in tasks and (tasks or task != "transcribe")):
        raise ValueError(f"task: got {shown(task)}, {lm.name!r} takes {' or '.join(tasks) or 'transcribe'}")
    if not known:
        if language is not None:
            raise ValueError(f"language: got {shown(language)}, and {lm.name!r} has no such tokens; takes None")
        names: list[str | None] = [None] * count
    elif language is None:
        names = _languages(lm, lm.start, heard, length, known)
    else:
        each = [language] * count if isinstance(language, str) else list(language)
        if len(each) != count:
            raise ValueError(f"language: got {len(each)} for {count} audios")
        names = [name if name in known else f"<|{name}|>" for name in each]
        if unknown := next((name for name, token in zip(each, names, strict=True) if token not in known), None):
            raise ValueError(f"language: got {shown(unknown)}, takes one of "
                             f"{', '.join(sorted(token.strip('<|>') for token in known))}")
    silent = named(config.get("no_timestamps_token_id"))
    end = [] if timed or silent is None else [silent]
    return [[lm.start, *([] if name is None else [known[name]]), *([tasks[task]] if known and tasks else []), *end]
            for name in names], names


def _languages(lm: LM, start: int, heard: list[np.ndarray], length: int, known: dict[str, int]) -> list[str | None]:
    """Returns the most likely language of the first window of each audio."""
    windows: Any = np.stack([_window(whole, 0, length) for whole in heard])
    plain: dict[str, Any] = dict(suppress_tokens=[], begin_suppress_tokens=[], forced_eos_token_id=[], eos_token_id=[])
    out = generate(lm, [[start]] * len(heard), inputs=EncoderAudio(features=windows), max_new_tokens=1,
                   algorithm="autoregressive", temperature=0.0, allowed_token_ids=sorted(known.values()), **plain)
    names = {token: name for name, token in known.items()}
    return [names[token] for token in out.tokens[:, 0].tolist()]


def _timestamp_begin(lm: LM) -> int:
    """Returns the id of the first timestamp."""
    found = named(lm.generation_config.get("no_timestamps_token_id"))
    if found is None:
        raise ValueError(f"timestamps: {lm.name!r} has no no_timestamps_token_id in its generation_config.json; takes "
                         "False")
    return int(found) + 1


def _segments(lm: LM, tokens: list[int], offset: float, read: int, begin: int | None) -> tuple[list[Segment], int]:
    """Cuts the tokens of a window into segments.

    Args:
        lm: the model.
        tokens: the new tokens of the window, without the end token.
        offset: seconds at which the window begins.
        read: number of frames of the window that have audio.
        begin: id of the first timestamp; None: there are none.

    Returns:
        The segments, and the number of frames after which the next window begins.
    """
    text = lambda ids: None if lm.tokenizer is None else lm.tokenizer.decode(
        [token for token in ids if begin is None or token < begin])
    time = lambda token: offset + (token - (begin or 0)) * STEP
    is_time = [begin is not None and token >= begin for token in tokens]
    cuts = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    if not cuts:
        last = next((token for token, stamp in zip(tokens[::-1], is_time[::-1], strict=True) if stamp), begin)
        end = offset + read // FRAMES * STEP if last is None or last == begin else time(last)
        return [Segment(offset, end, tokens, text(tokens))], read
    whole = is_time[-2:] == [False, True]       # nothing is said after the last timestamp
    cuts = [*cuts, len(tokens)] if whole else cuts
    found = [tokens[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    on = read if whole else FRAMES * (found[-1][-1] - (begin or 0))
    return [Segment(time(ids[0]), time(ids[-1]), ids, text(ids)) for ids in found], on or read
