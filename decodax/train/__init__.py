"""Functions that train or measure the additional parts of methods, such as predictors, kernels, codebooks and shared
heads."""

from decodax.algorithms.speculative import fit_lengths, fit_predictor, fit_skipped_layers, fit_tree
from decodax.algorithms.speculative.adaptive.fit_sequoia import fit_acceptance, fit_sequoia
from decodax.algorithms.speculative.adaptive.fit_stoppers import fit_acceptance_head, fit_draft_length
from decodax.common.names import directory
from decodax.train.aqua_kv import fit_predictors
from decodax.train.attention_predictor import fit_attention_predictor
from decodax.train.cq import fit_codebooks
from decodax.train.cskv import fit_features
from decodax.train.drafting.confidence import fit_confidence
from decodax.train.drafting.sparse_trees import fit_sparse_trees
from decodax.train.echo_att import attention_similarity, echo_groups, fit_echo_att
from decodax.train.fewer_heads import fit_kv_heads, mean_kv_heads
from decodax.train.fixed_depth import sub_model
from decodax.train.kv_prediction import fit_kv_prediction, train_kv_prediction
from decodax.train.leank import fit_channels
from decodax.train.less import fit_less
from decodax.train.probe import Probe, fit_heads, fit_layers
from decodax.train.query_aware import fit_key_books
from decodax.train.rotatekv import fit_order
from decodax.train.scaling import fit_scaling
from decodax.train.token_butler import fit_token_butler

__all__ = ["Probe", "attention_similarity", "echo_groups", "fit_acceptance", "fit_acceptance_head",
           "fit_attention_predictor", "fit_channels", "fit_codebooks", "fit_confidence", "fit_draft_length",
           "fit_echo_att", "fit_features", "fit_heads", "fit_key_books", "fit_kv_heads", "fit_kv_prediction",
           "fit_layers", "fit_lengths", "fit_less", "fit_order", "fit_predictor", "fit_predictors", "fit_scaling",
           "fit_sequoia", "fit_skipped_layers", "fit_sparse_trees", "fit_token_butler", "fit_tree", "mean_kv_heads",
           "sub_model", "train_kv_prediction"]

__dir__ = directory(__all__)
