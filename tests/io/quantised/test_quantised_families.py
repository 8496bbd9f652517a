"""Each family of decoders loads from a quantised directory, with the dequantised weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from decodax.io.checkpoint import load_model
from decodax.models.names import flatten
from decodax.models.packed import Packed
from tests.io.quantised.test_quantised_checkpoints import assert_same_weights
from tests.io.quantised.writer import KINDS, Tensors, write_safetensors
from tests.matrix import often
from tests.models.tiny import ALIKE, CASES, saved

LEFT = re.compile(r"embed|wte|wpe|lm_head|norm|router|\.gate\.weight|\.wg\.|gate_weight|conv1d|conv\.conv|A_log|dt_"
                  r"|\.x_proj|_scale")
"""Parts of names of tensors that quantisers leave out."""


def quantised(name: str, kind: str, root: Path) -> tuple[Path, Path, set[str]]:
    """Writes a case of `tests.models.tiny` quantised and with the dequantised weights; returns the directories and the
    names of the layers."""
    saved(name, root / "plain")
    file = "model.safetensors"
    config, writer = KINDS[kind]
    made, plain, done = Tensors(), Tensors(), set()
    for tensor, value in load_file(root / "plain" / file).items():
        plain[tensor], stem = value.float().numpy(), tensor.removesuffix(".weight")
        if value.ndim == 2 and tensor != stem and not LEFT.search(tensor):
            # Quantisers turn the layers of GPT-2, which have inputs first, into linear ones.
            turned = (lambda x: x.T) if CASES[name][0] == "gpt2" else (lambda x: x)
            parts, decoded = writer(stem, turned(plain[tensor]))
            plain[tensor] = turned(decoded)
            made |= parts
            done.add(stem)
        else:
            made[tensor] = plain[tensor]
    (root / "quantised").mkdir()
    write_safetensors(root / "quantised" / file, made)
    write_safetensors(root / "plain" / file, plain)
    entries = json.loads((root / "plain" / "config.json").read_text())
    (root / "quantised" / "config.json").write_text(json.dumps({**entries, "quantization_config": config}))
    return root / "quantised", root / "plain", done


@pytest.mark.wide
@pytest.mark.parametrize("name", often([name for name in CASES if name not in ALIKE], CASES))
def test_weights_of_each_family_are_the_dequantised_ones(name: str, tmp_path: Path) -> None:
    directory, plain, done = quantised(name, "fp8", tmp_path)
    (_, params), (_, wanted) = (load_model(root, "float32", context=CASES[name][2]) for root in (directory, plain))
    assert_same_weights(params, wanted)
    packed = {path for path, leaf in flatten(params).items() if isinstance(leaf, Packed)}
    assert done and packed
