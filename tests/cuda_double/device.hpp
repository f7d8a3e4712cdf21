// The whole double. The first thing that launch.cpp includes, since compilers look for a compiled header nowhere else.
#include "bulk.cuh"
