"""The parts of a program: views, kernel declarations and calls, the plan, its memory and its file format."""
