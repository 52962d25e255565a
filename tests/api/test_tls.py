"""HTTPS with certificates that are made here."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tailrace.api import tls
from tailrace.api.settings import Settings
from tailrace.terms import InvalidInput
from tests.api.conftest import Running, serving, until

CHAT: dict[str, Any] = {"model": "stand", "messages": [{"role": "user", "content": "hello there"}]}


def make(folder: Path, name: str, *extra: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += [
        "-subj",
        f"/CN={name}",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run([*command, *(extra or ("-noenc",))], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates; "live" is the one that is served."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("first", "second"):
        make(folder, name)
    use(folder, "first")
    return folder


def use(folder: Path, name: str) -> None:
    for kind in ("pem", "key"):
        (folder / f"live.{kind}").write_bytes((folder / f"{name}.{kind}").read_bytes())


@pytest.fixture(scope="module")
def secure(folder: Path) -> Iterator[Running]:
    with serving(tls_cert=str(folder / "live.pem"), tls_key=str(folder / "live.key"), api_keys=["k"]) as server:
        yield server


def trusting(folder: Path, name: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / f"{name}.pem")


def answers(server: Running, folder: Path, name: str) -> bool:
    """Whether the server shows this certificate."""
    with httpx.Client(verify=trusting(folder, name)) as client:
        try:
            return client.get(f"{server.url}/health").status_code == 200
        except httpx.ConnectError:
            return False


def test_the_official_client_speaks_https_streams_included(secure: Running, folder: Path) -> None:
    assert secure.url.startswith("https://")
    with httpx.Client(verify=trusting(folder, "first")) as http:
        client = openai.OpenAI(base_url=f"{secure.url}/v1", api_key="k", http_client=http, max_retries=0)
        whole = client.chat.completions.create(**CHAT).choices[0].message.content
        stream = client.chat.completions.create(**CHAT, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole == "hello there"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**CHAT, temperature=9)
        long = {**CHAT, "messages": [{"role": "user", "content": "x" * (17 << 20)}]}
        with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
            client.chat.completions.create(**long)  # is refused unread, and the connection closed
        assert client.models.list().data


def test_what_is_no_tls_gets_no_answer_and_harms_nobody(secure: Running, folder: Path) -> None:
    host, _, port = secure.url.removeprefix("https://").partition(":")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" not in plain.recv(100)
    with socket.create_connection((host, int(port))) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain)
    assert answers(secure, folder, "first")
    assert not answers(secure, folder, "second")


def test_a_renewed_certificate_is_taken_on_sighup_and_a_wrong_one_is_not(secure: Running, folder: Path) -> None:
    try:
        (folder / "live.pem").write_bytes((folder / "second.pem").read_bytes())  # whose key is another
        secure.process.send_signal(signal.SIGHUP)
        until(lambda: any("do not make a certificate" in line for line in secure.log), "the report")
        assert answers(secure, folder, "first")
        use(folder, "second")
        secure.process.send_signal(signal.SIGHUP)
        until(lambda: answers(secure, folder, "second"), "the other certificate")
        assert not answers(secure, folder, "first")
    finally:
        use(folder, "first")
        secure.process.send_signal(signal.SIGHUP)
        until(lambda: answers(secure, folder, "first"), "the first certificate")


def test_files_that_are_no_certificate_and_key_are_named(folder: Path, tmp_path: Path) -> None:
    cert, key = str(folder / "first.pem"), str(folder / "first.key")
    (tmp_path / "text").write_text("no certificate")
    secret = make(tmp_path, "secret", "-passout", "pass:fish")
    for pair, param, said in (
        ((str(tmp_path / "none"), key), "tls_cert", "cannot be read"),
        ((cert, str(tmp_path / "none")), "tls_key", "cannot be read"),
        ((str(tmp_path / "text"), key), "tls_cert", "do not make"),
        ((cert, str(folder / "second.key")), "tls_cert", "(?i)mismatch"),
        (tuple(map(str, secret)), "tls_cert", "password"),
    ):
        with pytest.raises(InvalidInput, match=said) as refused:
            tls.load(*pair)
        assert refused.value.param == param
    for half in ({"tls_cert": cert}, {"tls_key": key}):
        with pytest.raises(InvalidInput, match="need each other"):
            Settings("m", **half).check()


def test_a_server_that_others_can_reach_without_tls_says_so(secure: Running) -> None:
    with serving(host="0.0.0.0", api_keys=["key"]) as server:
        (line,) = until(lambda: [one for one in server.log if "can be reached" in one], "a line in the log")
        assert "0.0.0.0 can be reached from other machines, and keys, prompts and answers cross" in line
        assert "--tls-cert" in line
    assert not [one for one in secure.log if "can be reached" in one]
    own = Settings("m", host="0.0.0.0", api_keys=("k",), tls_cert="c", tls_key="k")
    assert own.exposed() is None
    assert Settings("m").exposed() is None
