"""Ed25519 signatures of programs: key files, the public keys that this user trusts, signing and checking.

A trusted key is a PEM file in the folder `trusted` of the configuration folder, named by its fingerprint: the first
half of the SHA-256 of the public key, as hexadecimal digits.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from npu_compiler.errors import InputError
from npu_compiler.program.config_folder import config_folder

_LONGEST_PEM = 64 * 1024  # bytes; a key of this kind has some hundred


def fingerprint(public_key: bytes) -> str:
    """The fingerprint of a public key: 32 hexadecimal digits."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def is_valid(content: bytes, signature: bytes, public_key: bytes) -> bool:
    """Whether `signature` is a signature of `content` by `public_key`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def sign(content: bytes, key_file: Path) -> dict[str, bytes]:
    """The entries `signature` and `public_key` of a file's authentication, for its content.

    Args:
        key_file: An Ed25519 private key as unencrypted PEM.

    Raises:
        InputError: there is no such key in the file.
    """
    key = _from_pem(key_file, "private", lambda data: load_pem_private_key(data, password=None))
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"'{key_file}' is not an Ed25519 private key; make one with `npu-sim keygen`")
    return {"signature": key.sign(content), "public_key": key.public_key().public_bytes_raw()}


def make_key_pair(path: Path) -> tuple[Path, str]:
    """Write a new private key to a file that only this user can read, and its public key to a second file.

    Returns:
        The public key's file, which has `.pub` appended to its name, and its fingerprint.

    Raises:
        InputError: one of the files exists, or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    public = path.with_name(f"{path.name}.pub")
    private_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for file, pem, mode in ((path, private_pem, 0o600), (public, _public_pem(key.public_key()), 0o644)):
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
                opened.write(pem)
        except OSError as error:
            raise InputError(f"cannot write '{file}': {error.strerror or error}") from error
    return public, fingerprint(key.public_key().public_bytes_raw())


def trusted_keys() -> dict[str, Path]:
    """Fingerprint → PEM file of the keys that this user trusts. Files without a key are ignored."""
    keys = {}
    try:
        files = sorted(_trusted_folder().glob("*.pem"))
    except OSError:
        return {}
    for file in files:
        try:
            keys[fingerprint(_public_key(file).public_bytes_raw())] = file
        except InputError:
            continue
    return keys


def trust_key(path: Path) -> str:
    """Add a public key to the trusted keys; returns its fingerprint.

    Raises:
        InputError: the file holds no Ed25519 public key, or the configuration folder cannot be written.
    """
    key = _public_key(path)
    name = fingerprint(key.public_bytes_raw())
    try:
        folder = _trusted_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / f"{name}.pem").write_bytes(_public_pem(key))
    except OSError as error:
        raise InputError(f"cannot keep '{path}' as a trusted key: {error}") from error
    return name


def distrust_key(name: str) -> None:
    """Remove the key with this fingerprint from the trusted keys.

    Raises:
        InputError: no trusted key has it, or its file cannot be removed.
    """
    file = trusted_keys().get(name)
    if file is None:
        raise InputError(f"no trusted key has the fingerprint '{name}'; `npu-sim trust` lists them")
    try:
        file.unlink()
    except OSError as error:
        raise InputError(f"cannot remove '{file}': {error.strerror or error}") from error


def _trusted_folder() -> Path:
    return config_folder() / "trusted"


def _public_key(path: Path) -> Ed25519PublicKey:
    key = _from_pem(path, "public", load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"'{path}' is not an Ed25519 public key")
    return key


def _from_pem(path: Path, kind: str, load: Any) -> Any:
    try:
        with path.open("rb") as file:
            return load(file.read(_LONGEST_PEM))
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror or error}") from error
    except TypeError as error:
        raise InputError(f"the key in '{path}' is encrypted; give an unencrypted one") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"'{path}' holds no {kind} key in PEM format") from error


def _public_pem(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
