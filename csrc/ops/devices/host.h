// torch as the host of libpyattn: its threads and its memory.
#pragma once

#include "library.h"

namespace pyattn {

extern const Host torch_host;

}  // namespace pyattn
