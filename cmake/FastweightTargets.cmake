# Compile settings that all targets of the project share.
function(fw_target name)
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wshadow;-Wno-psabi;-Werror=switch>")
  # Only what the C header marks FW_API leaves the shared library.
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden C_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  # Three instruction sets are compiled and chosen at run time: AVX-512, AVX2 + FMA, and the baseline. More of them
  # cost compile time and bring little to these kernels. A sanitizer's build runs one of them, from the same source: it has no AVX2.
  set(targets_left_out "HWY_SSSE3|HWY_SSE4|HWY_AVX3_DL")
  if(FW_SANITIZE)
    string(APPEND targets_left_out "|HWY_AVX2")
  endif()
  target_compile_definitions(${name} PRIVATE "HWY_DISABLED_TARGETS=(${targets_left_out})")
  if(FW_SANITIZE_LEVEL STREQUAL "-O0")
    fw_optimise_kernels(${name})
  endif()
  if(FW_NATIVE)
    fw_native(${name})
  endif()
  fw_unity(${name})
endfunction()

# SIMD kernels for the instruction set of this machine alone: a quarter of the time that three sets take to compile.
function(fw_native name)
  get_target_property(sources ${name} SOURCES)
  foreach(source IN LISTS sources)
    if(source MATCHES "\\.cpp$")
      get_filename_component(source ${source} ABSOLUTE)
      file(STRINGS ${source} simd REGEX "foreach_target\\.h")
      if(simd)
        set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS -O2 -march=native)
        set_property(SOURCE ${source} APPEND PROPERTY COMPILE_DEFINITIONS HWY_COMPILE_ONLY_STATIC)
      endif()
    endif()
  endforeach()
endfunction()

# What computes in a build at -O0: the recurrence, its reference and its tests at -O1, SIMD kernels at -O2, where clang
# compiles most of them faster than at -O1.
function(fw_optimise_kernels name)
  if(name MATCHES "^(fw_(core_host|reference|base|test_support)|test_scan)$")
    target_compile_options(${name} PRIVATE -O1)
  endif()
  get_target_property(sources ${name} SOURCES)
  foreach(source IN LISTS sources)
    if(source MATCHES "/cpu/.*\\.cpp$")
      file(STRINGS ${source} simd REGEX "foreach_target\\.h" LIMIT_COUNT 1)
      if(simd)
        set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS -O2)
      endif()
    endif()
  endforeach()
endfunction()

# A sanitizer must see every object of a program, so it is set for all targets at once. -g1: file and line in reports.
# Build type Debug keeps the assertions of the standard library. At -O0 clang compiles what is watched in a third to a fifth of the time that GCC takes at -O1
# (CONTRIBUTING.md), and what computes gets more (fw_optimise_kernels).
if(FW_SANITIZE)
  set(FW_SANITIZE_LEVEL -O1 CACHE STRING "Optimisation of what a sanitizer watches, but for what computes")
  add_compile_options(-fsanitize=${FW_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1 ${FW_SANITIZE_LEVEL})
  add_link_options(-fsanitize=${FW_SANITIZE})
  add_compile_definitions(_GLIBCXX_ASSERTIONS)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang") # as GCC says it
    if(FW_SANITIZE MATCHES "address")
      add_compile_definitions(__SANITIZE_ADDRESS__)
    elseif(FW_SANITIZE MATCHES "thread")
      add_compile_definitions(__SANITIZE_THREAD__)
    endif()
  endif()
endif()
