"""A step of the model in compiled loops: the fast path of a CPU that has a C++ compiler beside it. Never required."""
