"""API keys, which tell who sends a request. Only their SHA-256 digests are kept."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from pathlib import Path

from npu_compiler.errors import InputError

VARIABLE = "NPU_SIM_API_KEY"
_LINE = re.compile(r"(?P<name>[\w.@-]+)\s+(?P<key>\S+)")
_SHORTEST = 16


class APIKeys:
    """The API keys that the server accepts.

    Args:
        keys: Name → key. If there are none, every request is accepted, under the name "".
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = {name: _digest(key) for name, key in keys.items()}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, authorization: str | None) -> str | None:
        """The name of the key in an `Authorization` header; None if it is none of these keys.

        The header is compared with every key, in constant time, so that the time taken reveals nothing about the keys.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        owner = None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest) and scheme.lower() == "bearer":
                owner = name
        return owner


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path | None) -> APIKeys:
    """The API keys in a file, if `path` is not None, and in the environment variable NPU_SIM_API_KEY.

    The key of the variable has the name `default`. A line of the file is a name, white space and a key; empty lines and
    those that begin with # are ignored.

    Raises:
        InputError: the file has another form, no keys or a name twice, or a key is shorter than 16 characters.
    """
    of_environment = os.environ.get(VARIABLE, "").strip()
    keys = {"default": of_environment} if of_environment else {}
    where = VARIABLE
    if path is not None:
        where = f"'{path}'"
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            raise InputError(f"'{path}' is not UTF-8 text") from None
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            entry = _LINE.fullmatch(line.strip())
            if entry is None:
                raise InputError(f"'{path}', line {number}: write a name, a space and a key")
            if entry["name"] in keys:
                raise InputError(f"'{path}', line {number}: there is another key named '{entry['name']}'")
            keys[entry["name"]] = entry["key"]
        if not keys:
            raise InputError(f"'{path}' holds no API keys; write a name, a space and a key on each line")
    for name, key in keys.items():
        if len(key) < _SHORTEST:
            raise InputError(
                f"the API key '{name}' in {where} has fewer than {_SHORTEST} characters; make a longer one"
            )
    return APIKeys(keys)
