"""Prompts with images for tiny whole models of transformers, and the vectors that their own encoders give."""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import decodax as dx
from decodax.models import Images
from tests.models.families.tiny_images import saved

IMAGE, NEW = 96, 6
MROPE = ("qwen2-vl", "qwen2.5-vl", "qwen2.5-vl-yarn", "qwen3-vl", "qwen3-vl-moe", "qwen3.5", "qwen3.5-moe", "qwen4",
         "hy4-vl")
PIXTRAL = ("mistral3", "mistral-large4")
GRIDS = [[(1, 4, 6), (1, 2, 4)], [(1, 4, 4)], []]
"""Sizes of each prompt's images, in patches, four of which make a token; in Hy4 each row has one more. Images of other
models have 4 tokens."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A whole model, what this library loads of it, prompts, their images, and what the whole model gives."""

    reference: Any
    lm: Any
    prompts: list[list[int]]
    images: Any
    arguments: list[dict[str, Any]]

    def logits(self, row: int) -> np.ndarray:
        with torch.no_grad():
            return self.reference(**self.arguments[row]).logits[0].numpy()

    def greedy(self, row: int, **options: Any) -> list[int]:
        self.reference.generation_config.eos_token_id = None
        made = self.reference.generate(**self.arguments[row], max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                                       **options)
        return made[0, len(self.prompts[row]):].tolist()

    def tokens(self, rows: Any = (0, 1, 2), **options: Any) -> list[list[int]]:
        index = list(rows)
        inputs = jax.tree.map(lambda x: x[np.array(index)], self.images)
        return dx.generate(self.lm, [self.prompts[i] for i in index], inputs=inputs, max_new_tokens=NEW,
                           eos_token_id=[], **options).tokens.tolist()


@functools.cache
def case(name: str) -> Case:
    directory = Path(tempfile.mkdtemp())
    reference = saved(name, directory)
    lm, r = dx.load(directory), np.random.default_rng(1)
    text = lambda n: r.integers(3, 80, n).tolist()
    lines, frames = (1, 1) if name == "hy4-vl" else (0, 2)
    sizes = [[t * (h // 2) * (w // 2 + lines) if name in MROPE else 4 for t, h, w in row] for row in GRIDS]
    prompts = [text(3), text(2), text(7)]
    for prompt, row in zip(prompts, sizes, strict=True):
        for size in row:
            prompt += [IMAGE] * size + text(3)
    embeddings, deepstack, arguments = [], [], []
    for prompt, row in zip(prompts, GRIDS, strict=True):
        given: dict[str, Any] = {"input_ids": torch.tensor([prompt])}
        kinds = (given["input_ids"] == IMAGE).long()
        seen, deep = [], []
        if row and name in MROPE:
            patches = sum(t * h * w for t, h, w in row)
            vision = reference.config.vision_config
            size = patches, 3 * frames * vision.patch_size ** 2
            given |= {"pixel_values": torch.tensor(r.normal(size=size)).float(),
                      "image_grid_thw": torch.tensor(row), "mm_token_type_ids": kinds}
            with torch.no_grad():
                found = reference.model.get_image_features(given["pixel_values"], given["image_grid_thw"],
                                                           return_dict=True)
            seen = [x.numpy() for x in found.pooler_output]
            layers = [[x.numpy() for x in layer] for layer in getattr(found, "deepstack_features", None) or []]
            deep = [np.stack([layer[i] for layer in layers]) for i in range(len(row))] if layers else []
        elif row and name in ("glm5-next", "minimax-m3"):
            grid, vision = torch.tensor([(1, 4, 4)] * len(row)), reference.config.vision_config
            given |= {"image_grid_thw": grid, "pixel_values": torch.tensor(
                r.normal(size=(16 * len(row), 6 * vision.patch_size ** 2))).float()}
            with torch.no_grad():
                found = reference.model.get_image_features(given["pixel_values"], grid, return_dict=True)
            seen = [x.numpy() for x in found.pooler_output]
        elif row:
            side = reference.config.vision_config.image_size
            given |= {"pixel_values": torch.tensor(r.normal(size=(len(row), 3, side, side))).float()}
            if name == "gemma3":
                given |= {"token_type_ids": kinds}
            more = {"image_sizes": torch.tensor([[side, side]] * len(row))} if name in PIXTRAL else {}
            given |= more
            with torch.no_grad():
                found = reference.model.get_image_features(given["pixel_values"], return_dict=True, **more)
            seen = [x.numpy() for x in found.pooler_output]
        embeddings.append(seen)
        deepstack.append(deep)
        arguments.append(given)
    further: dict[str, Any] = {"grids": GRIDS} if name in MROPE else {}
    further |= {"deepstack": deepstack} if name.startswith("qwen3-vl") else {}
    images = Images.of(lm, prompts, embeddings, **further)
    return Case(reference, lm, prompts, images, arguments)


CASES = [*MROPE, "gemma3", "glm5-next", "minimax-m3", *PIXTRAL]
