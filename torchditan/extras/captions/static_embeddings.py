# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Static embeddings of tokens, from the package wordllama: a text encoder of 16 MB that needs no download.

Notable:
- the package holds a table of 32,000 tokens x 256 numbers (MIT licence) and the tokenizer of Llama 2. Only these two
  files are read; the package is not imported;
- each token has the same embedding wherever it stands: "a cat on a mat" and "a mat on a cat" have the same rows in
  another order.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from torchditan.config.optional_libraries import how_to_install, import_optional
from torchditan.config.options import Config
from torchditan.errors import option_error
from torchditan.extras.captions.encode import TextEncoder
from torchditan.extras.captions.tokens import TokenCount, Tokenizer
from torchditan.extras.tensor_cache import hash_of
from torchditan.run.atomic_files import sha256_of

_WEIGHTS = "weights/l2_supercat_256.safetensors"
_TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"
_MAX_LENGTH = 64


class StaticEmbeddings(TextEncoder):
    """Looks up the tokens of a caption in a table.

    Args:
        folder: of the package wordllama.
        max_length: tokens of a caption, the first of which marks its beginning.
        dtype: of the embeddings.
    """

    text_blocks = 2
    is_lookup = True
    is_for_own_models = True

    def __init__(self, folder: Path, *, max_length: int, dtype: torch.dtype) -> None:
        self.folder = folder
        self.max_length = max_length
        self.dtype = dtype
        contents = [sha256_of(folder / file) for file in (_WEIGHTS, _TOKENIZER)]
        self.identity = hash_of("wordllama", str(max_length), str(dtype), *contents)[:16]

    @classmethod
    def find(cls, config: Config, *, memory: Path) -> StaticEmbeddings:
        given = config.text_encoder
        if given.path is not None:
            raise option_error("text_encoder.path", given.path, "wordllama is a package; leave it out")
        found = importlib.util.find_spec("wordllama")
        places = [] if found is None else list(found.submodule_search_locations or [])
        if not places or not all(Path(places[0], file).is_file() for file in (_WEIGHTS, _TOKENIZER)):
            right = f"needs wordllama 0.4: {how_to_install('text')}; or give another encoder as text_encoder.path"
            raise option_error("text_encoder.name", "wordllama", right)
        import_optional("tokenizers", extra="text")
        return cls(Path(places[0]), max_length=given.max_length or _MAX_LENGTH, dtype=getattr(torch, given.dtype))

    def open_tokenizer(self) -> Tokenizer:
        tokenizer = self._tokenizer()
        space, first_byte = tokenizer.token_to_id("▁"), tokenizer.token_to_id("<0x00>")

        def count(captions: list[str]) -> list[TokenCount]:
            counts = []
            for encoded in tokenizer.encode_batch(captions):
                ids = encoded.ids[1:]  # the first token marks the beginning
                num_bytes = sum(first_byte <= token < first_byte + 256 for token in ids)
                counts.append(TokenCount(len(encoded.ids), len(ids) - num_bytes - ids.count(space), num_bytes))
            return counts

        return Tokenizer(self.max_length, count)

    def _tokenizer(self) -> Any:
        tokenizers: Any = import_optional("tokenizers", extra="text")
        return tokenizers.Tokenizer.from_file(str(self.folder / _TOKENIZER))

    def open(self, device: torch.device) -> Callable[[list[str]], dict[str, torch.Tensor]]:
        tokenizer = self._tokenizer()
        tokenizer.enable_truncation(self.max_length)
        tokenizer.enable_padding(length=self.max_length)
        (table,) = load_file(self.folder / _WEIGHTS).values()  # (tokens, 256) float16
        table = table.to(device, self.dtype)

        def encode(captions: list[str]) -> dict[str, torch.Tensor]:
            # Not `encode_batch`: it starts threads, and a process with them must not fork loader workers.
            encoded = [tokenizer.encode(caption) for caption in captions]
            ids = torch.tensor([one.ids for one in encoded], device=device)  # (n, L)
            mask = torch.tensor([one.attention_mask for one in encoded], device=device).bool()
            return {"prompt_embeds": table[ids] * mask[..., None], "prompt_attention_mask": mask}

        return encode
