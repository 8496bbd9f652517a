"""RWKV-X against numbers of the authors' code, in chunks and where a store is cut down; drafts in chains and trees."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import decodax as dx
from decodax.io.files import CheckpointError
from decodax.models import RwkvX, RwkvXConfig
from decodax.models.recurrent.rwkv_x import describe_rwkv_x
from tests.models.networks import rwkv7
from tests.models.networks.rwkv7 import INNER, WIDTH

WANT = json.loads((Path(__file__).parent / "rwkv_x.json").read_text())
LIMITS = {"chunks": 0, "cut": 22}
BLOCKS = 2


@functools.cache
def tensors() -> dict[str, np.ndarray]:
    """Returns the tensors of a tiny published file."""
    r = np.random.default_rng(8)
    found = {f"rwkv.{name}": value for name, value in rwkv7.tensors(4).items()}
    normal = lambda *shape, scale: (r.standard_normal(shape) * scale).astype(np.float32)
    for i in range(BLOCKS):
        for name in ("ln1", "ln2"):
            found[f"moba.{i}.{name}.weight"] = 1 + normal(WIDTH, scale=.2)
            found[f"moba.{i}.{name}.bias"] = normal(WIDTH, scale=.2)
        found |= {f"moba.{i}.att.{name}.weight": normal(WIDTH, WIDTH, scale=.4)
                  for name in ("receptance", "key", "value", "output")}
        found |= {f"moba.{i}.ffn.x_k": r.random((1, 1, WIDTH)).astype(np.float32),
                  f"moba.{i}.ffn.key.weight": normal(INNER, WIDTH, scale=.25),
                  f"moba.{i}.ffn.value.weight": normal(WIDTH, INNER, scale=.2)}
    return found


def write(directory: Path, **config: Any) -> Path:
    save_file(tensors(), directory / "model.safetensors")
    described = describe_rwkv_x({name: value.shape for name, value in tensors().items()})
    (directory / "config.json").write_text(json.dumps({**described, **config}))
    return directory


@functools.cache
def loaded(case: str) -> Any:
    return dx.load(write(Path(tempfile.mkdtemp()), moba_chunk_size=4, moba_topk=2, max_kv_cache_size=LIMITS[case],
                         min_kv_cache_size=15, kv_cache_window_size=5))


def test_logits_of_a_prompt_are_those_of_its_tokens_one_by_one_in_the_authors_code() -> None:
    lm = loaded("chunks")
    assert isinstance(lm.model, RwkvX) and lm.model.config.limit is None
    found = jax.jit(lm.model.forward)(lm.params, np.array([WANT["ids"]], np.int32))[0, 7:]
    np.testing.assert_allclose(np.abs(found).sum(-1), WANT["chunks"]["sums"], atol=1e-3)
    assert found.argmax(-1).tolist() == WANT["chunks"]["best"]


@functools.cache
def run(case: str, algorithm: Any = None, chunk: int = 512) -> list[list[int]]:
    prompts = [WANT["ids"][:8], WANT["ids"][:31], [1, 2, 3]]        # one is longer than the limit
    return dx.generate(loaded(case), prompts, max_new_tokens=40, temperature=[0, 0, 1.0], seed=3, algorithm=algorithm,
                       chunk=chunk).tokens.tolist()


@pytest.mark.wide
@pytest.mark.parametrize("case", LIMITS)
def test_greedy_tokens_are_those_of_the_authors_code_with_drafts_and_without(case: str) -> None:
    plain = run(case)
    assert plain[0] == WANT[case]["greedy"]
    assert run(case, dx.Speculative(dx.drafts.PromptLookup(length=6)), chunk=5) == plain


@pytest.mark.wide
def test_trees_and_rows_alone_give_the_same_tokens() -> None:
    tree = dx.Speculative(dx.drafts.DraftModel(rwkv7.loaded()), shape=dx.trees.Fixed.balanced(2, 2))
    assert run("cut", tree) == run("cut")
    alone = dx.generate(loaded("cut"), [WANT["ids"][:31]], max_new_tokens=40, temperature=0, seed=3, request_ids=[1],
                        chunk=7)
    assert alone.tokens.tolist() == run("cut")[1:2]


@pytest.mark.wide
def test_a_store_holds_what_the_authors_one_holds() -> None:
    from decodax.engine.batch import Job
    from decodax.engine.request import Request

    lm = loaded("cut")
    job = Job.begin(Request.read(lm, [WANT["ids"][:8]], max_new_tokens=40))
    job.advance(None)
    # theirs has read 46 tokens and this one 47, behind which the next one cuts it down
    assert job.state.cache.base.count[0] == WANT["cut"]["size"] + 1 and job.state.cache.length[0] == 47


@pytest.mark.wide
def test_bad_arguments_are_refused_by_name(tmp_path: Path) -> None:
    small = dict(vocab=16, width=8, layers=4, head_dim=4, decay=2, rate=2, value=2, gate=2)
    for wrong, message in (({"sparse": 3}, "sparse: got 3, takes a divisor of the number of layers, 4"),
                           ({"chunk": 0}, "chunk: got 0, takes 1 or more"),
                           ({"keep": 1000}, "limit, keep, recent: got 20000, 1000 and 2000, takes each below")):
        with pytest.raises(ValueError, match=message):
            RwkvXConfig(**{**small, **wrong})               # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draft: got an RWKV-X, takes a model with a buffer"):
        dx.generate(rwkv7.loaded(), [[1, 2]], max_new_tokens=2,
                    algorithm=dx.Speculative(dx.drafts.DraftModel(loaded("chunks"))))
    config = json.loads((write(tmp_path) / "config.json").read_text())
    assert config["moba_chunk_size"] == 2048 and config["max_kv_cache_size"] == 20000
    del config["n_moba_layer"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json of an rwkv_x model lacks 'n_moba_layer'"):
        dx.load(tmp_path)
    net = RwkvX(RwkvXConfig(**small, sparse=2, chunk=4, top=1))        # type: ignore[arg-type]
    assert np.isfinite(net.forward(net.init_params(jax.random.key(0)), np.array([[1, 2, 3]]))).all()
    assert net.init_cache(1, 256).needs_refresh() is None and net.init_cache(1, 20001).needs_refresh() is not None
