"""What the stores of other providers answer: generations of GCS, ETags of Azure without quotes, and
servers that ignore conditions or never find them true."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from hashlib import md5
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from loader.errors import ConfigError, PlanError
from loader.files.stores import objects, store
from nmoe_core.base.atomic import output_lock, write_bytes
from nmoe_core.base.bucket import paths
from tests.buckets import Machine, digests_of
from tests.project import serving

pytest.importorskip("obstore")
_NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_BUCKET = "corpus"


class _Server(BaseHTTPRequestHandler):
    """The requests of GCS, Azure and S3 that a root makes, for one bucket in memory. `kind` says
    whose answers it gives, or how it treats the conditions of S3."""

    protocol_version = "HTTP/1.1"
    kind = "gs"
    files: ClassVar[dict[str, tuple[bytes, int]]] = {}
    count = 0

    def log_message(self, format: str, *args: object) -> None:
        """No log."""

    def do_GET(self) -> None:
        """A file, or the listing."""
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query or "comp" in query:
            return self._answer(200, self._listed(query.get("prefix", [""])[0]).encode())
        found = self.files.get(self._key())
        if found is None:
            return self._missing()
        return self._answer(200, *found)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        """A file, if its conditions hold."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if f"/{_BUCKET}/" not in self.path:
            return self._missing()
        if not self._holds(self.files.get(self._key())):
            return self._answer(412)
        type(self).count += 1
        self.files[self._key()] = (content, self.count)
        return self._answer(200, b"", self.count, md5(content).hexdigest())

    def do_DELETE(self) -> None:
        """Remove a file."""
        self.files.pop(self._key(), None)
        self._answer(204)

    def do_POST(self) -> None:
        """Remove files: S3 names them in the content."""
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", content)
        for key in keys:
            self.files.pop(key, None)
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

    def _key(self) -> str:
        path = unquote(urlsplit(self.path).path)
        return path.partition(f"/{_BUCKET}/")[2]

    def _missing(self) -> None:
        is_bucket = f"/{_BUCKET}/" in self.path
        code = "ContainerNotFound" if self.kind == "az" else "NoSuchBucket"
        self._answer(
            404, f"<Error><Code>{'NoSuchKey' if is_bucket else code}</Code></Error>".encode()
        )

    def _holds(self, found: tuple[bytes, int] | None) -> bool:
        generation = self.headers["x-goog-if-generation-match"]
        if self.kind == "gs":
            return generation is None or int(generation) == (found[1] if found else 0)
        if self.kind == "ignores":
            return True
        tag = self.headers["If-Match"]
        if tag is not None:
            return self.kind != "refuses" and found is not None and tag == self._tag(found)
        return found is None or self.headers["If-None-Match"] is None

    def _tag(self, found: tuple[bytes, int]) -> str:
        return f'"{md5(found[0]).hexdigest()}"'

    def _answer(
        self, status: int, content: bytes = b"", generation: int = 0, tag: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", format_datetime(_NOW, usegmt=True))
        self.send_header("ETag", f'"{tag or md5(content).hexdigest()}"')
        self.send_header("x-goog-generation", str(generation))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _listed(self, prefix: str) -> str:
        found = {key: one for key, one in sorted(self.files.items()) if key.startswith(prefix)}
        if self.kind == "az":
            blobs = "".join(
                f"<Blob><Name>{escape(key)}</Name><Properties>"
                f"<Last-Modified>{format_datetime(_NOW, usegmt=True)}</Last-Modified>"
                f"<Content-Length>{len(one[0])}</Content-Length>"
                "<Content-Type>application/json</Content-Type>"
                f"<Etag>{md5(one[0]).hexdigest()}</Etag></Properties></Blob>"
                for key, one in found.items()
            )
            return f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_NOW.isoformat()}</LastModified>"
            f"<ETag>{escape(self._tag(one))}</ETag><Size>{len(one[0])}</Size></Contents>"
            for key, one in found.items()
        )
        return f"<ListBucketResult>{contents}</ListBucketResult>"


@pytest.fixture
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A root in a store of the kind that the test asks for."""
    kind = request.param
    handler = type("Handler", (_Server,), {"kind": kind, "files": {}})
    with serving(handler) as (host, _):
        keys = ("client_email", "private_key", "private_key_id")
        account = {
            "gcs_base_url": f"http://{host}",
            "disable_oauth": True,
            **dict.fromkeys(keys, ""),
        }
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://{host}/account")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        yield f"{kind if len(kind) == 2 else 's3'}://{_BUCKET}/run"
    paths.forget_all()
    objects.forget_roots()


def _put(root: Path, content: bytes) -> None:
    with output_lock(root / "data"):
        write_bytes(root / "data" / "a", content)


@pytest.mark.parametrize("url", ["gs", "az", "s3"], indirect=True)
def test_a_file_is_replaced_only_if_it_is_the_one_that_was_read(url: str) -> None:
    file = f"{url}/a"
    first = store.write_if(file, b"first", None)
    assert first is not None
    assert store.write_if(file, b"other", None) is None
    second = store.write_if(file, b"second", first)
    assert second is not None
    assert store.write_if(file, b"other", first) is None
    assert store.write_if(f"{url}/missing", b"other", first) is None
    assert store.read_tagged(file) == (b"second", second)


@pytest.mark.parametrize("url", ["gs", "az", "s3"], indirect=True)
def test_listings_have_the_tags_that_reads_have(url: str) -> None:
    tag = store.write_if(f"{url}/a", b"a", None)
    assert [(one.path, one.tag) for one in store.listing(url)] == [("a", tag)]


@pytest.mark.parametrize("url", ["gs", "s3"], indirect=True)
def test_two_machines_change_a_root_in_turn(url: str, tmp_path: Path) -> None:
    machines = [Machine(tmp_path / name, url) for name in ("one", "two")]
    for content in (b"first", b"second", b"third"):
        _put(machines[0].root, content)
        machines.reverse()
        machines[0].looks_again()
        assert (machines[0].root / "data" / "a").read_bytes() == content
    assert digests_of(url).keys() == {"data/a"}


@pytest.mark.parametrize("url", ["gs", "az", "s3"], indirect=True)
def test_a_missing_bucket_is_not_a_missing_file(url: str) -> None:
    other = url.replace(_BUCKET, "elsewhere")
    assert store.read_bytes(f"{url}/missing") is None
    with pytest.raises(PlanError):
        store.read_bytes(f"{other}/a")
    with pytest.raises(PlanError):
        store.write_if(f"{other}/a", b"", None)


@pytest.mark.parametrize("url", ["ignores", "refuses"], indirect=True)
def test_a_store_without_conditional_writes_is_refused(url: str, tmp_path: Path) -> None:
    root = Machine(tmp_path / "one", url).root
    with pytest.raises(ConfigError, match="no conditional writes") as caught:
        _put(root, b"a")
    assert caught.value.code == "E-STORE"
    assert not list(store.listing(url))
