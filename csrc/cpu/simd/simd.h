// The vectors of the instruction set that is compiled; math.h has the functions over them.
#pragma once

#include PYATTN_ISA_HEADER
