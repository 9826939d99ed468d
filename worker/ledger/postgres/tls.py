"""What a server has to prove before it gets our password and is believed.

libpq's own default (sslmode=prefer) takes any server for the right one.  To demand a certificate by default would
stop running installations on private networks at their upgrade, so that a list which says nothing gets a warning;
but a server that has proved nothing is never given the password in clear.
"""

import os
from collections.abc import Mapping

import psycopg

from worker.errors import StateError

# libpq knows require_auth from this version on.
_REQUIRE_AUTH_SINCE = 160000
# Where distributions keep the certificates of public authorities.  A psycopg that brings its own OpenSSL along looks
# elsewhere for "system".
_BUNDLES = "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"
_SYSTEM = "system"
_CHECKED = "verify-full", "verify-ca"
_HOME_ROOTS = ".postgresql/root.crt"


def protected(parameters: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the parameters of an address with what it leaves open said: the roots to trust, and no clear password.

    Raises StateError for an address with which a password file's entry of one host would go to another.
    """
    made = dict(parameters)
    roots = made.get("sslrootcert") or environ.get("PGSSLROOTCERT")
    mode = _mode(made, environ) or ("verify-full" if roots == _SYSTEM else "")
    if mode == "verify-full":
        made["sslmode"] = mode
        if roots == _SYSTEM or (not roots and not os.path.exists(f"{_home(environ)}/{_HOME_ROOTS}")):
            made["sslrootcert"] = next(filter(os.path.exists, _BUNDLES), _SYSTEM)
    elif made.get("host") and made.get("hostaddr") and "password" not in made and _has_password_file(made, environ):
        raise StateError(
            "ledger: with host= and hostaddr= the password file's entry of the one would be used at the other",
            "leave hostaddr= out, or add sslmode=verify-full, with which the server has to be 'host'",
        )
    if mode not in _CHECKED and psycopg.pq.version() >= _REQUIRE_AUTH_SINCE and "PGREQUIREAUTH" not in environ:
        made.setdefault("require_auth", "!password")
    return made


def exposure(parameters: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if a server on another machine proves nothing and the list does not say that this is meant."""
    roots = parameters.get("sslrootcert") or environ.get("PGSSLROOTCERT")
    mode = _mode(parameters, environ)
    if mode in (*_CHECKED, "disable") or (mode == "require" and roots) or (not mode and roots == _SYSTEM):
        return None
    hosts = parameters.get("hostaddr") or parameters.get("host") or environ.get("PGHOSTADDR") or environ.get("PGHOST")
    far = [host for host in (hosts or "").split(",") if not _is_here(host)]
    if not far:
        return None
    return (
        f"ledger: nothing proves that '{far[0]}' is the right server: a machine in between could read and forge what "
        "is recorded there; add ?sslmode=verify-full to the address (and &sslrootcert=/FILE for an authority of your "
        "own), or ?sslmode=disable where the network itself keeps others out"
    )


def _mode(parameters: Mapping[str, str], environ: Mapping[str, str]) -> str:
    return parameters.get("sslmode") or environ.get("PGSSLMODE") or ""


def _is_here(host: str) -> bool:
    """Return whether a host is a socket, or this machine for certain."""
    return not host or host[0] in "/@" or host.lower() in ("localhost", "::1") or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    parts = host.split(".")
    return parts[0] == "127" and len(parts) == 4 and all(map(str.isdecimal, parts))


def _has_password_file(parameters: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    named = parameters.get("passfile") or environ.get("PGPASSFILE") or f"{_home(environ)}/.pgpass"
    return "PGPASSWORD" not in environ and os.path.exists(named)


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or os.path.expanduser("~")
