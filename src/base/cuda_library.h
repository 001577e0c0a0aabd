// NVIDIA's libraries that are opened at run time, not linked: where they may lie.
#pragma once

#include <initializer_list>

namespace fw {

// The first of these files that can be opened, or null: in the folders of FW_CUDA_LIBS (with colons between them; an
// empty one is the loader), where those are given and `given_alone` in no other. By the program's rpath and the loader;
// in CUDA's folders, in what `make gpu` brought and in the folders of Python's packages. It is never closed.
void* open_cuda_library(std::initializer_list<const char*> names, bool given_alone = true);

// The address of a function in it, or null.
void* function_of(void* library, const char* name);

}  // namespace fw
