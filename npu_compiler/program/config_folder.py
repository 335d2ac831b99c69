"""The folder for a user's files that cannot be regenerated: their key, and the keys that they trust."""

import os
from pathlib import Path


def config_folder() -> Path:
    """$XDG_CONFIG_HOME/npu-simulation, else ~/.config/npu-simulation; it may not exist yet.

    Raises:
        FileNotFoundError: this user has no home.
    """
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".config"
        except RuntimeError as error:
            raise FileNotFoundError(f"{error}; set XDG_CONFIG_HOME") from error
    return base / "npu-simulation"
