# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Random changes of a file, as an attacker or a bad disk would make them: of its bytes, and of its structure.

Every change is a function of a `random.Random`. Structured files (JSON, TOML, safetensors, zip, tar) are taken apart,
changed and put together again, so that the change is not lost to a checksum or a parser.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RAN = "ran"
"""Folder that a payload makes in the working folder."""
OUTSIDE = "outside"
"""Folder next to the working folder. Opening a file must not read or change what is in it."""
MARKUP = f"</script></title><img src=x onerror={RAN}()>"
_DIGITS, _DEEP = "@@DIGITS@@", "@@DEEP@@"


class Payload:
    """An object whose pickle makes the folder `ran` when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, (RAN,)


def _torch_file(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


PICKLE = pickle.dumps(Payload(), protocol=2)
TORCH_PICKLE = _torch_file({"weight": Payload()})

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 255, 65536, 1 << 24, 1 << 28, 1 << 30, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 63) - 1),
    *(1 << 63, 1 << 64, -(1 << 63), 10**25, 10**400, 0.5, -0.0, 1e-320, 1e39, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), _DIGITS),
)
TEXTS = (
    "",
    " ",
    ".",
    "..",
    "/",
    "~",
    "\0",
    "a\0b",
    "a\nb",
    "a\r\nb",
    "# a\n---\n",
    f"../{OUTSIDE}/private.png",
    f"../{OUTSIDE}",
    f"{{absolute}}/{OUTSIDE}/private.png",
    f"file://{{absolute}}/{OUTSIDE}/private.png",
    f"../../{OUTSIDE}/new",
    MARKUP,
    f'"><img src=x onerror={RAN}()>',
    f"javascript:{RAN}()",
    f"[a](javascript:{RAN}())",
    "{{7*7}}{% raw %}",
    "%s%n{0.__class__}",
    "$(mkdir ran)`mkdir ran`",
    "\x1b[2J\x1b]0;title\x07red",
    "\x9b31m",
    "\x08\x08\x7f",
    "\u202ecod.exe",
    "\ud800",
    "\U0001f600\u0301",
    "$\\frac{a$_^",
    "hostile:Thing",
    "os:system",
    "builtins:eval",
    "hub:owner/name",
    "nan",
    "null",
    "-1",
    "1e999",
    "--help",
    "@/etc/passwd",
    "a" * 300,
    "a" * 100_000,
    "\u754c" * 20_000,
)


def value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value that a reader may not expect."""
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(TEXTS)
    if kind == 6:
        return rng.choice([None, True, False, [], {}, [[]], [None], {"": None}, _DEEP])
    if kind == 7 and depth < 3:
        return [value(rng, depth + 1) for _ in range(rng.choice([1, 2, 3, 50]))]
    if kind == 8 and depth < 3:
        return {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.choice([1, 2, 5]))}
    nested: Any = 1
    for _ in range(rng.choice([5, 60, 400])):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def change_file(path: Path, rng: random.Random) -> str:
    """Change one file. Returns what was done, in a few words."""
    if rng.random() < 0.06:
        return _replace(path, rng)
    change = _BY_SUFFIX.get(path.suffix)
    if change is not None and rng.random() < 0.8:
        with contextlib.suppress(Exception):  # an earlier change has left no file of this format
            return change(path, rng)
    return _change_bytes(path, rng)


# Bytes


def _change_bytes(path: Path, rng: random.Random) -> str:
    if not path.is_file():
        return "nothing"
    data, what = change_bytes(path.read_bytes(), rng)
    path.write_bytes(data)
    return what


