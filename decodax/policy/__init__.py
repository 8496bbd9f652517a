"""One distribution: the chain of logit transforms that sampler and verifiers share."""

from decodax.policy.adaptive import XTC, DynamicTemperature, Mirostat2, TopNSigma
from decodax.policy.arithmetic import Arithmetic
from decodax.policy.bans import AllowedTokens, BadWords, BeginSuppress, LogitBias, SequenceBias, SuppressTokens
from decodax.policy.base import Context, Distribution, Policy, Temperature, Transform
from decodax.policy.bregman import BregmanTopK
from decodax.policy.build import build
from decodax.policy.config import from_generation_config, generation_settings
from decodax.policy.custom import Custom
from decodax.policy.degeneration import FSD, NonMonotonicEnd
from decodax.policy.length import UNBOUNDED, ExponentialDecayLength, ForcedBOS, ForcedEOS, MinLength
from decodax.policy.penalties import EncoderRepetition, PresenceFrequency, Repetition
from decodax.policy.repeats import Dry, EncoderNoRepeatNgram, NoRepeatNgram
from decodax.policy.warpers import Epsilon, Eta, MinP, TopH, TopK, TopP, Typical
from decodax.policy.watermark import Detection, GreenList, detect

__all__ = [
    "FSD", "UNBOUNDED", "XTC", "AllowedTokens", "Arithmetic", "BadWords", "BeginSuppress", "BregmanTopK", "Context",
    "Custom", "Detection", "Distribution", "Dry", "DynamicTemperature", "EncoderNoRepeatNgram", "EncoderRepetition",
    "Epsilon", "Eta", "ExponentialDecayLength", "ForcedBOS", "ForcedEOS", "GreenList", "LogitBias", "MinLength", "MinP",
    "Mirostat2", "NoRepeatNgram", "NonMonotonicEnd", "Policy", "PresenceFrequency", "Repetition", "SequenceBias",
    "SuppressTokens", "Temperature", "TopH", "TopK", "TopNSigma", "TopP", "Transform", "Typical", "build", "detect",
    "from_generation_config", "generation_settings",
]
