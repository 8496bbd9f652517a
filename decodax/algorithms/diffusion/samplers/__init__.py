"""Published samplers of masked diffusion: a file for each paper, or for papers of the same authors."""

# Each module registers its entries. The order of these is the order of the listing.
# isort: off
from decodax.algorithms.diffusion.samplers import (  # noqa: F401
    llada,
    dream,
    maskgit,
    mdlm,
    bd3_lm,
    fast_dllm,
    entropy_bounded,
    sbd,
    sdar,
    sdlm,
    dparallel,
    prophet,
    learn2pd,
    adablock,
    localleap,
    ccd,
    dinfer,
    dimple,
    diffusion_gemma,
    freedave,
    ssd,
    d2f,
    d3llm,
    apd,
    dkv_cache,
    flashdlm,
    recap,
    dllm_cache,
    elastic_cache,
)
# isort: on
