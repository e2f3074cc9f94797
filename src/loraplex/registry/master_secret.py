"""The server's secret: 32 random bytes in a file of the data directory, from which all keys for hashing derive."""

import errno
import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from loraplex.core import ConfigError

FILE_NAME = "secret"
_FORM = re.compile(rb"[0-9a-f]{64}\n")


class MasterSecret:
    """Derives independent keys by purpose. Never shows the secret."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def derive(self, purpose: str) -> bytes:
        """A 32-byte key for one purpose."""
        return hmac.digest(self._key, f"loraplex {purpose}".encode(), hashlib.sha256)

    @property
    def check_value(self) -> str:
        """Tells one secret from another and gives nothing away; kept in the database."""
        return self.derive("check value 1").hex()[:32]

    def __repr__(self) -> str:
        return "MasterSecret(***)"


def load_or_create_secret(data_dir: Path) -> MasterSecret:
    """Read the secret, or make it where there is none. Raises ConfigError if others may read it or it is damaged."""
    path = data_dir / FILE_NAME
    try:
        return _load(path)
    except FileNotFoundError:
        _create(path)
        return _load(path)


def _load(path: Path) -> MasterSecret:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise
        raise ConfigError(f"The secret file {str(path)!r} cannot be opened: {error.strerror}.") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"The secret file {str(path)!r} is not a regular file.")
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise ConfigError(f"The secret file {str(path)!r} has mode {mode:04o}; others may reach it, set 0600.")
        text = os.read(fd, 128)
    finally:
        os.close(fd)
    if _FORM.fullmatch(text) is None:
        raise ConfigError(f"The secret file {str(path)!r} is damaged: 64 hex digits and a line end are wanted.")
    return MasterSecret(bytes.fromhex(text.decode()))


def _create(path: Path) -> None:
    """Write a whole file or none; where another process was first, its file stays."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secrets.token_hex(32).encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        temporary.unlink()
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
