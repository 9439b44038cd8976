"""What to say where a package of an extra is not installed."""

from __future__ import annotations


def missing(package: str, extra: str) -> str:
    """'the package X is missing (...)', with how it is had."""
    return f"the package {package} is missing {how_to_get(extra)}"


def how_to_get(extra: str) -> str:
    """Covey is installed from its own folder, and so are its extras."""
    return f"(in Covey's folder: pip install '.[{extra}]')"
