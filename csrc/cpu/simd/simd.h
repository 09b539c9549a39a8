// The vectors of the instruction set that is compiled, and the functions over them.
#pragma once

#include PYATTN_ISA_HEADER

#include "cpu/simd/math.h"
