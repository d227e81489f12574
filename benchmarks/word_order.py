#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Can text blocks learn the order of words? `python benchmarks/word_order.py`, about 10 minutes on one CPU thread.

Captions of `scenes` such as "two red circles above a blue square" pass the text blocks of `train_configs/scenes.toml`.
A query for each of the two colours then attends to the words and predicts a direction: up for red, down for blue. The
target is the unit vector of the direction plus noise, as places in pictures are noisy too. Without the order of words
the best prediction is 0, and the sign is right in half of the captions. Needs `pip install -e '.[text]'`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan.config.loader import load_config
from torchditan.datasets.scenes import COLOURS, Scene
from torchditan.finetune.captions.static_embeddings import StaticEmbeddings
from torchditan.models import build_model_spec
from torchditan.models.dit import CrossAttention
from torchditan.randomness import generator

DIRECTIONS = {"above": (0.0, -1.0), "below": (0.0, 1.0), "left of": (-1.0, 0.0), "right of": (1.0, 0.0)}
WAYS = {
    "rotary positions": [],
    "sin-cos table": ["--model.text_rope=false"],
    "no positions": ["--model.text_positions=false"],
}
BATCH_SIZE, NUM_TESTED = 128, 2000


class Reader(nn.Module):
    """Directions (B, 2, 2) of two colours (B, 2) int64, from the embeddings of captions."""

    def __init__(self, flags: list[str]) -> None:
        super().__init__()
        config = load_config(["--job.config_file=scenes", "--model.text_blocks=2", *flags])
        self.dit = build_model_spec(config.model, sample_shape=(3, 32, 32), num_classes=0).build()
        self.attention = CrossAttention(self.dit.config)
        width = self.dit.config.width
        self.queries = nn.Parameter(torch.randn(len(COLOURS), width))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 2))

    def forward(self, cond: dict[str, torch.Tensor], colours: torch.Tensor) -> torch.Tensor:
        text, mask = self.dit.read_text(cond)
        queries = self.queries[colours]
        return self.head(queries + self.attention(queries, text, mask))


def draw_captions(count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Embeddings of captions, the two colours (n, 2) of each, and their directions (n, 2, 2)."""
    config = load_config(["--job.config_file=scenes"])
    encode = StaticEmbeddings.find(config, memory=Path()).open(torch.device("cpu"))
    scenes: list[Scene] = []
    number = 0
    while len(scenes) < count:
        scene = Scene.draw(generator(0, "word order", number))
        number += 1
        if len({group.colour for group in scene.groups}) == 2:
            scenes.append(scene)
    colours = torch.tensor([[list(COLOURS).index(group.colour) for group in scene.groups] for scene in scenes])
    first = torch.tensor([DIRECTIONS[str(scene.relation)] for scene in scenes])
    return encode([scene.caption for scene in scenes]), colours, torch.stack([first, -first], dim=1)


def share_right(reader: Reader, cond: dict[str, torch.Tensor], colours: torch.Tensor, right: torch.Tensor) -> float:
    with torch.no_grad():
        return float(((reader(cond, colours) * right).sum(-1) > 0).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--noise", type=float, default=2.0, help="standard deviation of the targets' noise")
    parser.add_argument("--captions", type=int, default=50_000)
    args = parser.parse_args()
    cond, colours, right = draw_captions(args.captions + NUM_TESTED)
    tested = {name: tensor[-NUM_TESTED:] for name, tensor in cond.items()}, colours[-NUM_TESTED:], right[-NUM_TESTED:]
    for name, flags in WAYS.items():
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            reader = Reader(flags)
            used = [p for module in (reader.dit.text_embedder, reader.dit.text_blocks) for p in module.parameters()]
            used += [*reader.attention.parameters(), reader.queries, *reader.head.parameters()]
            matrices = [p for p in used if p.dim() == 2 and p is not reader.queries]
            others = [p for p in used if all(p is not matrix for matrix in matrices)]
            optimizers = [
                torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0),
            ]
            shares = []
            for step in range(1, args.steps + 1):
                drawn = torch.randint(args.captions, (BATCH_SIZE,))
                target = right[drawn] + args.noise * torch.randn(BATCH_SIZE, 2, 2)
                prediction = reader({key: tensor[drawn] for key, tensor in cond.items()}, colours[drawn])
                reader.zero_grad()
                F.mse_loss(prediction, target).backward()
                for optimizer in optimizers:
                    optimizer.step()
                if step % max(1, args.steps // 8) == 0:
                    shares.append(share_right(reader, *tested))
            print(f"{name}, seed {seed}: right signs {' '.join(f'{share:.2f}' for share in shares)}", flush=True)


if __name__ == "__main__":
    main()
