"""Sources of drafts, one file each."""

from decodax.speculative.drafts.model import DraftModel
from decodax.speculative.drafts.prompt_lookup import PromptLookup

__all__ = ["DraftModel", "PromptLookup"]
