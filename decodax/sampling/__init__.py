"""Transforms of logits, the chain of transforms that samplers and verifiers share, and the drawing of tokens."""

from decodax.common.names import directory
from decodax.sampling.adaptive import XTC, DynamicTemperature, Mirostat2, TopNSigma
from decodax.sampling.arithmetic import Arithmetic
from decodax.sampling.bans import AllowedTokens, BadWords, BeginSuppress, LogitBias, SequenceBias, SuppressTokens
from decodax.sampling.base import Context, Temperature, Transform
from decodax.sampling.bregman import BregmanTopK
from decodax.sampling.build import build
from decodax.sampling.config import from_generation_config, generation_settings
from decodax.sampling.custom import Custom
from decodax.sampling.degeneration import FSD, NonMonotonicEnd
from decodax.sampling.distribution import Distribution, Policy
from decodax.sampling.length import UNBOUNDED, ExponentialDecayLength, ForcedBOS, ForcedEOS, MinLength
from decodax.sampling.penalties import EncoderRepetition, PresenceFrequency, Repetition
from decodax.sampling.repeats import Dry, EncoderNoRepeatNgram, NoRepeatNgram
from decodax.sampling.timestamps import Timestamps
from decodax.sampling.warpers import Epsilon, Eta, MinP, TopH, TopK, TopP, Typical
from decodax.sampling.watermark import Detection, GreenList, detect

__all__ = [
    "FSD", "UNBOUNDED", "XTC", "AllowedTokens", "Arithmetic", "BadWords", "BeginSuppress", "BregmanTopK", "Context",
    "Custom", "Detection", "Distribution", "Dry", "DynamicTemperature", "EncoderNoRepeatNgram", "EncoderRepetition",
    "Epsilon", "Eta", "ExponentialDecayLength", "ForcedBOS", "ForcedEOS", "GreenList", "LogitBias", "MinLength", "MinP",
    "Mirostat2", "NoRepeatNgram", "NonMonotonicEnd", "Policy", "PresenceFrequency", "Repetition", "SequenceBias",
    "SuppressTokens", "Temperature", "Timestamps", "TopH", "TopK", "TopNSigma", "TopP", "Transform", "Typical",
    "build", "detect", "from_generation_config", "generation_settings",
]

__dir__ = directory(__all__)
