"""Scripts that build the wheels and check them in clean environments, as a new user would; see docs/releasing.md."""
