"""Log-mel spectrograms of audio, the features that Whisper reads (Radford et al., 2023)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

RATE = 16_000
"""Samples a second."""

HOP = 160
"""Samples between two frames."""

WINDOW = 400
"""Samples of the window of a frame."""


def log_mel(audio: Any, features: int = 80, frames: int = 3000) -> np.ndarray:
    """Returns the log-mel spectrogram of an audio, padded with silence or cut to a number of frames.

    Args:
        audio: samples at 16 kHz from -1 to 1, one-dimensional.
        features: number `F` of mel frequencies.
        frames: number `T` of frames, 100 a second; 3,000 are the 30 seconds of Whisper.

    Returns:
        `f32[F, T]`, on Whisper's scale: logarithms within 8 of the largest, plus 4, divided by 4.

    Raises:
        ValueError: the audio is not one-dimensional, or has no samples or some that are not finite.
    """
    samples = checked_audio(audio)
    whole = np.zeros(frames * HOP, np.float32)
    whole[:len(samples)] = samples[:len(whole)]
    return _spectrogram(whole, features)


def _spectrogram(samples: np.ndarray, features: int) -> np.ndarray:
    """Returns the log-mel spectrogram of all samples, `f32[F, len(samples) // 160]`. Its scale depends on the loudest
    frame."""
    around = np.pad(samples.astype(np.float64), WINDOW // 2, mode="reflect")
    strips = np.lib.stride_tricks.sliding_window_view(around, WINDOW)[::HOP][:len(samples) // HOP]
    found = np.empty((features, len(strips)))
    for i in range(0, len(strips), 1000):       # ten seconds at a time, since spectra take memory
        power = np.abs(np.fft.rfft(strips[i:i + 1000] * _hann(), axis=1)) ** 2
        found[:, i:i + 1000] = np.log10(np.maximum(mel_filters(features).T @ power.T, 1e-10))
    return ((np.maximum(found, found.max() - 8.0) + 4.0) / 4.0).astype(np.float32)


def checked_audio(audio: Any) -> np.ndarray:
    """Returns samples as `f32[N]`.

    Raises:
        ValueError: they are not one-dimensional, there are none, or some are not finite.
    """
    samples = np.asarray(audio)
    if samples.ndim != 1 or not len(samples) or samples.dtype.kind not in "fiu":
        raise ValueError(f"audio: got an array of {samples.dtype} of shape {samples.shape}, takes the samples of one "
                         "channel at 16 kHz")
    if samples.dtype.kind != "f":
        raise ValueError(f"audio: got samples of {samples.dtype}, takes floats from -1 to 1: divide 16-bit samples by "
                         "32,768")
    if not np.isfinite(samples).all():
        raise ValueError("audio: got samples that are not finite")
    return samples.astype(np.float32)


@functools.lru_cache(maxsize=4)
def mel_filters(features: int) -> np.ndarray:
    """Returns triangular filters of equal area on the mel scale of Slaney (1998), from 0 to 8,000 Hz: `f64[201, F]`.

    That scale is linear up to 1,000 Hz, where it is 15, and logarithmic above, with 27 mels for each factor of 6.4.
    """
    edges = _hertz(np.linspace(0.0, 15.0 + np.log(8.0) * 27.0 / np.log(6.4), features + 2))
    slopes = edges[None] - np.linspace(0.0, RATE / 2, WINDOW // 2 + 1)[:, None]
    width = np.diff(edges)
    rising, falling = -slopes[:, :-2] / width[:-1], slopes[:, 2:] / width[1:]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))


def _hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < 15.0, mels * (200.0 / 3.0), 1000.0 * np.exp((mels - 15.0) * np.log(6.4) / 27.0))


@functools.lru_cache(maxsize=1)
def _hann() -> np.ndarray:
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(WINDOW) / WINDOW)
