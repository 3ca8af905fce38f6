"""Where minipaged keeps what it can make or fetch again."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_cache_folder() -> Path:
    """MINIPAGED_CACHE, or `minipaged` in the user's cache folder; it may not exist yet.

    Raises RuntimeError where the user has no home.
    """
    if chosen := os.environ.get("MINIPAGED_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "minipaged" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "minipaged"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "minipaged"
