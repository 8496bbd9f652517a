"""Loads the checkpoints of the conformance tests."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from tests.conformance.checkpoints import write


@functools.cache
def loaded(name: str, directory: Path) -> dx.LM:
    lm = dx.load(write(name, directory))
    # weights that no device is fixed for, as a state is at first: else each program is compiled twice.
    # The cases go on beyond the checkpoint's EOS, unless they say otherwise
    return dataclasses.replace(lm, params=jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), lm.params),
                               generation_config={})
