"""Dual chunk attention on a mesh. It imports no torch, beside which collectives on CPU crash."""

import pytest

import decodax as dx
from decodax.models.dual_chunk import with_dual_chunk
from tests.meshes import mesh_of, same_tokens

pytestmark = pytest.mark.mesh


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_same_tokens(kind: str) -> None:
    """Chunks of 12 tokens, heads over "model", and drafts."""
    mesh = mesh_of(kind, data=4, model=2)
    alone, parted = (with_dual_chunk(dx.load("sums", mesh=mesh), 16, 4) for mesh in (None, mesh))
    asked = ["34+51-07=\n", "12*13=\n", "99-98+11*2=\n", "11+11=\n"]
    same_tokens(alone, parted, asked, 30)
