# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Write a trained model to a folder that others can open, with its card, and upload it to the Hugging Face hub
(docs/checkpoints.md). A folder of encoded latents is shared in the same way.

torchditan share outputs/quickstart digits
torchditan share outputs/quickstart digits --license cc-by-4.0 --data_license "UCI, CC BY 4.0" --push me/digits
torchditan share latents/cifar10 cifar10_latents --push me/cifar10_latents
torchditan generate digits
torchditan generate hub:me/digits
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments of this command. Imports no torch."""
    from torchditan.config.command_line import ScriptParser, add_weights_choice
    from torchditan.errors import option_error
    from torchditan.extras.weights.shared import check_address
    from torchditan.run.hub import check_upload

    parser = ScriptParser(__doc__, options=())
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN",
        help="run, checkpoint, file of `export`, shared model, or folder of latents",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to create")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload the folder to the Hugging Face hub")
    parser.add_argument(
        "--private",
        action="store_true",
        help="create a private repository (default: as your account is set)",
    )
    add_weights_choice(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights (default: float32)")
    parser.add_argument("--license", metavar="ID", help="licence of the weights, as the hub names it: cc-by-4.0, mit")
    parser.add_argument("--data_license", metavar="TEXT", help="licence or origin of the data")
    parser.add_argument("--note", metavar="TEXT", help="a sentence for the card")
    parser.add_argument("--without_samples", action="store_true", help="draw no samples.png")
    parser.add_argument("--overwrite", action="store_true", help="replace a folder that this command wrote")
    arguments, _ = parser.parse(argv)
    check_address(arguments.source)
    if arguments.push is not None:
        check_upload(arguments.push)
    elif arguments.private:
        raise option_error("--private", True, "is for an upload; give --push OWNER/NAME too")
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])

    from torchditan.checkpoint.safetensors_files import DTYPES
    from torchditan.datasets.latents import splits_of
    from torchditan.distributed.cpu_threads import configure_cpu
    from torchditan.errors import option_error
    from torchditan.extras.sharing.model_card import Statements
    from torchditan.extras.sharing.share import share
    from torchditan.run.hub import PREFIX, upload_folder
    from torchditan.run.progress import report_progress

    source, folder = arguments.source, arguments.folder
    is_latents = bool(splits_of(source))
    for name in ("step", "weights", "dtype", "without_samples"):
        if is_latents and getattr(arguments, name):
            raise option_error(f"--{name}", getattr(arguments, name), "has no effect on latents; leave it out")
    start = time.perf_counter()
    configure_cpu()
    with report_progress(f"sharing {source}"):
        what, notes = share(
            source,
            folder,
            step=arguments.step,
            kind=arguments.weights,
            dtype=DTYPES[arguments.dtype or "float32"],
            statements=Statements(arguments.license, arguments.data_license, arguments.note, arguments.push),
            with_samples=not arguments.without_samples,
            overwrite=arguments.overwrite,
        )
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {what}, {size / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s")
    unstated = [name for name in ("license", "data_license") if getattr(arguments, name) is None]
    for note in [*notes, *(f"the card says that --{name} is not stated" for name in unstated)]:
        print(f"- {note}")
    place: str | Path = folder
    if arguments.push is not None:
        with report_progress(f"uploading {folder} to {arguments.push}"):
            address = upload_folder(
                folder,
                arguments.push,
                kind="dataset" if is_latents else "model",
                message=f"torchditan share: {what}",
                is_private=arguments.private or None,
            )
        print(f"uploaded: {address}")
        place = f"{PREFIX}{arguments.push}"
    if is_latents:
        print(f"train: torchditan train CONFIG --dataset.dataset_name latents --dataset.root_dir {place}")
    else:
        print(f"generate: torchditan generate {place}")
