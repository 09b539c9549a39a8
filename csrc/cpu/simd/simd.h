// The vectors of the instruction set being compiled; math.h has functions of them.
#pragma once

#include PYATTN_ISA_HEADER
