"""Published methods that are functions, by name. They are in no table of systems, cache policies, searches or rules;
`decodax searches` lists them after the searches and rules."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Function:
    """A published method that is called.

    Attributes:
        name: how it is called, below `decodax`. title: the paper's. authors: and year. summary: one line.
    """

    name: str
    title: str
    authors: str
    summary: str

    @property
    def call(self) -> Callable[..., Any]:
        """The function itself, or the class where one makes an object first."""
        home, _, name = self.name.rpartition(".")
        return getattr(importlib.import_module(f"decodax.{home}" if home else "decodax"), name)


FUNCTIONS: dict[str, Function] = {entry.name: entry for entry in (
    Function("search.lookahead_reasoning", "Scaling Speculative Decoding with Lookahead Reasoning", "Fu et al. 2025",
             "a small model drafts whole steps, which stand if the large one says the same"),
    Function("search.atts", "ATTS: Asynchronous Test-Time Scaling via Conformal Prediction", "Xiong et al. 2025",
             "a small model's chunks stand unless they are too surprising; the gate alone, in lock step"),
    Function("search.integrate",
             "Integrative Decoding: Improve Factuality via Implicit Self-consistency",
             "Cheng et al. 2024", "one answer by the mean of rows, each with another sampled answer in front"),
    Function("search.pedal",
             "PEDAL: Enhancing Greedy Decoding with Large Language Models using Diverse Exemplars",
             "Prabhu 2024", "greedy answers after different exemplars, of which the model makes one"),
    Function("search.batch_prompt", "BatchPrompt: Accomplish more with less", "Lin et al. 2024",
             "many items in one prompt, asked again in other orders"),
    Function("search.sketch_guided",
             "Sketch-Guided Constrained Decoding for Boosting Blackbox Large Language Models without Logit Access",
             "Geng et al. 2024", "a black box sketches, a local model writes under a constraint"),
    Function("search.self_infill", "Self-Infilling Code Generation", "Zheng et al. 2023",
             "where the model is uncertain it writes the end first, and then what is missing"),
    Function("search.lattice_decode",
             "Massive-scale Decoding for Text Generation using Lattices",
             "Xu, Jonnalagadda and Durrett 2022", "very many texts in one lattice, with few model calls"),
    Function("search.lag_decode",
             "Autoregressive Large Language Models are Computationally Universal",
             "Schuurmans et al. 2024", "a text as a queue: read at the head, written at the tail"),
    Function("search.desel",
             "Rethinking Model Selection and Decoding for Keyphrase Generation with Pre-trained Sequence-to-Sequence "
             "Models",
             "Wu, Ahmad and Chang 2023", "a list as greedy decoding writes it, and likely items of samples"),
    Function("search.heal", "Understanding and Mitigating Tokenization Bias in Language Models", "Phan et al. 2024",
             "the prompt's last tokens are drawn anew among all that cover its text"),
    Function("select.first_finish",
             "First Finish Search: Efficient Test-Time Scaling in Large Language Models",
             "Agarwal et al. 2025", "of several samples the one that ends first; `choose` calls it \"first-finish\""),
    Function("select.allocate",
             "Learning How Hard to Think: Input-Adaptive Allocation of LM Computation",
             "Damani et al. 2024", "how many samples each prompt gets, by given chances of success"),
    Function("select.classify",
             "To Each Metric Its Decoding: Post-Hoc Optimal Decision Rules of Probabilistic Hierarchical Classifiers",
             "Plaud et al. 2025", "the class that makes hierarchical F-beta largest"),
    Function("select.resolve_edits",
             "Training Language Models on Synthetic Edit Sequences Improves Code Synthesis",
             "Piterbarg et al. 2024", "the program that a sequence of edits makes"),
    Function("select.pass_at_k", "Evaluating Large Language Models Trained on Code", "Chen et al. 2021",
             "the chance that one of k samples is right"),
    Function("select.alignment", "Language Model Decoding as Likelihood-Utility Alignment", "Josifoski et al. 2023",
             "whether what the model finds likely is good"),
    Function("select.faithfulness", "Measuring Faithfulness in Chain-of-Thought Reasoning", "Lanham et al. 2023",
             "whether answers rest on their rationales"),
    Function("algorithms.contrastive.dola",
             "DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language Models",
             "Chuang et al. 2024", "a model that decodes by what its last layer adds to an early one"),
    Function("algorithms.contrastive.contrast",
             "Contrastive Decoding: Open-ended Text Generation as Optimization",
             "Li et al. 2023", "a model that decodes by contrast with a smaller one"),
    Function("algorithms.contrastive.autodeco",
             "The End of Manual Decoding: Towards Truly End-to-End Language Models",
             "Wang et al. 2025", "a model that chooses temperature and top-p of each token"),
    Function("algorithms.beams.ctc.ctc_beam_search",
             "Deep Speech 2: End-to-End Speech Recognition in English and Mandarin",
             "Amodei et al. 2016", "beams of prefixes over the outputs of a CTC model"),
    Function("contrib.arc.fit",
             "ARC-Encoder: learning compressed text representations for large language models",
             "Pilchen et al. 2025", "an encoder of contexts into few vectors that a decoder reads"),
    Function("read_twice", "Just read twice: closing the recall gap for recurrent language models", "Arora et al. 2024",
             "a prompt with its context twice"),
    Function("detect_watermark", "A Watermark for Large Language Models", "Kirchenbauer et al. 2023",
             "whether a text bears a watermark of the policy"),
    Function("weave",
             "TokenWeave: Efficient Compute-Communication Overlap for Distributed LLM Inference",
             "Gond, Kwatra and Ramjee 2025", "two halves of a batch, one of which computes while the other sends"),
    Function("algorithms.speculative.split.Split",
             "Dovetail: A CPU/GPU Heterogeneous Speculative Decoding for LLM inference",
             "Zhang et al. 2024", "draft model and target on devices of different kinds"))}
"""All of them, by name."""
