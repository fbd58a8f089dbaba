"""The command line's HTTP client against what the environment and the URL may say."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from cluster.commands.lib.http_client import ApiClient
from protocol.errors import InvalidRequestError, UnavailableError


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def served(certificate: Path | None = None) -> Iterator[str]:
    """The URL of a server that answers {} to everything, by TLS if there is a certificate."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a key and its own certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test's own")])
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - hour, now + hour)
    for extension in (
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
        x509.BasicConstraints(ca=True, path_length=None),
    ):
        builder = builder.add_extension(extension, critical=False)
    path = tmp_path / "pair.pem"
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(pem + builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("http_proxy", "http://127.0.0.1:1"),
        ("HTTP_PROXY", "http://127.0.0.1:1"),
        ("ALL_PROXY", "socks5://127.0.0.1:1"),
        ("all_proxy", "socks://127.0.0.1:1"),
    ],
)
def test_no_proxy_hears_of_keys(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with served() as url:
        assert ApiClient(url, "sesame").get("/health") == {}


def test_an_authority_of_the_operators_own(monkeypatch: pytest.MonkeyPatch, certificate: Path) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with served(certificate) as url:
        with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            ApiClient(url, None).get("/health")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ApiClient(url, None).get("/health") == {}


def test_authorities_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/absent.pem")
    with served() as url:
        assert ApiClient(url, None).get("/health") == {}
    with pytest.raises(UnavailableError, match="SSL_CERT_FILE or SSL_CERT_DIR: No such file"):
        ApiClient("https://127.0.0.1:1", None)


@pytest.mark.parametrize("url", ["http://a..b:8000", "http://[::1", "http://ü..x", "https://a..b"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(UnavailableError, match="is no URL"):
        ApiClient(url, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), datetime.date(2026, 1, 1), {1, 2}, "\udcff"])
def test_what_json_can_not_hold_is_refused_before_it_is_sent(value: object) -> None:
    client = ApiClient("http://127.0.0.1:1", None)
    with pytest.raises(InvalidRequestError, match="can't be written as JSON"):
        client.post("/admin/cache", {"tenant": value})
    with pytest.raises(InvalidRequestError, match="can't be written as JSON"):
        next(client.stream("/v1/chat/completions", {"messages": [value]}))
