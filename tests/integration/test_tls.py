"""A cluster that answers https: clients and commands, versions of TLS, a certificate that is renewed under a stream."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

pytestmark = pytest.mark.slow

RENEWED_S = 20.0


class Authority:
    """A certificate authority of this test's own, and the files of the server's certificate."""

    def __init__(self, folder: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test's own authority")])
        self.ca_file, self.certfile, self.keyfile = folder / "ca.pem", folder / "server.crt", folder / "server.key"
        ours = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca_file.write_bytes(ours.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def issue(self, name: str) -> None:
        """Put a new certificate for this machine, with a new key, in the place of the server's."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._builder(subject, key).add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        self.keyfile.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        self.certfile.write_bytes(certificate.public_bytes(Encoding.PEM))

    @property
    def trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca_file))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=1))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("tls"))
    made.issue("first")
    return made


@pytest.fixture(scope="module")
def secure(serve: Callable[..., Any], authority: Authority) -> Any:
    """1 prefill + 1 decode worker behind TLS, with an empty file of API keys and an operator's key."""
    keys_file = authority.ca_file.with_name("keys.json")
    keys_file.write_text('{"keys": {}}')
    flags = ("--ssl-keyfile", str(authority.keyfile), "--ssl-certfile", str(authority.certfile), "--keys-file", str(keys_file))
    key = {"TANDEM_ADMIN_KEY": "sesame"}
    served = serve(*flags, environment=key, ca_file=str(authority.ca_file))
    served.wait_ready()
    return served


@pytest.fixture(scope="module")
def api_key(secure: Any, authority: Authority) -> str:
    keys_file = authority.ca_file.with_name("keys.json")
    return str(secure.command("keys", "add", "--tenant", "acme", "--keys-file", str(keys_file)).stdout.strip())


def served_name(secure: Any, context: ssl.SSLContext) -> tuple[str, str | None]:
    """Name in the certificate, and version of TLS, of a new connection."""
    with (
        socket.create_connection(("127.0.0.1", secure.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        certificate: Any = connection.getpeercert()
        return dict(entry[0] for entry in certificate["subject"])["commonName"], connection.version()


def test_the_openai_package_streams_over_https(secure: Any, authority: Authority, api_key: str) -> None:
    assert f"https://127.0.0.1:{secure.port}" in secure.said()
    with (
        openai.DefaultHttpxClient(verify=authority.trusted) as http,
        openai.OpenAI(base_url=f"{secure.url}/v1", api_key=api_key, max_retries=0, http_client=http) as client,
    ):
        question: Any = [{"role": "user", "content": "Name the capital of France."}]
        chunks = client.chat.completions.create(model="smollm2", messages=question, max_tokens=12, temperature=0, stream=True)
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    stranger = openai.OpenAI(base_url=f"{secure.url}/v1", api_key=api_key, max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        stranger.models.list()


def test_old_versions_of_tls_and_plain_http_are_refused(secure: Any, authority: Authority) -> None:
    assert served_name(secure, authority.trusted)[1] == "TLSv1.3"
    older = authority.trusted
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    assert served_name(secure, older)[1] == "TLSv1.2"
    oldest = authority.trusted
    oldest.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        oldest.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        oldest.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match=r"(?i)version"):
        served_name(secure, oldest)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{secure.port}/health", timeout=60)


def test_admin_wants_its_key_where_there_are_api_keys(secure: Any, authority: Authority, api_key: str) -> None:
    for headers in ({}, {"authorization": f"Bearer {api_key}"}):
        assert httpx.get(f"{secure.url}/admin/status", headers=headers, verify=authority.trusted, timeout=60).status_code == 401
    assert secure.ask("GET", "/admin/status").status_code == 200


def test_commands_take_https_addresses(secure: Any, authority: Authority, api_key: str) -> None:
    keys = {"TANDEM_ADMIN_KEY": "sesame", "TANDEM_API_KEY": api_key, "SSL_CERT_FILE": str(authority.ca_file)}
    load = ("--dataset-name", "random", "--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "2")
    for command in (
        ("status",),
        ("audit",),
        ("scale", "prefill=1", "decode=1"),
        ("bench", "--base-url", secure.url, "--api-key", api_key, *load, "--num-warmups", "0"),
    ):
        done = secure.command(*command, environment=keys)
        assert done.returncode == 0, done.stderr
    refused = secure.command("status", environment=keys | {"SSL_CERT_FILE": ""})
    assert (refused.returncode != 0, "certificate" in refused.stderr.lower()) == (True, True), "verified as a matter of course"


def test_a_renewed_certificate_is_taken_up_while_streams_go_on(secure: Any, authority: Authority, api_key: str) -> None:
    assert served_name(secure, authority.trusted)[0] == "first"
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 120, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {api_key}"}
    url = f"{secure.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, verify=authority.trusted, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        authority.certfile.write_text("half of it")
        time.sleep(1.5)  # long enough to be seen
        assert served_name(secure, authority.trusted)[0] == "first", "what was good stays"
        authority.issue("second")
        secure.until(lambda: served_name(secure, authority.trusted)[0] == "second", RENEWED_S)
        assert list(lines)[-2] == "data: [DONE]"


def test_a_certificate_that_can_not_be_used_is_one_line(
    serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path)
    other.issue("other")
    served = serve("--ssl-keyfile", str(other.keyfile), "--ssl-certfile", str(authority.certfile))
    assert served.process.wait(timeout=60) == 2
    [line] = [line for line in served.said().splitlines() if line.strip()]
    assert line.startswith("tandem: http.ssl_certfile:")
    assert "KEY_VALUES_MISMATCH" in line
