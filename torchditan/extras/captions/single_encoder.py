# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One text encoder of transformers: FLAN-T5, T5Gemma, CLIP's text model, Qwen3 and others.

Notable:
- the embeddings are the last hidden states, and the mask is the tokenizer's. Of a model with encoder and decoder only
  the encoder is opened;
- only safetensors are read, and no code of the folder runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchditan.config.optional_libraries import import_optional
from torchditan.config.options import Config
from torchditan.errors import first_line, option_error
from torchditan.extras.captions.encode import TextEncoder, folder_of, silence_libraries
from torchditan.extras.captions.tokens import Tokenizer, tokenizer_of_transformers
from torchditan.extras.saved_models import open_saved
from torchditan.extras.tensor_cache import hash_of, identity_of_files

FILES = [
    *("config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "spiece.model", "vocab*", "merges.txt"),
]
"""Files of a hub repository that are downloaded: configuration, weights, tokenizer; none of the folders in it."""
_MAX_LENGTH = 128
"""Default number of tokens, unless the encoder reads fewer."""


class SingleEncoder(TextEncoder):
    """The encoder in a folder that transformers saved, with its tokenizer.

    Args:
        folder: the saved encoder.
        max_length: tokens of a caption.
        dtype: of the encoder and of the stored embeddings.
        memory: folder in which checksums of large files are remembered.
    """

    is_for_own_models = True

    def __init__(self, folder: Path, *, max_length: int | None, dtype: torch.dtype, memory: Path) -> None:
        self.folder = folder
        self.max_length = max_length
        self.dtype = dtype
        length, files = max_length or f"at most {_MAX_LENGTH}", identity_of_files(folder, memory=memory)
        self.identity = hash_of("transformers", str(length), str(dtype), files)[:16]

    @classmethod
    def find(cls, config: Config, *, memory: Path) -> SingleEncoder:
        given = config.text_encoder
        if given.path is None:
            right = "must be given: a folder or hub name of an encoder that transformers opens, such as a FLAN-T5"
            raise option_error("text_encoder.path", None, right)
        import_optional("transformers", extra="text")
        folder = folder_of(given.path, patterns=FILES)
        if not folder.exists():
            right = "does not exist; must be a folder that transformers saved or a hub name: google/flan-t5-base"
            raise option_error("text_encoder.path", given.path, right)
        if not (folder / "config.json").is_file():
            right = "is neither a pipeline of diffusers (model_index.json) nor a model of transformers (config.json)"
            raise option_error("text_encoder.path", given.path, right)
        return cls(folder, max_length=given.max_length, dtype=getattr(torch, given.dtype), memory=memory)

    def open(self, device: torch.device) -> Callable[[list[str]], dict[str, torch.Tensor]]:
        tokenizer, model = self._open()
        length = self._length(tokenizer, model.config)
        tokenizer.padding_side = "right"
        if tokenizer.pad_token is None:  # decoders such as Qwen's early versions
            tokenizer.pad_token = tokenizer.eos_token
        model = model.to(device).eval().requires_grad_(False)

        def encode(captions: list[str]) -> dict[str, torch.Tensor]:
            read = tokenizer(captions, max_length=length, padding="max_length", truncation=True, return_tensors="pt")
            ids, mask = read["input_ids"].to(device), read["attention_mask"].to(device)
            mask[:, 0] = 1  # some tokenizers read nothing in the empty caption, and attention to nothing is NaN
            embeds = model(input_ids=ids, attention_mask=mask).last_hidden_state  # (n, L, D)
            return {"prompt_embeds": embeds, "prompt_attention_mask": mask.bool()}

        return encode

    def open_tokenizer(self) -> Tokenizer:
        tokenizer, settings = self._open_tokenizer()
        return tokenizer_of_transformers(tokenizer, max_length=self._length(tokenizer, settings))

    def _length(self, tokenizer: Any, settings: Any) -> int:
        """Tokens of a caption.

        Raises:
            ConfigError: `text_encoder.max_length` is larger than the encoder reads.
        """
        settings = getattr(settings, "encoder", settings)
        positions = getattr(settings, "max_position_embeddings", None)  # None: relative ones, as in T5
        most = min(tokenizer.model_max_length, positions or tokenizer.model_max_length)
        length: int = self.max_length or min(most, _MAX_LENGTH)
        if length > most:
            right = f"must be at most {most}, the tokens that this encoder reads"
            raise option_error("text_encoder.max_length", length, right)
        return length

    def _open_tokenizer(self) -> tuple[Any, Any]:
        """The tokenizer and the configuration of the model.

        Raises:
            ConfigError: transformers cannot open them.
        """
        transformers: Any = import_optional("transformers", extra="text")
        silence_libraries("transformers")
        with self._refusing():
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
            settings = transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True)
        return tokenizer, getattr(settings, "text_config", settings) if settings.model_type == "clip" else settings

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turns what transformers raises for a folder that it cannot open into one line."""
        try:
            yield
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, ImportError) as error:
            right = f"cannot be opened: {first_line(error)}"
            raise option_error("text_encoder.path", str(self.folder), right) from error

    def _open(self) -> tuple[Any, Any]:
        """The tokenizer and the model.

        Raises:
            ConfigError: transformers cannot open them, or the model reads no text.
        """
        transformers: Any = import_optional("transformers", extra="text")
        tokenizer, settings = self._open_tokenizer()
        with self._refusing():
            known = type(settings) in transformers.AutoModelForTextEncoding._model_mapping
            if known:
                settings.is_encoder_decoder = False  # T5Gemma asks for it, T5 does it itself
        model = open_saved(
            self.folder,
            "AutoModelForTextEncoding" if known else "AutoModel",
            refuse=partial(option_error, "text_encoder.path", str(self.folder)),
            dtype=self.dtype,
            config=settings,
        )
        if model.config.is_encoder_decoder and hasattr(model, "get_encoder"):
            model = model.get_encoder()
        return tokenizer, model
