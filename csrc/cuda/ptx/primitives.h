// The primitives of the target machine: ptx.h for a GPU,
// the emulator's host.h (tests/tools/emulation) for a host.
#pragma once

// Whether kernels use the warpgroups of compute capability 9.0.
#ifndef PYATTN_WARPGROUPS
#define PYATTN_WARPGROUPS 0
#endif

#include PYATTN_ISA_HEADER
