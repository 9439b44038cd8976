"""Moved: import from reference.files.budget (both engines share the arithmetic). To be removed."""

from reference.files.budget import *  # noqa: F403
