"""RWKV-7 against numbers of the authors' code."""

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core.window import causal
from decodax.io.files import CheckpointError
from decodax.models import Rwkv7, Rwkv7Config
from tests.models.networks.rwkv7 import loaded, tensors, write

WANT = json.loads((Path(__file__).parent / "rwkv7.json").read_text())


@pytest.mark.wide
def test_logits_and_greedy_tokens_are_those_of_the_authors_code() -> None:
    lm, text = loaded(), np.array([WANT["ids"]], np.int32)
    assert isinstance(lm.model, Rwkv7)
    apply = jax.jit(lambda params, window, cache: lm.model.apply(params, window, cache).logits())
    window = causal(jnp.asarray(text), jnp.zeros(1, jnp.int32))
    for found in (jax.jit(lm.model.forward)(lm.params, text)[0],                        # as a prompt, and as drafts
                  apply(lm.params, window, lm.model.init_cache(1, 32))[0]):
        np.testing.assert_allclose(found[-1], WANT["last"], atol=1e-4)
        np.testing.assert_allclose(np.abs(found).sum(-1), WANT["sums"], atol=1e-3)
        assert found.argmax(-1).tolist() == WANT["best"]
    out = dx.generate(lm, [WANT["ids"][:11], [1, 2]], max_new_tokens=len(WANT["greedy"]), chunk=4)
    assert out.tokens[0].tolist() == WANT["greedy"]


@pytest.mark.wide
def test_a_published_file_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from scripts.convert import rwkv as convert

    torch.save({name: torch.tensor(value) for name, value in tensors().items()}, tmp_path / "tiny.pth")
    convert(tmp_path / "tiny.pth", tmp_path / "made")
    found = dx.load(tmp_path / "made", weights="int8")
    assert np.isfinite(found.model.forward(found.params, np.array([[1, 2, 3]]))).all()
    same = dx.load(tmp_path / "made").params
    assert all(map(np.array_equal, *map(jax.tree.leaves, (same, loaded().params))))
    with pytest.raises(ValueError, match=r"directory: .* exists"):
        convert(tmp_path / "tiny.pth", tmp_path / "made")
    torch.save({"wte": torch.zeros(2, 2)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"checkpoint: got tensors without 'emb\.weight'"):
        convert(tmp_path / "other.pth", tmp_path / "another")


@pytest.mark.wide
def test_fresh_weights_and_refusals(tmp_path: Path) -> None:
    net = Rwkv7(Rwkv7Config(vocab=16, width=8, layers=2, head_dim=4, decay=2, rate=2, value=2, gate=2))
    assert jnp.isfinite(net.forward(net.init_params(jax.random.key(0)), jnp.array([[1, 2, 3]]))).all()
    for wrong, message in (({"layers": 0}, "layers: got 0, takes 1 or more"), ({"head_dim": 3}, "width: got 8, takes")):
        with pytest.raises(ValueError, match=message):
            Rwkv7Config(**{**dict(vocab=16, width=8, layers=1, head_dim=4), **wrong})
    with pytest.raises(ValueError, match=r"cache: got .*, but Rwkv7 has a cache of its own"):
        dx.generate(loaded(), [[1, 2]], cache="knorm", max_new_tokens=2)
    write(tmp_path, {name: value for name, value in tensors().items() if not name.endswith("1.att.w1")})
    with pytest.raises(CheckpointError, match=r"lacks tensor blocks\.1\.att\.w1"):
        dx.load(tmp_path)
    with pytest.raises(ValueError, match=r"mesh: got one for .*, takes None: an RWKV-7 runs on one device"):
        dx.load(write(Path(tempfile.mkdtemp()), tensors()), mesh=jax.make_mesh((1, 8), ("data", "model")))
