# Compile settings that all targets of the project share.
function(fw_target name)
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wshadow;-Wno-psabi>")
  # Only what the C header marks FW_API leaves the shared library.
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden C_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  # Three instruction sets are compiled and chosen at run time: AVX-512, AVX2 + FMA, and the baseline. More of them
  # cost compile time and bring little to these kernels.
  target_compile_definitions(${name} PRIVATE "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX3_DL)")
  fw_unity(${name})
endfunction()

# A sanitizer must see every object of a program, so it is set for all targets at once. -g1: file and line in reports.
# -O1 is quick to compile and quick enough to run; build type Debug keeps the assertions of the standard library.
if(FW_SANITIZE)
  add_compile_options(-fsanitize=${FW_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1 -O1)
  add_link_options(-fsanitize=${FW_SANITIZE})
  add_compile_definitions(_GLIBCXX_ASSERTIONS)
endif()
