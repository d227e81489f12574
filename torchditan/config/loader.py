# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""From a TOML file and command-line flags to a validated `Config`, and back to plain values.

Notable:
- options, help texts and defaults come from the dataclasses of options.py and are declared only there (schema.py);
- a configuration name refers to a file in train_configs/, from any working directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torchditan.config.legacy_keys import LEGACY_KEYS, RENAMED_KEYS, adopt_file, adopt_keys, adopt_legacy
from torchditan.config.options import FLAVOR_NAMES, Config, Diffusion, flatten
from torchditan.config.prompts import read_prompts
from torchditan.config.rules import validate, validate_parts, validate_values
from torchditan.config.schema import Option, convert_all, options, unknown_option
from torchditan.config.trajectory import flatten_tree, refuse_untrusted_plug_ins
from torchditan.errors import ConfigError, did_you_mean, first_line, option_error
from torchditan.registry import FAMILIES, OBJECTIVES, parse_value, resolve

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRAIN_CONFIGS = (Path(__file__).parents[1] / "train_configs").resolve()
"""In a checkout a link to the folder train_configs/."""

_PROMPTS = "sampling.prompts"
_WIDEST_CHOICES = 80
"""Characters of the choices of an option that stand next to its flag in `--help`; longer ones follow its text."""

USAGE = "torchditan train NAME [--section.key value ...]"

DESCRIPTION = """\
Train a diffusion transformer. Options come from a TOML file; flags override it.

examples:
  torchditan train quickstart
  torchditan train quickstart --training.steps 200 --training.compile --optimizer.lr=3e-4
  torchrun --nproc_per_node=8 -m torchditan train imagenet_pixels --dataset.root_dir /data/imagenet
  python train.py --job.config_file quickstart.toml          # the same, from a checkout

A configuration is a path, or a name in train_configs/. The key `steps` under `[training]` in the TOML file is
the flag `--training.steps value` or `--training.steps=value`. A boolean flag needs no value, or takes true or
false. Write lists as `32 48`, `32,48` or `[32, 48]`. The value `none` leaves an option open:
the trainer chooses it.
"""


def load_config(argv: list[str]) -> Config:
    """Parse `argv` (without the program's name) into a validated configuration: `parse_config`, then `validate_parts`.

    Raises:
        ConfigError: a file, an option or a value is not valid.
    """
    config = parse_config(argv)
    validate_parts(config)
    return config


