"""Trust in programs whose content is code: who authenticated one, and whether this user trusts them.

A program for a target whose programs are code (`TargetConfig.programs_are_code`) runs only if this user compiled it, if
a key that this user trusts signed it, or if the caller allows it. A file records that beside the body:

- `hmac`: HMAC-SHA256 under this user's own key: 32 random bytes in the file `key` of the configuration folder, which is
  created when it is first needed.
- `signature` and `public_key`: Ed25519, in `npu_compiler.program.signatures`.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from npu_compiler.errors import UntrustedProgramError
from npu_compiler.program.config_folder import config_folder

KEY_BYTES = 32
# What an envelope may hold beside the body, and how long each is.
AUTHENTICATION_BYTES = {"hmac": 32, "signature": 64, "public_key": 32}


@dataclass(frozen=True)
class Trust:
    """The origin of a program.

    Attributes:
        origin: One of: this user, the owner of a trusted key, the caller who allowed it, or unknown.
        detail: The fingerprint of the key; or, for an unknown program, the reason why it is not trusted.
    """

    origin: Literal["made here", "signed", "allowed", "unknown"]
    detail: str = ""

    def __str__(self) -> str:
        return f"signed by {self.detail}" if self.origin == "signed" else self.origin

    def check(self, name: str) -> None:
        """Refuse to run the code of a program of unknown origin.

        Args:
            name: The program's name, for the message.

        Raises:
            UntrustedProgramError: the origin is unknown.
        """
        if self.origin == "unknown":
            raise UntrustedProgramError(
                f"program '{name}' contains code, which is not run because {self.detail or _unmarked()}; compile it "
                "here from its IR, have its author sign it (`npu-sim sign`) and trust their key (`npu-sim trust`), or "
                "allow it with --allow-code (in Python, allow_code=True)"
            )


MADE_HERE = Trust("made here")
ALLOWED = Trust("allowed")
UNKNOWN = Trust("unknown")


class _NoKeyError(Exception):
    """An error that says why this user's key cannot be used."""


def authenticate(content: bytes) -> dict[str, bytes]:
    """The authentication entries for content that this user compiled; empty if the user cannot have a key."""
    try:
        return {"hmac": _hmac(_user_key(), content)}
    except _NoKeyError:
        return {}


def judge(content: bytes, authentication: Mapping[str, bytes]) -> Trust:
    """The trust in content, decided from its authentication entries."""
    doubts = []
    if "hmac" in authentication:
        try:
            if hmac.compare_digest(_hmac(_read_key(), content), authentication["hmac"]):
                return MADE_HERE
            doubts.append("it was made by another user or changed since")
        except _NoKeyError as error:
            doubts.append(f"it cannot be told whether this user made it ({error})")
    if "signature" in authentication:
        from npu_compiler.program import signatures

        signer = authentication["public_key"]
        fingerprint = signatures.fingerprint(signer)
        if not signatures.is_valid(content, authentication["signature"], signer):
            doubts.append("its signature does not fit its content")
        elif fingerprint not in signatures.trusted_keys():
            doubts.append(f"its signature is by the key {fingerprint}, which is not trusted here")
        else:
            return Trust("signed", fingerprint)
    return Trust("unknown", ", and ".join(doubts))


def _hmac(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")


def _unmarked() -> str:
    """The message about a program without a valid authentication."""
    try:
        _read_key()
    except _NoKeyError as error:
        return f"neither a signature nor this user's key vouches for it ({error})"
    return "neither a signature nor this user's key vouches for it"


def _user_key() -> bytes:
    """This user's key, which is created if there is none. Raises `_NoKeyError`."""
    path = _key_path()
    if not path.exists():
        try:
            _make_key(path)
        except OSError as error:
            raise _NoKeyError(f"cannot make '{path}': {error.strerror or error}") from error
    return _read_key()


def _key_path() -> Path:
    try:
        return config_folder() / "key"
    except FileNotFoundError as error:
        raise _NoKeyError(str(error)) from error


def _read_key() -> bytes:
    path = _key_path()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            key = file.read(KEY_BYTES + 1)
    except OSError as error:
        raise _NoKeyError(f"cannot read '{path}': {error.strerror or error}") from error
    if os.name == "posix" and status.st_uid != os.geteuid():
        raise _NoKeyError(f"'{path}' belongs to another user")
    if os.name == "posix" and status.st_mode & 0o077:
        raise _NoKeyError(f"'{path}' is open to other users; delete it, or make it private with chmod 600")
    if len(key) != KEY_BYTES:
        raise _NoKeyError(f"'{path}' is damaged; delete it")
    return key


def _make_key(path: Path) -> None:
    """Write a new key file that only this user may read; a file that another process wrote at the same time is kept."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
