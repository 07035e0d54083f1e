"""A server with the part of the Hugging Face hub's interface that downloads use."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

REVISION = "c0ffee" * 6 + "c0ff"
ROUTE = re.compile(
    rf"/(api/)?(models/|datasets/)?([^/]+/[^/]+)(?:/(revision|tree|resolve)/(?:main|{REVISION}))?"
    r"(?:/(.+))?"
)


@contextmanager
def hub(repositories: Mapping[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders, such as ``datasets/owner/name``. Yields the address and the served files."""
    served: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            route = ROUTE.fullmatch(self.path.partition("?")[0])
            assert route is not None, self.path
            api, kind, name, action, file = route.groups()
            folder = repositories.get(f"{kind or 'models/'}{name}")
            if folder is None:
                return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            if api is None and not (folder / file).is_file():
                return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            if api is None:
                content = (folder / file).read_bytes()
                served.append(f"{name}/{file}")
                tag = hashlib.sha1(content).hexdigest()
                return self.answer(200, content, {"X-Repo-Commit": REVISION, "ETag": f'"{tag}"'})
            names = [path.relative_to(folder).as_posix() for path in paths]
            if action == "tree":
                files = [
                    {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}
                    for name, path in zip(names, paths, strict=True)
                ]
                return self.answer(200, json.dumps(files).encode(), {})
            siblings = [{"rfilename": name} for name in names]
            info = {"id": name, "sha": REVISION, "siblings": siblings, "private": False}
            return self.answer(200, json.dumps(info).encode(), {})

        do_HEAD = do_GET

        def answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for header in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(*header)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", served
    finally:
        server.shutdown()
        server.server_close()
