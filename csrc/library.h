// Instruction sets: the compiled ones, those that this CPU has, and the active one.
#pragma once

#include <string>
#include <vector>

namespace pyattn {

std::vector<std::string> compiled_isas();   // best first
std::vector<std::string> available_isas();  // those that this CPU has, best first
std::string active_isa();
void set_isa(const std::string& name);  // throws std::invalid_argument

}  // namespace pyattn
