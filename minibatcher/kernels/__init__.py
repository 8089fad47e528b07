"""The attention kernels from outside: whether they are right, whether they compile, how fast they are."""
