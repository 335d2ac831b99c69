"""The Metal compute shaders, as package data; README.md says how a kernel is bound."""
