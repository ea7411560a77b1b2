"""A GGUF file as a checkpoint: its shape, and its tensors under canonical names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libs.checkpoint.checkpoint import Checkpoint
from libs.checkpoint.config import ModelConfig, RopeScaling, check_config
from libs.checkpoint.errors import CheckpointError, UnsupportedModel
from libs.checkpoint.gguf_file import GgufHeader, read_header
from libs.checkpoint.gguf_metadata import Metadata, eos_token_ids, read_tokenizer
from libs.checkpoint.gguf_types import SUPPORTED, check_tensors, read_rows, read_tensor
from libs.checkpoint.parameters import Parameter, parameters
from libs.checkpoint.raw import RawTensor, StoredType
from libs.checkpoint.rope import interleaved_to_halves

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral and SmolLM2 call themselves llama
_ROPE_FACTORS = "rope_freqs.weight"
_QUANT_SUFFIX = re.compile(r"[.-](i?q\d\w*|[bf]f?(16|32))$", re.IGNORECASE)


def open_gguf(path: Path) -> Checkpoint:
    """Read head and metadata of the file at `path`; tensors are checked but not read."""
    header = read_header(path)
    metadata = Metadata(path, header.metadata)
    config = _read_config(metadata, header)
    check_tensors(header)
    if _ROPE_FACTORS in header.tensors:
        config = replace(config, rope_scaling=_rope_factors(header, config))
    weights = _match(header, parameters(config))
    tokenizer = read_tokenizer(metadata)
    if len(tokenizer.tokens) > config.vocab_size:
        raise CheckpointError(
            path, f"damaged: {len(tokenizer.tokens)} tokens, but embeddings for {config.vocab_size}"
        )
    template = metadata.text("tokenizer.chat_template", "")
    return Checkpoint(
        config=config,
        path=path,
        tokenizer=tokenizer,
        chat_template=template or None,
        eos_token_ids=eos_token_ids(metadata, tokenizer),
        content_files=(path,),
        weights=GgufWeights(header, weights, permuted=metadata.text("general.architecture") == "llama"),
    )


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """Tensors by canonical name. `permuted`: rotary rows are stored in interleaved pairs."""

    header: GgufHeader
    by_name: dict[str, Parameter]
    permuted: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    def read(self, name: str) -> NDArray[np.float32]:
        parameter = self.by_name[name]
        values = read_tensor(self.header, self.header.tensors[parameter.gguf_name])
        if self.permuted and parameter.rope_heads is not None:
            return interleaved_to_halves(values, parameter.rope_heads)
        return values

    def stored(self, name: str) -> StoredType:
        info = self.header.tensors[self.by_name[name].gguf_name]
        return StoredType(SUPPORTED[info.type_id].name, info.shape)

    def read_raw(self, name: str, rows: range) -> RawTensor:
        parameter = self.by_name[name]
        info = self.header.tensors[parameter.gguf_name]
        if not (self.permuted and parameter.rope_heads is not None and rows):
            data = read_rows(self.header, info, rows)
        else:  # within a head: what is read is at most a head longer than what is wanted
            places = interleaved_to_halves(np.arange(info.shape[0]), parameter.rope_heads)[
                rows.start : rows.stop
            ]
            first = int(places.min())
            data = read_rows(self.header, info, range(first, int(places.max()) + 1))[places - first]
        return RawTensor(SUPPORTED[info.type_id].name, (len(rows), *info.shape[1:]), data)


def _read_config(metadata: Metadata, header: GgufHeader) -> ModelConfig:
    arch = _architecture(metadata)
    hidden = metadata.integer(f"{arch}.embedding_length")
    heads = metadata.integer(f"{arch}.attention.head_count")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(metadata.path, "damaged: tensor 'token_embd.weight' is missing")
    context = metadata.integer(f"{arch}.context_length")
    window = metadata.optional_id(f"{arch}.attention.sliding_window")
    config = ModelConfig(
        architecture=arch,
        name=_QUANT_SUFFIX.sub("", metadata.path.stem),
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=metadata.integer(f"{arch}.feed_forward_length"),
        num_layers=metadata.integer(f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=metadata.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=_head_dim(metadata, arch, hidden // max(heads, 1)),
        context_length=context,
        rms_norm_eps=metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.number(f"{arch}.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(metadata, arch),
        tied_head="output.weight" not in header.tensors,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        sliding_window=window if window and window < context else None,
    )
    check_config(metadata.path, config)
    if config.num_layers > len(header.tensors):
        raise CheckpointError(
            metadata.path, f"damaged: {config.num_layers} layers, but {len(header.tensors)} tensors"
        )
    return config


def _head_dim(metadata: Metadata, arch: str, default: int) -> int:
    """Queries, keys and values have heads of one size here, all of which is rotated."""
    head_dim = metadata.integer(f"{arch}.attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{arch}.{key}", head_dim) != head_dim:
            raise UnsupportedModel(metadata.path, f"{arch}.{key} other than the head size {head_dim}")
    return head_dim


def _architecture(metadata: Metadata) -> str:
    arch = metadata.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            metadata.path,
            f"architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}",
        )
    if metadata.integer(f"{arch}.expert_count", 0):
        raise UnsupportedModel(metadata.path, f"mixture of experts ({arch}.expert_count) is not supported")
    if metadata.integer("split.count", 1) > 1:
        raise UnsupportedModel(metadata.path, "is one part of a split GGUF; merge the parts first")
    return arch


def _rope_scaling(metadata: Metadata, arch: str) -> RopeScaling | None:
    legacy = metadata.number(f"{arch}.rope.scale_linear", 1.0)
    kind = metadata.text(f"{arch}.rope.scaling.type", "linear" if legacy != 1.0 else "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise UnsupportedModel(metadata.path, f"rope scaling {kind!r} is not supported in GGUF files")
    factor = metadata.number(f"{arch}.rope.scaling.factor", legacy)
    if factor <= 0:
        raise CheckpointError(metadata.path, f"damaged: {arch}.rope.scaling.factor is {factor}")
    return RopeScaling("linear", factor)


def _rope_factors(header: GgufHeader, config: ModelConfig) -> RopeScaling:
    """llama3 scaling: one factor per rotary pair, on top of a linear factor if there is one."""
    info = header.tensors[_ROPE_FACTORS]
    if info.shape != (config.head_dim // 2,):
        raise CheckpointError(header.path, f"damaged: {_ROPE_FACTORS!r} has shape {list(info.shape)}")
    factors = read_tensor(header, info).astype(np.float64)
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise CheckpointError(header.path, f"damaged: {_ROPE_FACTORS!r} holds factors that are not positive")
    linear = 1.0 if config.rope_scaling is None else config.rope_scaling.factor
    return RopeScaling("factors", 1.0, factors=tuple((factors * linear).tolist()))


def _match(header: GgufHeader, wanted: Iterable[Parameter]) -> dict[str, Parameter]:
    """Pair what the model needs with what the file has; both must be complete."""
    by_name: dict[str, Parameter] = {}
    left = set(header.tensors) - {_ROPE_FACTORS}
    for parameter in wanted:
        info = header.tensors.get(parameter.gguf_name)
        if info is None:
            raise CheckpointError(header.path, f"damaged: tensor {parameter.gguf_name!r} is missing")
        if info.shape != parameter.shape:
            raise CheckpointError(
                header.path,
                f"damaged: tensor {info.name!r} has shape {list(info.shape)}, not {list(parameter.shape)}",
            )
        by_name[parameter.name] = parameter
        left.discard(info.name)
    if left:
        raise UnsupportedModel(header.path, f"tensor {min(left)!r} has no place in this architecture")
    return by_name
