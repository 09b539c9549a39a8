// The primitives of the target machine: ptx.h for a GPU,
// the emulator's host.h (tests/tools/emulation) for a host.
#pragma once

#include PYATTN_ISA_HEADER
