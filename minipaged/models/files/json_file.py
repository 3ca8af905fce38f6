"""Reading the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

from minipaged.errors import ModelLoadError


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises `ModelLoadError`: it cannot be read, or is not JSON, or not an object."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds {type(content).__name__}; expected an object with keys. Download it again.")
    return content
