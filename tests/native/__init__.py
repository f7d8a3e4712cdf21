"""The C++ code under sanitizers."""
