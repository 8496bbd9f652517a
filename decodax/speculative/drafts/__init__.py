"""Sources of drafts, one file each."""

from decodax.speculative.drafts.aded import ADED
from decodax.speculative.drafts.callable import UserDraft
from decodax.speculative.drafts.clasp import CLaSp
from decodax.speculative.drafts.draft_exit import DraftExit
from decodax.speculative.drafts.dynamic_exit import DynamicExit
from decodax.speculative.drafts.fallback import Fallback
from decodax.speculative.drafts.fastcot import FastCoT
from decodax.speculative.drafts.forced import Forced
from decodax.speculative.drafts.input_guided import InputGuided
from decodax.speculative.drafts.intersection import Intersection
from decodax.speculative.drafts.jacobi import HGJ, PGJ, PJ, Jacobi
from decodax.speculative.drafts.knn_ssd import KNNSkip, fit_anchors
from decodax.speculative.drafts.layer_skip import LayerSkip
from decodax.speculative.drafts.lookahead import Lookahead
from decodax.speculative.drafts.merged import Merged
from decodax.speculative.drafts.model import DraftModel
from decodax.speculative.drafts.ngram import NGram, NGramModel
from decodax.speculative.drafts.own_cache import OwnCache
from decodax.speculative.drafts.pearl import Pearl
from decodax.speculative.drafts.prompt_lookup import PromptLookup
from decodax.speculative.drafts.realigned import Realigned
from decodax.speculative.drafts.recycling import TokenRecycling
from decodax.speculative.drafts.sjd import SJD
from decodax.speculative.drafts.specbranch import SpecBranch
from decodax.speculative.drafts.staged import Staged
from decodax.speculative.drafts.stand import Stand
from decodax.speculative.drafts.suffix import SuffixAutomaton
from decodax.speculative.drafts.suffix_tree import SuffixTree
from decodax.speculative.drafts.target_rooted import TargetRooted
from decodax.speculative.drafts.trie import Trie

__all__ = ["ADED", "HGJ", "PGJ", "PJ", "SJD", "CLaSp", "DraftExit", "DraftModel", "DynamicExit", "Fallback", "FastCoT",
           "Forced", "InputGuided", "Intersection", "Jacobi", "KNNSkip", "LayerSkip", "Lookahead", "Merged", "NGram",
           "NGramModel", "OwnCache", "Pearl", "PromptLookup", "Realigned", "SpecBranch", "Staged", "Stand",
           "SuffixAutomaton", "SuffixTree", "TargetRooted", "TokenRecycling", "Trie", "UserDraft", "fit_anchors"]