def parse_config(argv: list[str]) -> Config:
    """Parse `argv` (without the program's name), checked by all rules that do not import torch (`validate_values`).

    On rank 0, prints one line to stderr for each key or name of the course project that is read differently here.
    `--help` prints and exits.

    Raises:
        ConfigError: a file, an option or a value is not valid.
    """
    flags = split_flavor(adopt_keys(_parse_flags(argv)))
    path: Path | str | None = None
    values: dict[str, Any] = {}
    notes: list[str] = []
    if ":" in (given_file := str(flags.get("job.config_file"))) and not Path(given_file).expanduser().exists():
        path = flags.pop("job.config_file")
        values = _call_configuration(given_file)
    elif flags.get("job.config_file") is not None:
        path = find_config(flags.pop("job.config_file"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        values, notes = adopt_file(split_flavor(read_toml(path)), flags=flags, world_size=world_size)
    values, ignored, read_otherwise = adopt_legacy({**values, **flags})
    if values.get("checkpoint.enable_checkpoint") is False:  # given, not left open
        values.setdefault("checkpoint.save_final", False)
    config = with_defaults({**values, "job.config_file": None if path is None else str(path)})
    validate_values(config)
    if os.environ.get("RANK", "0") == "0":
        if ignored:
            print(f"warning: ignored, no effect here: {', '.join(ignored)}", file=sys.stderr)
        for note in (*notes, *read_otherwise):
            print(f"note: {note}", file=sys.stderr)
    return config


def _with_prompts(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with the prompts in a file in place of its name."""
    return {name: read_prompts(name, value) if name == _PROMPTS else value for name, value in values.items()}


def _call_configuration(text: str) -> dict[str, Any]:
    """The options that the `Config` of `module:function` sets to other values than the defaults."""
    try:
        config = pkgutil.resolve_name(text)()
    except Exception as error:  # whatever a module of the user's raises
        line = f"{type(error).__name__}: {first_line(error)}"
        right = f"cannot be called ({line}); must be module:function on the Python path, or a TOML file"
        raise option_error("job.config_file", text, right) from None
    if not isinstance(config, Config):
        raise option_error("job.config_file", text, f"returns a {type(config).__name__}; must return a Config")
    defaults = flatten(Config())
    return {name: value for name, value in flatten(config).items() if value != defaults[name]}


def split_flavor(values: dict[str, Any]) -> dict[str, Any]:
    """Read `model.flavor` DiT-Ti/2, the name in logs, as DiT-Ti with patch size 2, in one source of options."""
    flavor, _, text = str(values.get("model.flavor")).partition("/")
    if flavor not in FLAVOR_NAMES or not text.isdecimal():
        return values
    patch_size = int(text)
    if (given := values.get("model.patch_size", patch_size)) != patch_size:
        raise option_error("model.flavor", f"{flavor}/{text}", f"model.patch_size is {given}; leave one of them out")
    return {**values, "model.flavor": flavor, "model.patch_size": patch_size}


def build_config(values: Mapping[str, Any]) -> Config:
    """Build a Config from `{"training.steps": 10, ...}` and the defaults. Each value is checked against its type."""
    return Config().replace(convert_all(values))


def with_defaults(values: Mapping[str, Any]) -> Config:
    """`build_config`, with the defaults that depend on the objective and on other options."""
    typed = _with_prompts(convert_all(values))
    values = {**flatten(Config()), **_defaults_of_objective(typed), **typed}
    return Config().replace({**values, **_defaults_from_others(values)})


def _defaults_of_objective(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Options with another default for the objective, if it is set. Imports the objective.

    Published models define their own [model], so that the objective's defaults do not apply there.
    """
    text = typed.get("diffusion.objective", Diffusion.objective)
    if text == Diffusion.objective:
        return {}
    objective, _ = resolve(OBJECTIVES, "diffusion.objective", text)
    is_published = typed.get("model.name") in FAMILIES
    defaults = {
        name: value for name, value in objective.defaults.items() if not (is_published and name.startswith("model."))
    }
    return convert_all(defaults)


def _defaults_from_others(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options with a default that depends on other options: the second side of a square image, the name of the run."""
    found: dict[str, Any] = {}
    size = values["dataset.image_size"]
    if size is not None and len(size) == 1:
        found["dataset.image_size"] = [size[0], size[0]]
    if values["metrics.experiment_name"] is None:
        unnamed = f"{values['dataset.dataset_name']}-{values['model.flavor']}".lower()
        config_file = values["job.config_file"]
        found["metrics.experiment_name"] = Path(config_file).stem.rpartition(":")[2] if config_file else unnamed
    return found


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as nested dictionaries of plain values, as stored in config.json."""
    return dataclasses.asdict(config)


def to_toml(config: Config) -> str:
    """The configuration as TOML that `--job.config_file` can read. Options left open are omitted."""
    lines = []
    for section, keys in to_dict(config).items():
        lines += ["", f"[{section}]"]
        # JSON and TOML write numbers, texts, booleans and lists of them in the same way.
        lines += [
            f"{key} = {json.dumps(value, ensure_ascii=False)}"
            for key, value in keys.items()
            if value is not None and f"{section}.{key}" not in ("job.config_file", "job.print_config")
        ]
    return "\n".join(lines[1:])


def as_flags(values: Mapping[str, Any]) -> Iterator[str]:
    """Options as flags: `--training.compile=true`."""
    for option, value in values.items():
        if isinstance(value, list) and all(isinstance(element, str) for element in value):
            text = json.dumps(value, ensure_ascii=False)  # strings may contain commas
        elif isinstance(value, list):
            text = ",".join(map(str, value))
        else:
            text = str(value).lower() if isinstance(value, bool) or value is None else str(value)
        yield f"--{option}={text}"


def find_config(name: str) -> Path:
    """The file of `job.config_file`: a path, or a name in train_configs/ with or without `.toml`."""
    given = Path(name).expanduser()
    for path in (given, TRAIN_CONFIGS / name, TRAIN_CONFIGS / f"{name}.toml"):
        if name and path.is_file():
            return path.resolve()
    if name and given.is_dir():
        raise option_error("job.config_file", name, "is a folder; must be a TOML file, or a name in train_configs/")
    names = _configurations()
    hint = did_you_mean(given.stem, names)
    raise option_error("job.config_file", name, f"no such file; train_configs/ has {', '.join(names)}{hint}")


def _configurations() -> list[str]:
    paths = [path for path in TRAIN_CONFIGS.rglob("*.toml") if path.parent.name != "ablations"]  # grids are not jobs
    return sorted(path.relative_to(TRAIN_CONFIGS).with_suffix("").as_posix() for path in paths)


def describe_configurations() -> str:
    """The names in train_configs/: the beginning of the first sentence of each file, and its hardware and time."""
    names = _configurations()
    width = max(map(len, names), default=0)
    lines = [f"usage: {USAGE}", "", "configurations in train_configs/, with the hardware and time each is made for:"]
    for name in names:
        head = (TRAIN_CONFIGS / f"{name}.toml").read_text(encoding="utf-8")
        hardware = re.findall(r"^# Hardware: (.*)$", head, flags=re.MULTILINE)
        text = head.replace("\n# ", " ").removeprefix("# ")
        sentence = re.split(r"[.:](?: |$)", re.sub(r" \([^)]*\)", "", text.partition("\n")[0]))[0]
        lines += [f"  {name:<{width}}  {sentence}", *(f"  {'':<{width}}  [{text}]" for text in hardware)]
    return "\n".join([*lines, "", "`torchditan train --help` lists every option."])


def read_toml(path: Path) -> dict[str, Any]:
    """Read `{"training.steps": 10, ...}` from a TOML file, without checking options or values."""
    values: dict[str, Any] = {}
    for section, keys in read_tables(path, option="job.config_file").items():
        is_section = isinstance(keys, dict)
        values |= {f"{section}.{key}": value for key, value in keys.items()} if is_section else {section: keys}
    return values


def read_tables(path: Path, *, option: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        option: that names the file, for messages.

    Raises:
        ConfigError: it cannot be read, or does not parse.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise option_error(option, str(path), f"cannot be read: {reason}") from None
    except (ValueError, RecursionError) as error:  # also of thousands of digits or brackets
        raise ConfigError(f"{path}: {first_line(error)}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # `Option.convert` checks values; argparse only reports a missing value.
        name = re.sub(r"^argument --([^:]*):.*", r"\1", message)
        expected = f"{options()[name].expected}; write --{name}=VALUE" if name in options() else message
        raise ConfigError(f"{name} has no value: {expected}")


def _parser() -> _Parser:
    parser = _Parser(
        usage=USAGE,
        description=DESCRIPTION,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=36, width=110),
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    groups = {
        name: parser.add_argument_group(f"[{name}]", inspect.getdoc(section))
        for name, section in vars(Config()).items()
    }
    for option in options().values():
        groups[option.name.split(".")[0]].add_argument(
            f"--{option.name}",
            dest=option.name,
            metavar=_metavar(option),
            help=_help(option),
            **_arity(option),
        )
    for name in (*LEGACY_KEYS, *RENAMED_KEYS):
        parser.add_argument(f"--{name}", dest=name, nargs="*", help=argparse.SUPPRESS)
    return parser


def _arity(option: Option) -> dict[str, Any]:
    if option.is_list:
        return {"nargs": "+"}
    return {"nargs": "?", "const": "true"} if option.kind is bool else {}


def _choices(option: Option) -> str:
    of_yours = ["module:name"] if option.takes_plug_ins else []
    return "|".join([*(["INT"] if option.kind is int and option.choices else []), *option.choices, *of_yours])


def _metavar(option: Option) -> str | tuple[str, str]:
    if names := _choices(option):
        names = names if len(names) <= _WIDEST_CHOICES else "NAME"
        return (names, "more") if option.is_list else names  # argparse shows "a|b [more ...]"
    return {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}[option.kind]


def _help(option: Option) -> str:
    names = _choices(option) if len(_choices(option)) > _WIDEST_CHOICES else ""
    default = f"default: {option.shown_default}" if option.shown_default else ""
    notes = [names.replace("|", ", "), option.limits, default]
    text = "; ".join(filter(None, notes))
    return (f"{option.help} ({text})" if text else option.help).replace("%", "%%")


def _parse_flags(argv: list[str]) -> dict[str, Any]:
    """Parse flags to `{"training.steps": 10, ...}`. Text that is not a value of its option stays text."""
    namespace, unknown = _parser().parse_known_args(argv)
    if unknown:
        raise _unknown_flag(unknown[0])
    values = {}
    for name, text in vars(namespace).items():
        option = options().get(RENAMED_KEYS.get(name, name))
        values[name] = _from_text(option, text) if option else parse_value(" ".join(text) or "true")
    return values


def _unknown_flag(flag: str) -> ConfigError:
    if flag.startswith("--"):
        return unknown_option(flag[2:].split("=")[0])
    hint = f"; did you mean --job.config_file {flag}?" if flag.endswith(".toml") else ""
    return ConfigError(f"{flag} is not part of an option; write options as --section.key value{hint}")


def _from_text(option: Option, text: str | list[str]) -> Any:
    if not option.is_list:
        return option.parse(text if isinstance(text, str) else " ".join(text or ["true"]))  # --cache_only
    if option.kind is str:
        return _texts([text] if isinstance(text, str) else text)
    words = re.split(r"[,\s]+", " ".join(text).strip("[] "))
    if option.optional and [word.lower() for word in words] == ["none"]:
        return None
    return [option.parse(word) for word in words if word]


def _texts(words: list[str]) -> list[str]:
    """Texts, which may contain commas and spaces: one per word, or one word that is a JSON list."""
    if len(words) == 1 and words[0].startswith("["):
        try:
            found = json.loads(words[0])
        except ValueError:
            return words
        if isinstance(found, list):
            return found
    return words


def from_dict(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """The inverse of `to_dict`, for a run's config.json.

    Raises:
        ConfigError: a value is not valid, or names code that the user did not put on the Python path.
    """
    refuse_untrusted_plug_ins(flatten_tree(values))
    return build_config(flatten_tree(values))


def override(config: Config, flags: Sequence[str] | Mapping[str, Any], *, sections: Sequence[str]) -> Config:
    """Replace options of these sections, or of these names, by flags or by values. Raises ConfigError for others."""
    values = flags if isinstance(flags, Mapping) else _with_prompts(convert_all(_parse_flags(list(flags))))
    changed = config.replace(convert_all(values))
    for name in values:
        if name not in sections and name.split(".")[0] not in sections:
            allowed = ", ".join(sections) or "arguments of the command"
            raise ConfigError(f"{name} cannot be changed here, only {allowed}")
    validate(changed)
    return changed
