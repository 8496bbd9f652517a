"""Objectives with which a whole model is tuned, one file for each paper, and the examples that they read."""

from decodax.train.tuning.any_subset import AnySubsetLoss, mask_token
from decodax.train.tuning.apar import branching_examples, tokens_to_write
from decodax.train.tuning.autodeco import DecodingHeadsLoss
from decodax.train.tuning.cllm import ConsistencyLoss, Trajectory, TrajectoryBatches, collect_trajectories
from decodax.train.tuning.distillation import DistilledAnswers, check_teacher
from decodax.train.tuning.examples import Example, ExampleBatches, ExampleRows, read_examples, unused_tokens
from decodax.train.tuning.exits import losses_by_layer
from decodax.train.tuning.hamburger import HamburgerLoss, grouped
from decodax.train.tuning.layer_skip import EarlyExitLoss
from decodax.train.tuning.lud import LexicalUnitLoss, sure_tokens
from decodax.train.tuning.msn import NoisyLoss
from decodax.train.tuning.nmst import SelfTerminatingLoss
from decodax.train.tuning.s3d import SkippyLoss
from decodax.train.tuning.scheduled_sampling import ScheduledSamplingLoss
from decodax.train.tuning.set_blocks import SetBlockLoss
from decodax.train.tuning.soft import SortedLoss
from decodax.train.tuning.space import SemiAutoregressiveLoss

__all__ = ["AnySubsetLoss", "ConsistencyLoss", "DecodingHeadsLoss", "DistilledAnswers", "EarlyExitLoss", "Example",
           "ExampleBatches", "ExampleRows", "HamburgerLoss", "LexicalUnitLoss", "NoisyLoss", "ScheduledSamplingLoss",
           "SelfTerminatingLoss", "SemiAutoregressiveLoss", "SetBlockLoss", "SkippyLoss", "SortedLoss", "Trajectory",
           "TrajectoryBatches", "branching_examples", "check_teacher", "collect_trajectories", "grouped",
           "losses_by_layer", "mask_token", "read_examples", "sure_tokens", "tokens_to_write", "unused_tokens"]
