"""Where models/, datasets/ and app.py lie: inside an installed wheel, else beside the package in a checkout."""

from pathlib import Path

import workbench

_PACKAGE = Path(workbench.__file__).resolve().parent


def content(name: str) -> Path:
    """The path of a content file or folder, such as `content("models")`."""
    installed = _PACKAGE / "_content" / name
    return installed if installed.exists() else _PACKAGE.parent / name
