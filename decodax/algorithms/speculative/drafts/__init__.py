"""Sources of drafts, one file for each: from the text, from another model, from the target with fewer layers or a
smaller cache, and from Jacobi iteration of the target's own guesses."""

from decodax.algorithms.speculative.drafts.fallback import Fallback
from decodax.algorithms.speculative.drafts.forced import Forced
from decodax.algorithms.speculative.drafts.jacobi.fastcot import FastCoT
from decodax.algorithms.speculative.drafts.jacobi.jacobi import PGJ, Jacobi
from decodax.algorithms.speculative.drafts.jacobi.lookahead import Lookahead
from decodax.algorithms.speculative.drafts.jacobi.sjd import SJD
from decodax.algorithms.speculative.drafts.jacobi.tr_jacobi import TRJacobi

# entries without a class of their own
from decodax.algorithms.speculative.drafts.model import pearl, speculative_decoding  # noqa: F401
from decodax.algorithms.speculative.drafts.model.callable import UserDraft
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.model.improved_mcsd import TargetRooted
from decodax.algorithms.speculative.drafts.model.pard import MaskedDrafts
from decodax.algorithms.speculative.drafts.model.pard2 import AlignedDrafts
from decodax.algorithms.speculative.drafts.model.specbranch import SpecBranch
from decodax.algorithms.speculative.drafts.model.specdec import NonAutoregressive
from decodax.algorithms.speculative.drafts.model.specinfer import Merged
from decodax.algorithms.speculative.drafts.model.staged import Staged
from decodax.algorithms.speculative.drafts.model.tli import Intersection
from decodax.algorithms.speculative.drafts.model.uag import Realigned
from decodax.algorithms.speculative.drafts.self import magicdec, quantspec, specache, triforce  # noqa: F401
from decodax.algorithms.speculative.drafts.self.clasp import CLaSp
from decodax.algorithms.speculative.drafts.self.draft_exit import DraftExit
from decodax.algorithms.speculative.drafts.self.dynamic_exit import DynamicExit
from decodax.algorithms.speculative.drafts.self.knn_ssd import KNNSkip, fit_anchors
from decodax.algorithms.speculative.drafts.self.layer_skip import LayerSkip
from decodax.algorithms.speculative.drafts.self.own_cache import OwnCache
from decodax.algorithms.speculative.drafts.text.aded import ADED
from decodax.algorithms.speculative.drafts.text.aggressive_decoding import InputGuided
from decodax.algorithms.speculative.drafts.text.ngram import NGram, NGramModel
from decodax.algorithms.speculative.drafts.text.pain_lookahead import NGramTrie
from decodax.algorithms.speculative.drafts.text.prompt_lookup import PromptLookup
from decodax.algorithms.speculative.drafts.text.sam_decoding import SuffixAutomaton
from decodax.algorithms.speculative.drafts.text.stand import Stand
from decodax.algorithms.speculative.drafts.text.suffix_decoding import SuffixTree
from decodax.algorithms.speculative.drafts.text.token_recycling import TokenRecycling
from decodax.common.names import directory

__all__ = [
           "ADED",
           "PGJ",
           "SJD",
           "AlignedDrafts",
           "CLaSp",
           "DraftExit",
           "DraftModel",
           "DynamicExit",
           "Fallback",
           "FastCoT",
           "Forced",
           "InputGuided",
           "Intersection",
           "Jacobi",
           "KNNSkip",
           "LayerSkip",
           "Lookahead",
           "MaskedDrafts",
           "Merged",
           "NGram",
           "NGramModel",
           "NGramTrie",
           "NonAutoregressive",
           "OwnCache",
           "PromptLookup",
           "Realigned",
           "SpecBranch",
           "Staged",
           "Stand",
           "SuffixAutomaton",
           "SuffixTree",
           "TRJacobi",
           "TargetRooted",
           "TokenRecycling",
           "UserDraft",
           "fit_anchors",
]

__dir__ = directory(__all__)
