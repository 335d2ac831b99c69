"""Pages and pictures of the documentation that are counted or drawn, not timed."""
