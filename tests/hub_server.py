# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A server with the few calls of the Hugging Face hub that TorchDiTan uses through huggingface_hub."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "t" * 20


@dataclass
class FakeHub:
    """Repositories by "models/owner/name": their files at their only commit."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    sent: dict[str, bytes] = field(default_factory=dict)
    """Path of a file -> what the server sends in place of its content, of the same length, with the right headers."""
    url: str = ""

    def commit_of(self, repository: str) -> str:
        digest = hashlib.sha1(repository.encode())
        for name, content in sorted(self.repositories[repository].items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *arguments: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
            repository, what, revision = found.groups()
            if repository not in self.hub.repositories:
                return self.refuse(401, "RepoNotFound")
            commit = self.hub.commit_of(repository)
            if revision not in ("main", commit):
                return self.refuse(404, "RevisionNotFound")
            files = self.hub.repositories[repository]
            if what == "revision":
                siblings = [{"rfilename": name} for name in files]
                return self.answer({"id": repository.partition("/")[2], "sha": commit, "siblings": siblings})
            return self.answer([entry(name, content) for name, content in files.items()])
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            prefix, name, revision, file = found.groups()
            return self.send_file(f"{'datasets' if prefix else 'models'}/{name}", revision, file)
        return self.refuse(404, "unknown")

    def send_file(self, repository: str, revision: str, file: str) -> None:
        files = self.hub.repositories.get(repository, {})
        if file not in files:
            return self.refuse(404, "EntryNotFound")
        content = files[file]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Repo_Commit": self.hub.commit_of(repository)}
        if self.command == "GET" and file in self.hub.sent:
            return self.answer(self.hub.sent[file], **headers)
        return self.answer(content, **headers)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"POST {path}")
        body = self.body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "unauthorized")
        if path == "/api/repos/create":
            asked = json.loads(body)
            kind = asked.get("type", "model")
            name = f"{asked['organization']}/{asked['name']}"
            self.hub.repositories.setdefault(f"{kind}s/{name}", {})
            if asked.get("private") or asked.get("visibility") == "private":  # hubs of before and after 1.0
                self.hub.private.add(f"{kind}s/{name}")
            prefix = "" if kind == "model" else f"{kind}s/"
            return self.answer({"url": f"{self.hub.url}/{prefix}{name}"})
        if path == "/api/validate-yaml":
            content = json.loads(body)["content"]
            is_card = content.startswith("---\n") and "\n---\n" in content
            return self.answer({} if is_card else {"errors": [{"message": "no front matter"}]}, 200 if is_card else 400)
        if found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/preupload/main", path):
            files = json.loads(body)["files"]
            modes = {True: "lfs", False: "regular"}
            answers = [
                {
                    "path": file["path"],
                    "uploadMode": modes[file["path"].endswith((".safetensors", ".png"))],
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in files
            ]
            return self.answer({"files": answers})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.hub.url}/objects/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/commit/main", path):
            repository = found[1]
            self.commit(repository, body)
            commit = self.hub.commit_of(repository)
            return self.answer(
                {"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{repository}/commit/{commit}"}
            )
        return self.refuse(404, "unknown")

    def commit(self, repository: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.hub.repositories[repository][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.repositories[repository][value["path"]] = self.hub.objects[value["oid"]]
            else:
                assert line["key"] == "header", line

    def do_PUT(self) -> None:
        content, oid = self.body(), self.path.rsplit("/", 1)[1]
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.objects[oid] = content
        self.answer({})


def entry(name: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    described: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": oid}
    if name.endswith((".safetensors", ".png")):
        described["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return described


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
