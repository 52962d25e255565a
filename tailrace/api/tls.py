"""TLS: the server's certificate, read again on request.

Imported only where one is given.
"""

from __future__ import annotations

import ssl

from tailrace.terms import InvalidInput


def load(cert: str, key: str) -> ssl.SSLContext:
    """A context with the certificate (PEM, with the chain up to a root behind it) and its private key, for TLS 1.2 and
    later. Raises InvalidInput."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _read(context, cert, key)
    return context


def reload(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Reads both files again: new connections get the new certificate, open ones keep theirs. Raises InvalidInput, and
    the context then is as it was."""
    load(cert, key)  # a context into which only half of them was read would be of no use
    _read(context, cert, key)


def _read(context: ssl.SSLContext, cert: str, key: str) -> None:
    for name, file in (("tls-cert", cert), ("tls-key", key)):
        try:
            with open(file, "rb"):
                pass
        except OSError as error:
            raise InvalidInput(
                f"--{name} {file} cannot be read: {error.strerror}", param=name.replace("-", "_")
            ) from None
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise InvalidInput(
            f"--tls-cert {cert} and --tls-key {key} do not make a certificate with its key, both in PEM and without a "
            f"password: {reason}",
            param="tls_cert",
        ) from None


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    raise ValueError("the key has a password")
