"""A Hugging Face folder as a checkpoint: config.json, safetensors in one file or in shards, tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libs.checkpoint.checkpoint import Checkpoint
from libs.checkpoint.config import ModelConfig
from libs.checkpoint.errors import CheckpointError, UnsupportedModel
from libs.checkpoint.hf_config import CONFIG_FILE, read_config
from libs.checkpoint.hf_json import HfIndex, read_json
from libs.checkpoint.hf_tokenizer import chat_template, eos_token_ids, read_tokenizer
from libs.checkpoint.parameters import Parameter, parameters
from libs.checkpoint.raw import RawTensor, StoredType
from libs.checkpoint.safetensors_file import StoredTensor, check_dtype, read_rows, read_table, read_tensor

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_UNUSED_SUFFIX = ".rotary_emb.inv_freq"  # a constant that older files carry along


def open_hf(folder: Path) -> Checkpoint:
    """Read the configuration and the tables of all weight files; no weight is read."""
    config = read_config(folder)
    stored, files = _find_tensors(folder)
    tokenizer = read_tokenizer(folder)
    return Checkpoint(
        config=config,
        path=folder,
        tokenizer=tokenizer,
        chat_template=chat_template(folder, tokenizer),
        eos_token_ids=eos_token_ids(folder, tokenizer),
        content_files=(folder / CONFIG_FILE, *files),
        weights=HfWeights(_match(files[0], stored, config, parameters(config))),
    )


@dataclass(frozen=True, slots=True)
class HfWeights:
    """Tensors by canonical name."""

    by_name: dict[str, StoredTensor]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    def read(self, name: str) -> NDArray[np.float32]:
        return read_tensor(self.by_name[name])

    def stored(self, name: str) -> StoredType:
        tensor = self.by_name[name]
        return StoredType(tensor.dtype, tensor.shape)

    def read_raw(self, name: str, rows: range) -> RawTensor:
        tensor = self.by_name[name]
        return RawTensor(tensor.dtype, (len(rows), *tensor.shape[1:]), read_rows(tensor, rows))


def _find_tensors(folder: Path) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """Tensors by their names in the files, and the files that decide about their content, in a fixed order."""
    index, single = folder / INDEX_FILE, folder / WEIGHTS_FILE
    if index.exists():
        return _find_in_shards(folder, index)
    if single.exists():
        return read_table(single), (single,)
    others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern))
    if others:
        raise UnsupportedModel(folder / others[0], "is a pickle; weights are read from safetensors only")
    raise CheckpointError(folder, f"holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")


def _find_in_shards(folder: Path, index: Path) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """Each tensor from the shard that the index names, whatever else the shards hold."""
    weight_map = read_json(index, HfIndex).weight_map
    tables: dict[str, dict[str, StoredTensor]] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(index, f"damaged: {shard!r} is not the name of a file in this folder")
        if not (folder / shard).exists():
            raise CheckpointError(folder / shard, f"is missing, but {INDEX_FILE} lists it")
        tables[shard] = read_table(folder / shard)
    stored: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        if name not in tables[shard]:
            raise CheckpointError(folder / shard, f"has no tensor {name!r}, but {INDEX_FILE} says so")
        stored[name] = tables[shard][name]
    return stored, (index, *(folder / shard for shard in sorted(tables)))


def _match(
    listing: Path, stored: dict[str, StoredTensor], config: ModelConfig, wanted: Iterable[Parameter]
) -> dict[str, StoredTensor]:
    """Pair what the model needs with what the files have; both must be complete."""
    if config.num_layers > len(stored):
        raise CheckpointError(listing, f"holds {len(stored)} tensors for {config.num_layers} layers")
    by_name: dict[str, StoredTensor] = {}
    left = {name for name in stored if not name.endswith(_UNUSED_SUFFIX)}
    if config.tied_head:
        left.discard("lm_head.weight")  # a copy of the embedding
    for parameter in wanted:
        tensor = stored.get(parameter.hf_name)
        if tensor is None:
            raise CheckpointError(listing, f"tensor {parameter.hf_name!r} is missing")
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                tensor.path,
                f"tensor {tensor.name!r} has shape {list(tensor.shape)}, "
                f"but {CONFIG_FILE} says {list(parameter.shape)}",
            )
        check_dtype(tensor)
        by_name[parameter.name] = tensor
        left.discard(tensor.name)
    if left:
        raise UnsupportedModel(listing, f"tensor {min(left)!r} has no place in {config.architecture!r}")
    return by_name
