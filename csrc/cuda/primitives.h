// The primitives of the machine that is compiled for: ptx.h for a
// GPU, the emulator's host.h (tests/tools/emulation) for a host.
#pragma once

#include PYATTN_ISA_HEADER
