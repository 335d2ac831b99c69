"""What a program is made of: views, kernel declarations and calls, the plan, its memory and its file format."""
