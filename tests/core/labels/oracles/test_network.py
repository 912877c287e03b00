"""What stands between a run and its server: proxies, certificates, names, compression."""

import asyncio
import datetime
import gc
import gzip
import ssl
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from nmoe_core.config.quality import OracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracle import Question
from nmoe_core.labels.oracles import make_oracle
from tests.core.labels.oracles.loopback import Client, Loopback
from tests.core.labels.oracles.server import GOOD, SCORES, JudgeServer, Reply, completion
from tests.core.labels.oracles.test_paid_answers import label
from tests.core.small_gradings import RUBRIC
from tests.refusals import refused

JUDGE = "http://judge.invalid/v1"  # a name that only a proxy can find
BODY = completion(GOOD).body


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def _proxy(server: JudgeServer) -> str:
    return server.url.removesuffix("/v1")


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", ""])
def test_requests_go_through_the_proxy_that_is_named(
    server: JudgeServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name:
        monkeypatch.setenv(name, _proxy(server).replace("//", "//mara:s3cret@"))
    settings = {"base_url": JUDGE} if name else {"base_url": JUDGE, "proxy": _proxy(server)}
    server.always(Reply(BODY))
    assert server.ask_one(**settings).scores == SCORES
    assert set(server.paths) == {f"{JUDGE}/chat/completions"}
    assert ("Proxy-Authorization: Basic bWFyYTpzM2NyZXQ=" in server.headers[0]) is bool(name)


@pytest.mark.parametrize("more", [{"no_proxy": "judge.invalid"}, {"no_proxy": "*"}, {}])
def test_a_proxy_is_left_out_where_the_environment_or_the_configuration_says_so(
    server: JudgeServer, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", _proxy(server))
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    with refused("E-LABEL-ORACLE", naming=["cannot connect"]):
        server.ask_one(base_url=JUDGE, **({} if more else {"proxy": ""}))
    assert not server.asked


def test_a_key_goes_in_the_clear_to_no_proxy_on_another_machine(server: JudgeServer) -> None:
    settings = {"api_key_env": "ORACLE_KEY", "proxy": "http://proxy.invalid:3128"}
    with pytest.raises(ValueError, match="allow_key_over_http"):
        server.table(**settings)


@pytest.mark.parametrize("proxy", ["socks5://mara:s3cret@127.0.0.1:1", "ftp://mara:s3cret@h"])
def test_a_proxy_of_another_kind_is_refused_without_its_password(
    server: JudgeServer, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with refused("E-CONFIG", naming=["proxy", "HTTP_PROXY"]) as error:
        server.ask_one(base_url=JUDGE)
    assert "s3cret" not in error.value.line()


async def _tunnel(client: Client) -> None:
    """A proxy that connects to the named port on loopback, if the client logs in."""
    head = (await client.reader.readuntil(b"\r\n\r\n")).decode()
    if "bWFyYTpzM2NyZXQ=" not in head:
        await client.send(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
        return
    port = int(head.split()[1].rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await client.send(b"HTTP/1.1 200 OK\r\n\r\n")

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while piece := await source.read(2**16):
            target.write(piece)
            await target.drain()
        target.close()

    await asyncio.gather(copy(client.reader, writer), copy(reader, client.writer))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of judge.invalid and localhost, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "judge")])
    names = [x509.DNSName(host) for host in ("judge.invalid", "localhost")]
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(2999, 1, 1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "judge.pem"
    path.write_bytes(made.public_bytes(pem) + key.private_bytes(pem, *private))
    return path


@pytest.fixture
def secure(certificate: Path) -> Iterator[JudgeServer]:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    made = JudgeServer(tls=tls)
    made.always(Reply(BODY))
    with closing(made):
        yield made


def _https(server: JudgeServer, host: str = "localhost") -> str:
    return f"https://{host}:{server.port}/v1"


def test_a_certificate_is_accepted_if_a_file_names_it(
    secure: JudgeServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("E-LABEL-ORACLE", naming=["CERTIFICATE", "ca_file"]):
        secure.ask_one(base_url=_https(secure))
    http = secure.table(base_url=_https(secure), ca_file=certificate.name)
    table = OracleTable(kind="http", http=http)
    oracle = make_oracle(table, Rubric.load(RUBRIC), certificate.parent)
    ((_, result),) = oracle.label([Question("a document")])
    assert result.scores == SCORES
    with refused("E-CONFIG", naming=["no_such.pem", "ca_file"]):
        secure.ask_one(base_url=_https(secure), ca_file="no_such.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert secure.ask_one(base_url=_https(secure)).scores == SCORES


def test_a_proxy_sees_nothing_of_a_request_over_https(
    secure: JudgeServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"base_url": _https(secure, "judge.invalid"), "ca_file": str(certificate)}
    with closing(Loopback(_tunnel)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://mara:s3cret@127.0.0.1:{proxy.port}")
        assert secure.ask_one(**settings).scores == SCORES
        assert "proxy-" not in secure.headers[0].lower()
        monkeypatch.setenv("HTTPS_PROXY", f"http://mara:wr0ng@127.0.0.1:{proxy.port}")
        with refused("E-LABEL-ORACLE", naming=["407", f"127.0.0.1:{proxy.port}"]) as error:
            secure.ask_one(**settings)
    assert "wr0ng" not in error.value.line()


def _deflate(body: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(body) + made.flush()


COMPRESSED = {
    "gzip": ("gzip", gzip.compress(BODY)),
    "deflate": ("deflate", zlib.compress(BODY)),
    "deflate without a head": ("Deflate", _deflate(BODY)),
    "nothing": ("identity", BODY),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_compressed_reply_is_read(server: JudgeServer, name: str) -> None:
    encoding, body = COMPRESSED[name]
    server.always(Reply(body, headers={"Content-Encoding": encoding}))
    assert server.ask_one().scores == SCORES
    assert server.asked.total() == 1


BROKEN = {
    "a bomb": ("gzip", gzip.compress(BODY + b" " * 2**28), "reply_too_large"),
    "a broken stream": ("gzip", b"\x1f\x8b\x08" + BODY, "connection_lost"),
    "another encoding": ("br", BODY, "connection_lost"),
    "two encodings": ("gzip, gzip", gzip.compress(gzip.compress(BODY)), "connection_lost"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_reply_that_cannot_be_decompressed_or_grows_too_large_is_a_failure(
    server: JudgeServer, name: str
) -> None:
    encoding, body, reason = BROKEN[name]
    bad = Reply(body, headers={"Content-Encoding": encoding})
    server.behave = lambda document, nth: bad if document == "bad" else Reply(BODY)
    found = server.ask(["good", "bad"], concurrency=1, max_attempts=1)
    assert (found["bad"].scores, found["bad"].finish_reason) == (None, reason)


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://jüdge.invalid/v1", "http://xn--jdge-0ra.invalid/v1/chat/completions"),
        (f"{JUDGE}/ä?x=ö", f"{JUDGE}/%C3%A4/chat/completions?x=%C3%B6"),
    ],
)
def test_addresses_may_have_letters_of_any_script(
    server: JudgeServer, url: str, asked: str
) -> None:
    server.ask_one(base_url=url, proxy=_proxy(server))
    assert list(server.paths) == [asked]


@pytest.mark.parametrize(
    "url", ["http://h:99999/v1", "http://h:x/v1", "http:///v1", "h/v1", "http://a b/"]
)
def test_addresses_that_cannot_be_asked_are_refused_by_the_name_of_their_field(
    server: JudgeServer, url: str
) -> None:
    with pytest.raises(ValueError, match="base_url"):
        server.table(base_url=url)


def test_a_host_name_that_cannot_be_encoded_is_refused(server: JudgeServer) -> None:
    with refused("E-CONFIG", naming=["base_url"]):
        server.ask_one(base_url="http://\u2603.invalid/v1")


def test_the_query_of_an_address_is_in_no_message_and_no_record(
    server: JudgeServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.always(Reply(b"moved", 307, {"Location": "http://other.invalid/v1?key=s3cret"}))
    address = f"--set=oracle.http.base_url={server.url}?key=s3cret"
    assert label(server, tmp_path, ["a document"], address) == 1
    assert list(server.paths) == ["/v1/chat/completions?key=s3cret"]
    shown = capfd.readouterr().err
    assert "redirect to http://other.invalid/v1" in shown
    assert "set base_url" in shown
    kept = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("s3cret" in text for text in (shown, *kept))


@pytest.mark.parametrize("name", BROKEN)
def test_a_reply_that_is_not_read_to_its_end_leaves_nothing_open(
    server: JudgeServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoding, body, reason = BROKEN[name]
    server.always(Reply(body, headers={"Content-Encoding": encoding}))
    with refused("E-LABEL-ORACLE-DOWN", naming=[reason]):
        server.ask(["a", "b", "c"], max_attempts=1)
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