def change_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    changed = bytearray(data)
    size = len(changed)
    kind = rng.randrange(9)
    # Headers are at the start, and directories of archives at the end.
    place = min(
        size,
        rng.choice([rng.randrange(size + 1), rng.randrange(min(size, 256) + 1), max(0, size - rng.randrange(256))]),
    )
    length = rng.choice([1, 2, 4, 8, 64, 512, max(1, size // 4)])
    if kind == 0 and size:
        for _ in range(rng.choice([1, 1, 2, 8, 64])):
            changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
        return bytes(changed), "flipped bits"
    if kind == 1:
        return bytes(changed[:place]), f"truncated at {place}"
    if kind == 2:
        changed[place:place] = changed[place : place + length]
        return bytes(changed), f"duplicated {length} bytes at {place}"
    if kind == 3:
        del changed[place : place + length]
        return bytes(changed), f"deleted {length} bytes at {place}"
    if kind == 4:
        width = rng.choice([1, 2, 4, 8])
        number = rng.choice(
            [0, 1, (1 << 8 * width) - 1, (1 << (8 * width - 1)) - 1, 1 << (8 * width - 2), 1 << min(29, 8 * width - 1)]
        )
        changed[place : place + width] = number.to_bytes(width, rng.choice(["little", "big"]))
        return bytes(changed), f"wrote {number} at {place}"
    if kind == 5:
        changed[place : place + length] = bytes([rng.choice([0, 255, 32, 128])]) * length
        return bytes(changed), f"filled {length} bytes at {place}"
    if kind == 6:
        changed[place : place + length] = rng.randbytes(length)
        return bytes(changed), f"random {length} bytes at {place}"
    if kind == 7:
        text = rng.choice(TEXTS).encode("utf-8", "surrogatepass")[:300]
        changed[place:place] = text
        return bytes(changed), f"inserted {text[:20]!r} at {place}"
    return bytes(changed) + rng.randbytes(rng.choice([1, 512, 4096])), "appended bytes"


def _replace(path: Path, rng: random.Random) -> str:
    """Put something else in the place of the file."""
    data = path.read_bytes() if path.is_file() else b""
    if path.is_dir() and not path.is_symlink():
        return "nothing"
    path.unlink(missing_ok=True)
    kind = rng.randrange(9)
    if kind == 0:
        path.mkdir()
        return "a folder"
    if kind == 1:
        path.symlink_to(path.absolute().anchor)
        return "a link to /"
    if kind == 2:
        outside = next(parent.parent / OUTSIDE for parent in path.absolute().parents if parent.name == "here")
        path.symlink_to(outside / rng.choice(["private.png", "missing", "private.txt"]))
        return "a link outside"
    if kind == 3:
        path.symlink_to(path.name)
        return "a link to itself"
    if kind == 4:
        path.write_bytes(rng.choice([PICKLE, TORCH_PICKLE]))
        return "a pickle"
    if kind == 5:
        path.write_bytes(b"")
        return "an empty file"
    if kind == 6:
        path.write_bytes(
            rng.choice([b"\0" * 100_000, b"\n" * 100_000, b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe" * 99])
        )
        return "a monotonous file"
    if kind == 7:
        path.write_bytes(data * 3)
        return "the file three times"
    return "no file"


# JSON


def _change_json(path: Path, rng: random.Random) -> str:
    tree = json.loads(path.read_bytes())
    tree, what = change_tree(tree, rng)
    path.write_bytes(json_bytes(tree, rng, path))
    return what


def _change_jsonl(path: Path, rng: random.Random) -> str:
    lines = path.read_bytes().split(b"\n")
    number = rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind == 0:
        lines.insert(number, lines[rng.randrange(len(lines))])
        return _written(path, b"\n".join(lines), "repeated a line")
    if kind == 1:
        lines[number] = json_bytes(value(rng), rng, path)
        return _written(path, b"\n".join(lines), "another line")
    tree, what = change_tree(json.loads(lines[number] or b"{}"), rng)
    lines[number] = json_bytes(tree, rng, path).replace(b"\n", b" ")
    return _written(path, b"\n".join(lines), f"line {number}: {what}")


def change_tree(tree: Any, rng: random.Random) -> tuple[Any, str]:
    """Change one place of a JSON tree."""
    places: list[tuple[Any, Any]] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        keys: Any = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            places.append((node, key))
            stack.append(node[key])
    if not places or rng.random() < 0.02:
        return value(rng), "another root"
    # Half of the time any place, otherwise one near the root: a long list would take most changes.
    shallow = [place for place in places if place[0] is tree] if rng.random() < 0.3 else places
    node, key = rng.choice(shallow)
    kind = rng.randrange(8)
    if kind == 0:
        del node[key]
        return tree, f"deleted {key!r:.60}"
    if kind == 1 and isinstance(node, dict):
        new = rng.choice([*TEXTS, "__class__", "a", str(rng.choice(list(node)))])
        node[new] = node.pop(key) if rng.random() < 0.5 else value(rng)
        return tree, f"new key {new!r:.60}"
    if kind == 2:
        other, place = rng.choice(places)
        node[key] = json.loads(json.dumps(other[place])) if place in range_of(other) else value(rng)
        return tree, f"copied {place!r:.60} to {key!r:.60}"
    if kind == 3 and isinstance(node, list):
        node *= rng.choice([0, 2, 100])
        return tree, "repeated a list"
    if kind == 4 and isinstance(node[key], int | float) and not isinstance(node[key], bool):
        node[key] = rng.choice(
            [-node[key], node[key] + 1, node[key] - 1, node[key] * 1000, float(node[key]), str(node[key])]
        )
        return tree, f"{key!r:.60} is another number"
    if kind == 5 and isinstance(node[key], str):
        node[key] += rng.choice(TEXTS)
        return tree, f"{key!r:.60} with {node[key][-20:]!r}"
    node[key] = value(rng)
    return tree, f"{key!r:.60} is {str(node[key])[:60]!r}"


def range_of(node: Any) -> Any:
    return node if isinstance(node, dict) else range(len(node))


def json_bytes(tree: Any, rng: random.Random, path: Path) -> bytes:
    """JSON with what json.dumps cannot write: numbers of 5,000 digits, and 100,000 levels."""
    text = json.dumps(_placed(tree, path), ensure_ascii=rng.random() < 0.8)
    text = text.replace(f'"{_DIGITS}"', "1" * 5_000).replace(f'"{_DEEP}"', "[" * 100_000)
    return text.encode("utf-8", "surrogatepass")


def _placed(tree: Any, path: Path) -> Any:
    """The tree with the absolute path of the case in place of {absolute}."""
    text = json.dumps(tree)
    if "{absolute}" not in text:
        return tree
    base = next((str(parent.parent) for parent in path.absolute().parents if parent.name == "here"), "/tmp")
    return json.loads(text.replace("{absolute}", base))


def _written(path: Path, data: bytes, what: str) -> str:
    path.write_bytes(data)
    return what


# TOML and text

_TOML_VALUES = (
    *(
        "nan",
        "inf",
        "-inf",
        "0",
        "-1",
        "1e999",
        "1" * 5_000,
        "9223372036854775807",
        "0x7fffffffffffffff",
        "true",
        "1.5",
    ),
    *("1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "[]", "{}", "[[]]", "[1, 'a']", "{a = 1}", "''", '"\\u0000"'),
    *("[" * 1_000 + "]" * 1_000, "[" * 100_000, '"\\uD800"', "'''a\nb'''", "1__0", "[nan]", "[9223372036854775808]"),
)


def _change_toml(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    number = rng.randrange(len(lines))
    kind = rng.randrange(6)
    valued = [place for place, line in enumerate(lines) if "=" in line and not line.startswith("#")]
    if kind < 3 and valued:
        number = rng.choice(valued)
        key = lines[number].split("=")[0]
        text = rng.choice(TEXTS) if rng.random() < 0.4 else None
        new = rng.choice(_TOML_VALUES) if text is None else json.dumps(text)
        if rng.random() < 0.3:
            new = json.dumps(value(rng)).replace(f'"{_DIGITS}"', "1" * 5_000).replace(f'"{_DEEP}"', "[" * 100_000)
        lines[number] = f"{key}= {new}"
        what = f"{key.strip()} = {new[:40]}"
    elif kind == 3:
        lines.insert(number, rng.choice(lines))
        what = "repeated a line"
    elif kind == 4:
        what = f"deleted {lines.pop(number)[:40]!r}"
    else:
        name = rng.choice([*TEXTS, "training", "model", "base", "axes", "__class__", "a.b.c"])
        lines.insert(
            number,
            rng.choice([f"[{json.dumps(name)}]", f"{json.dumps(name)} = 1", f"[{name}]", f"{name} = 1", "[[model]]"]),
        )
        what = f"new {lines[number][:40]!r}"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    return what


def _change_text(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    number = rng.randrange(len(lines))
    new = rng.choice(TEXTS)
    lines[number] = new if rng.random() < 0.7 else lines[number] + new
    if rng.random() < 0.1 and len(lines) < 10_000:
        lines *= 200
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass" if "\ud800" in new else "surrogateescape"))
    return f"line {number}: {new[:40]!r}"


# Safetensors


def _change_safetensors(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.1:
        number = rng.choice([0, 1, length + 1, length - 1, 1 << 20, 1 << 28, 1 << 40, (1 << 64) - 1])
        return _written(path, number.to_bytes(8, "little") + data[8:], f"a header of {number} bytes")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    if rng.random() < 0.15:  # a value that is not finite, of a tensor
        place = rng.randrange(0, max(1, len(body) - 4), 4)
        body = body[:place] + struct.pack("<f", rng.choice([float("nan"), float("inf"), 1e38])) + body[place + 4 :]
        return _written(path, data[: 8 + length] + body, "a value that is not finite")
    metadata = header.get("__metadata__", {})
    inner = [name for name in metadata if metadata[name][:1] in ("{", "[")] if isinstance(metadata, dict) else []
    if inner and rng.random() < 0.6:  # JSON in a text of the metadata
        name = rng.choice(inner)
        tree, what = change_tree(json.loads(metadata[name]), rng)
        metadata[name] = json_bytes(tree, rng, path).decode("utf-8", "replace")
        what = f"{name}: {what}"
    else:
        header, what = change_tree(header, rng)
    text = json_bytes(header, rng, path)
    return _written(path, len(text).to_bytes(8, "little") + text + body, what)


# Zip archives: .npz and .pt


def _change_zip(path: Path, rng: random.Random) -> str:
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    number = rng.randrange(len(members))
    name, data = members[number]
    kind = rng.randrange(8)
    compression = zipfile.ZIP_STORED
    if kind == 0:
        members[number] = (rng.choice([*TEXTS, members[0][0]]) or "a", data)
        what = f"{name} is called {members[number][0][:40]!r}"
    elif kind == 1:
        del members[number]
        what = f"without {name}"
    elif kind == 2 and name.endswith(".pkl"):
        members[number] = (name, PICKLE)
        what = f"{name} is a payload"
    elif kind == 3:
        compression = zipfile.ZIP_DEFLATED
        members[number] = (name, data + bytes(rng.choice([1 << 20, 1 << 26])))
        what = f"{name} with zeros"
    elif name.endswith(".npy") and kind < 7:
        members[number], what = (name, change_npy(data, rng)), f"another header of {name}"
    elif name.endswith(".pkl"):
        members[number], what = (name, change_pickle(data, rng)), f"another number in {name}"
    else:
        changed, what = change_bytes(data, rng)
        members[number], what = (name, changed), f"{name}: {what}"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=compression)
    return what


def change_npy(data: bytes, rng: random.Random) -> bytes:
    """Another dtype, order or shape in the header of an .npy file."""
    end = 10 + int.from_bytes(data[8:10], "little")
    header = data[10:end].decode("latin-1")
    shape = rng.choice(
        [
            "()",
            "(0,)",
            "(-1,)",
            "(1 << 40,)",
            f"({1 << 29},)",
            f"({1 << 40},)",
            f"({1 << 62}, 4)",
            "(2, 0, 8, 3)",
            f"({10**30},)",
        ]
    )
    shape = rng.choice(
        [
            shape,
            "(1, 1, 1, 3)",
            f"(1, 1, {1 << 28}, 3)",
            f"({1 << 14}, {1 << 14})",
            "(True, 8, 8, 3)",
            "None",
            "(1,)",
            "(" * 200,
        ]
    )
    descr = rng.choice(
        [
            "'|O'",
            "'<U9'",
            "'<f8'",
            "'<i8'",
            "'|V8'",
            "'<M8[s]'",
            "'<c16'",
            "'>f4'",
            "'|S1000000000'",
            "[('a', '<f8')]",
            "'<f2'",
            "'hostile'",
            "7",
        ]
    )
    kind = rng.randrange(4)
    if kind < 2:
        header = re.sub(r"'shape': \([^)]*\)", lambda _: f"'shape': {shape}", header)
    elif kind == 2:
        header = re.sub(r"'descr': [^,]*", lambda _: f"'descr': {descr}", header)
    else:
        header = rng.choice(["__import__('os').mkdir('ran')", "{}", "[]", header.replace("False", "True"), "[" * 500])
    header = header.rstrip() + "\n"
    return data[:8] + len(header).to_bytes(2, "little") + header.encode("latin-1") + data[end:]


def change_pickle(data: bytes, rng: random.Random) -> bytes:
    """Another number, or another word, in the stream of a pickle."""
    changed = bytearray(data)
    short = [match.start() for match in re.finditer(rb"K[\x00-\xff]", data)]
    words = list(re.finditer(rb"X(..\x00\x00)([\w.]+)", data, re.DOTALL))
    if short and rng.random() < 0.6:
        place = rng.choice(short)
        number = rng.choice([-1, 0, 1, 255, 65536, 1 << 28, (1 << 31) - 1])
        changed[place : place + 2] = b"J" + struct.pack("<i", number)
    elif words and rng.random() < 0.7:
        match = rng.choice(words)
        text = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
        changed[match.start() : match.end()] = b"X" + len(text).to_bytes(4, "little") + text
    else:
        return change_bytes(data, rng)[0]
    return bytes(changed)


# Tar archives


def _change_tar(path: Path, rng: random.Random) -> str:
    length = path.stat().st_size
    with tarfile.open(path, "r:") as tar:
        members = [(info, tar.fileobj.read(min(info.size, length)) if info.isreg() else b"") for info in tar]  # type: ignore[union-attr]
    number = rng.randrange(len(members))
    info, data = members[number]
    kind = rng.randrange(8)
    if kind == 0:
        info.name = rng.choice([*TEXTS, members[0][0].name]).replace("\ud800", "\udc80") or "a"
        what = f"a member is called {info.name[:40]!r}"
    elif kind == 1:
        info.type = rng.choice(
            [
                tarfile.SYMTYPE,
                tarfile.LNKTYPE,
                tarfile.CHRTYPE,
                tarfile.FIFOTYPE,
                tarfile.DIRTYPE,
                tarfile.GNUTYPE_SPARSE,
            ]
        )
        info.linkname = rng.choice([f"../{OUTSIDE}/private.png", "/etc/passwd", info.name, members[0][0].name])
        what = f"{info.name} is of type {info.type!r}"
    elif kind == 2:
        info.pax_headers = {
            rng.choice(
                [
                    "size",
                    "path",
                    "linkpath",
                    "mtime",
                    "GNU.sparse.map",
                    "GNU.sparse.realsize",
                    "GNU.sparse.major",
                    "hdrcharset",
                ]
            ): str(rng.choice([*NUMBERS, *TEXTS])).replace("\ud800", "?")[:2_000]
        }
        what = f"{info.name} with {str(info.pax_headers)[:60]}"
    elif kind == 3:
        members.insert(rng.randrange(len(members)), members[number])
        what = f"{info.name} twice"
    elif kind == 4 and info.name.endswith(".json"):
        tree, what = change_tree(json.loads(data), rng)
        data = json_bytes(tree, rng, path)
    elif kind == 4:
        data, what = (
            rng.choice([*TEXTS, "7" * 5_000, "9" * 30]).encode("utf-8", "surrogatepass"),
            f"another text of {info.name}",
        )
    else:
        data, what = change_bytes(data, rng)
        what = f"{info.name}: {what}"
    info.size = len(data) if info.isreg() else 0
    members[number] = (info, data)
    with tarfile.open(
        path, "w", format=rng.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]), errors="surrogateescape"
    ) as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    if kind == 7:  # a size that the content does not have
        raw = bytearray(path.read_bytes())
        place = rng.choice(
            [place for place in range(0, len(raw) - 512, 512) if raw[place + 257 : place + 262] == b"ustar"]
        )
        raw[place + 124 : place + 136] = rng.choice(
            [
                b"77777777777\0",
                b"\x80" + b"\0" * 3 + b"\x40" + b"\0" * 7,
                b"\xff" * 12,
                b"00000000001\0",
                b"04000000000\0",
            ]
        )
        raw[place + 148 : place + 156] = b" " * 8
        raw[place + 148 : place + 156] = b"%06o\0 " % sum(raw[place : place + 512])
        path.write_bytes(raw)
        what = "a size in a header"
    return what


_BY_SUFFIX: dict[str, Callable[[Path, random.Random], str]] = {
    ".json": _change_json,
    ".jsonl": _change_jsonl,
    ".toml": _change_toml,
    ".txt": _change_text,
    ".csv": _change_text,
    ".safetensors": _change_safetensors,
    ".npz": _change_zip,
    ".pt": _change_zip,
    ".tar": _change_tar,
}
