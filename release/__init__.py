"""Builds what is published, and tries it as a stranger would; see docs/releasing.md."""
