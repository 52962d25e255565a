"""Opening a model for serving: from its prepared entry where there is one, else from its files.

Both processes of a replica open the same model at the same time; the API process, which has a tokenizer at hand, keeps
what it worked out for the next start (`keep`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.text.tokens import TokenBytes

if TYPE_CHECKING:
    from tailrace.models.checkpoint import Checkpoint, TextAssets


@dataclass(frozen=True)
class Opened:
    """A checkpoint with what its ids spell. `cache` is the root of the model cache (None: the default). `fresh` holds
    the rebuilt tokenizer (JSON, configuration) where no prepared entry was found; the checkpoint has it too."""

    path: Path
    cache: Path | None
    checkpoint: Checkpoint
    table: TokenBytes
    fresh: tuple[bytes, dict[str, Any]] | None = None


def open_model(path: Path, cache: Path | None, *, tokenizer: bool) -> Opened:
    """Opens a model; without `tokenizer`, its tokenizer's bytes may be left out. Raises ModelError."""
    from tailrace.models.entry import TOKEN_BYTES, prepared_dir
    from tailrace.models.prepared import open_prepared
    from tailrace.terms import ModelError

    checkpoint = open_prepared(path, root=cache, tokenizer=tokenizer)
    if checkpoint is not None:
        try:
            return Opened(path, cache, checkpoint, TokenBytes.load(prepared_dir(path, cache) / TOKEN_BYTES))
        except (OSError, ModelError):
            pass  # damaged: worked out again below
    return _open_files(path, cache)


def _open_files(path: Path, cache: Path | None) -> Opened:
    import json
    from dataclasses import replace

    from tailrace.models.checkpoint import open_checkpoint
    from tailrace.terms import ModelError
    from tailrace.text.gguf import tokenizer_config_from_gguf, tokenizer_json_from_gguf

    checkpoint = open_checkpoint(path)
    assets = checkpoint.text
    data, config = assets.tokenizer_json, assets.tokenizer_config
    if data is None:
        if assets.gguf is None:
            raise ModelError(f"{path}: the model has no tokenizer: tokenizer.json is missing")
        data = tokenizer_json_from_gguf(assets.gguf)
        config = {**tokenizer_config_from_gguf(assets.gguf), **config}
        assets = replace(assets, tokenizer_json=data, tokenizer_config=config, gguf=None)
        checkpoint = replace(checkpoint, text=assets)
    return Opened(path, cache, checkpoint, TokenBytes.from_tokenizer(json.loads(data)), (data, config))


def open_text(path: Path, cache: Path | None) -> tuple[TextAssets, int, TokenBytes, Opened | None]:
    """What `text` needs of a model: assets, rows of its head, and table; and the whole model, to `keep`, where no
    prepared entry was found. Raises ModelError."""
    from tailrace.models import entry
    from tailrace.terms import ModelError

    found = entry.open_text(path, root=cache)
    if found is not None:
        try:
            table = TokenBytes.load(found.token_bytes)
            return found.assets, found.rows or len(table), table, None
        except (OSError, ModelError):
            pass  # damaged: worked out again below
    opened = _open_files(path, cache)
    rows = opened.checkpoint.config.get("vocab_size")  # the engine checks it
    return opened.checkpoint.text, rows if isinstance(rows, int) else len(opened.table), opened.table, opened


def keep(opened: Opened) -> None:
    """Makes the model's prepared entry, if it was opened from its files. A failure is a warning."""
    from tailrace.models.prepared import publish_checkpoint
    from tailrace.text.layout import laid_out

    if opened.fresh is None:
        return
    data, config = opened.fresh
    publish_checkpoint(
        opened.path,
        opened.checkpoint,
        tokenizer_json=laid_out(data),
        tokenizer_config=config,
        token_bytes=opened.table.to_bytes(),
        root=opened.cache,
    )
