"""The names of Google Cloud Storage before a server on loopback, for clients that insist on TLS.

Clients in C++ know the service's addresses by heart, but send requests by the proxy of their
environment. `run_proxy` is one: it ends the encryption of storage.googleapis.com with a certificate
of its own, and forwards each request to the emulator of tests/support/gcs.py.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import re
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NAMES = ("storage.googleapis.com", "www.googleapis.com")
_OF_CONNECTION = {"connection", "host", "transfer-encoding", "content-length", "date", "server"}


class Proxy(ThreadingHTTPServer):
    """A proxy that lists the requests that did not fail, as `METHOD ADDRESS`."""

    daemon_threads = True

    def __init__(self, server: str, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server = urlsplit(server).netloc
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate)
        self.requests = list[str]()

    def find_all(self, pattern: str) -> set[str]:
        """Return the groups that a pattern finds in the requests."""
        return {match[1] for line in self.requests if (match := re.search(pattern, line))}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_CONNECT(self) -> None:
        """Go on with a client that believes it speaks to the service itself."""
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", 0)

    def _forward(self) -> None:
        path = self.path.removeprefix(f"http://{self.server.server}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        names = [name for name in self.headers if name.lower() not in _OF_CONNECTION]
        with contextlib.closing(http.client.HTTPConnection(self.server.server)) as connection:
            headers = {name: self.headers[name] for name in names}
            connection.request(self.command, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        if answer.status < 400:
            self.server.requests.append(f"{self.command} {path}")
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_CONNECTION:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _forward  # noqa: N815  # the library's names

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def run_proxy(server: str, folder: Path) -> Iterator[tuple[Proxy, dict[str, str]]]:
    """Run a proxy before a server; gives it and the environment that leads clients to it."""
    certificate = _write_certificate(folder / "gcs.pem")
    with Proxy(server, certificate) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{proxy.server_port}"
        try:
            yield (
                proxy,
                {
                    "https_proxy": address,
                    "http_proxy": address,  # where the emulator sends a client with an upload
                    "no_proxy": "",
                    "NO_GCE_CHECK": "true",  # else it looks for a token on a machine of the service
                    "CURL_CA_BUNDLE": str(certificate),
                },
            )
        finally:
            proxy.shutdown()
            thread.join()


def _write_certificate(path: Path) -> Path:
    """Write a key and the certificate that it signs for the service's names, valid for a day."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAMES[0])])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(map(x509.DNSName, NAMES)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return path
