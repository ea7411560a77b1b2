"""Operations of a model on CPU tensors, each with its reference, its versions and its cases.

environment  what MKL and OpenMP read before they start; set when this package is imported
determinism  whether a row's bits depend on nothing but the row: measured
matmul       linear layers and batched products whose rows keep their bits
norm         rms_norm
rope         rotary position embedding
activation   silu_mul
kv           writing KV into the pool, reading tiles of blocks from it
attention    attention over the pool, tile by tile, as attention_plan lays out
operations   all of them: what tests/kernels runs on all of `cases`
"""

from libs.kernels.environment import prepare

prepare()
