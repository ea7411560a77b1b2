"""Damaged Hugging Face folders: safetensors files, shards and their index, JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libs.checkpoint.open import CheckpointError, UnsupportedModel, open_checkpoint
from libs.checkpoint.parameters import parameters
from libs.checkpoint.safetensors_file import read_table
from tests.checkpoints import tiny_model, write_hf, write_safetensors
from tests.unit.checkpoint_damage import NUM_ROUNDS, SEED, bounded_memory, open_and_read


@pytest.fixture(scope="module")
def tensors_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    write_safetensors(path, {"a": np.ones((2, 3), np.float32), "b": np.ones((4,), np.float32)})
    return path.read_bytes()


def rebuilt(content: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The file with another header."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    changed = change(header)
    raw = json.dumps(header if changed is None else changed).encode()
    return len(raw).to_bytes(8, "little") + raw + content[8 + length :]


def _set(name: str, **fields: Any) -> Callable[[bytes], bytes]:
    return lambda content: rebuilt(content, lambda header: header[name].update(fields))


TENSOR_CASES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("cut", lambda c: c[:-1], "cut short"),
    ("longer", lambda c: c + b"\0", "describes"),
    ("empty", lambda c: b"", "header of 0 bytes"),
    ("short", lambda c: c[:7], "in a file of 7 bytes"),
    ("length", lambda c: (2**63).to_bytes(8, "little") + c[8:], "header of 9223372036854775808 bytes"),
    ("json", lambda c: c[:8] + b"[" + c[9:], "damaged: 'header'"),
    ("utf8", lambda c: c.replace(b'"a"', b'"\xff"'), "damaged"),
    ("list", lambda c: rebuilt(c, lambda header: [header]), "damaged: 'header'"),
    ("nested", lambda c: rebuilt(c, lambda header: {"a": [[]]}), "damaged: 'a'"),
    ("no shape", lambda c: rebuilt(c, lambda header: header["a"].pop("shape") and None), "`shape`"),
    ("negative", _set("a", data_offsets=[-4, 24]), "'a' does not start"),
    ("reversed", _set("b", data_offsets=[40, 24]), "does not start"),
    ("hole", _set("b", data_offsets=[28, 40]), "'b' does not start"),
    ("overlap", _set("b", data_offsets=[20, 36]), "'b' does not start"),
    ("huge", _set("b", data_offsets=[24, 2**70]), "damaged: 'b'"),
    ("behind", _set("b", data_offsets=[24, 2**62]), "'b' has"),
    ("shape", _set("b", shape=[5]), "not what its shape needs"),
    ("negative shape", _set("b", shape=[-2, -2]), "'b' does not start"),
    ("wraps", _set("b", shape=[2**31, 2**31, 4]), "not what its shape needs"),
    ("dtype", _set("b", dtype="F16"), "not what its shape needs"),
]


@pytest.mark.parametrize(
    ("damage", "message"), [c[1:] for c in TENSOR_CASES], ids=[c[0] for c in TENSOR_CASES]
)
def test_safetensors_damage_is_named(
    tmp_path: Path, tensors_bytes: bytes, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(tensors_bytes)
    assert set(read_table(path)) == {"a", "b"}
    path.write_bytes(damage(tensors_bytes))
    with bounded_memory(), pytest.raises(CheckpointError) as caught:
        read_table(path)
    assert str(path) in caught.value.message and message in caught.value.message


def test_safetensors_flipped_and_cut(tmp_path: Path) -> None:
    folder = write_hf(tiny_model(num_layers=1), tmp_path / "tiny")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    head_bytes = 8 + int.from_bytes(content[:8], "little")
    source = random.Random(SEED)
    with bounded_memory():
        for length in [
            *range(16),
            *source.sample(range(len(content)), NUM_ROUNDS // 4),
            head_bytes,
            len(content) - 1,
        ]:
            path.write_bytes(content[:length])
            assert open_and_read(folder) is not None
        for _ in range(NUM_ROUNDS):
            damaged = bytearray(content)
            damaged[source.randrange(head_bytes)] ^= 1 << source.randrange(8)
            path.write_bytes(damaged)
            open_and_read(folder)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_hf(tiny_model(), tmp_path / "tiny", shards=2)


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
INDEX = "model.safetensors.index.json"


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def _set_weight_map(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_missing_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=rf"{SECOND}: is missing, but {INDEX} lists it"):
        open_checkpoint(sharded)


def test_short_shard(sharded: Path) -> None:
    content = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"{SECOND}: damaged or cut short"):
        open_checkpoint(sharded)


def test_stale_tensor_in_another_shard_overwrites_nothing(sharded: Path) -> None:
    """The index is authoritative, in whatever order files are read."""
    model = tiny_model()
    weight_map = _weight_map(sharded)
    for stale_name, home in list(weight_map.items())[:2]:
        other = FIRST if home == SECOND else SECOND
        held = {name: _hf_weights()[name] for name, file in weight_map.items() if file == other}
        stale = np.full_like(_hf_weights()[stale_name], 7.0)
        write_safetensors(sharded / other, held | {stale_name: stale, "left.over": stale})
    checkpoint = open_checkpoint(sharded)
    for name, values in model.weights.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)


def _hf_weights() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    model = tiny_model()
    return {parameter.hf_name: model.weights[parameter.name] for parameter in parameters(model.config)}


def test_tensor_in_the_wrong_shard(sharded: Path) -> None:
    weight_map = _weight_map(sharded)
    name = next(name for name, file in weight_map.items() if file == FIRST)
    _set_weight_map(sharded, weight_map | {name: SECOND})
    with pytest.raises(CheckpointError, match=rf"{SECOND}: has no tensor '{name}', but {INDEX} says so"):
        open_checkpoint(sharded)


def test_tensor_that_the_index_lacks(sharded: Path) -> None:
    weight_map = _weight_map(sharded)
    del weight_map["model.norm.weight"]
    _set_weight_map(sharded, weight_map)
    with pytest.raises(CheckpointError, match=rf"{INDEX}: tensor 'model\.norm\.weight' is missing"):
        open_checkpoint(sharded)


def test_tensor_that_the_model_lacks(sharded: Path) -> None:
    tensors = _hf_weights() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    write_safetensors(sharded / FIRST, tensors)
    _set_weight_map(sharded, dict.fromkeys(tensors, FIRST))
    with pytest.raises(UnsupportedModel, match=r"q_proj\.bias' has no place in 'llama'"):
        open_checkpoint(sharded)


def test_constants_of_older_folders_are_left_alone(sharded: Path) -> None:
    tensors = _hf_weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    write_safetensors(sharded / FIRST, tensors)
    _set_weight_map(sharded, dict.fromkeys(tensors, FIRST))
    assert open_and_read(sharded) is None


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "", ".", "..", 7, None])
def test_index_stays_in_its_folder(sharded: Path, file: Any) -> None:
    _set_weight_map(sharded, _weight_map(sharded) | {"model.norm.weight": file})
    message = open_and_read(sharded)
    assert message is not None and INDEX in message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_damaged_json_is_named(sharded: Path, name: str, content: bytes) -> None:
    (sharded / name).write_bytes(content)
    message = open_and_read(sharded)
    assert message is not None and str(sharded / name) in message
