# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Opens models that transformers saved. Only safetensors are read, and no code of the folder runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchditan.config.optional_libraries import import_optional
from torchditan.errors import ConfigError, first_line


def open_saved(
    folder: Path,
    kind: str = "AutoModel",
    *,
    refuse: Callable[[str], ConfigError],
    dtype: torch.dtype | None = None,
    config: Any = None,
    is_meta: bool = False,
) -> Any:
    """A model in eval mode on the CPU, with all weights except those of a pooler.

    Args:
        folder: on this disk.
        kind: class of transformers.
        refuse: what would be right -> the error of the option that names the folder.
        dtype: of the weights. None: as stored.
        config: of transformers, in place of config.json.
        is_meta: build an AutoModel on the meta device, from config.json alone.

    Raises:
        ConfigError: it does not open, or lacks weights.
    """
    transformers: Any = import_optional("transformers", extra="text")
    transformers.logging.disable_progress_bar()
    from safetensors import SafetensorError  # comes with transformers

    opener, given = getattr(transformers, kind), {"local_files_only": True, "trust_remote_code": False}
    try:
        if is_meta:
            with torch.device("meta"):
                return opener.from_config(transformers.AutoConfig.from_pretrained(folder, **given)).eval()
        options = {**given, "use_safetensors": True, "dtype": dtype, "config": config, "output_loading_info": True}
        model, info = opener.from_pretrained(folder, **options)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
        AttributeError,
        ImportError,
        SafetensorError,
    ) as error:
        raise refuse(f"cannot be opened: {first_line(error)}") from error
    if missing := sorted(name for name in info["missing_keys"] if "pooler" not in name):  # drawn at random
        raise refuse(f"lacks {len(missing)} weights of a {type(model).__name__}, {missing[0]} first")
    return model
