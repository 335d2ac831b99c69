"""Pages and pictures of the documentation that are computed or drawn, not timed."""
