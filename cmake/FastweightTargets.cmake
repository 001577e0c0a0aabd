# Compile settings shared by all targets, and the dependency bundles of the floors.
add_library(fw_deps_core INTERFACE)
target_link_libraries(fw_deps_core INTERFACE OpenMP::OpenMP_CXX fw_dnnl PkgConfig::OPENBLAS fmt::fmt hwy::hwy Threads::Threads)
add_library(fw_deps_engine INTERFACE)
target_link_libraries(fw_deps_engine INTERFACE nlohmann_json::nlohmann_json PkgConfig::SENTENCEPIECE)
add_library(fw_deps_cli INTERFACE)
target_link_libraries(fw_deps_cli INTERFACE CLI11::CLI11 tomlplusplus::tomlplusplus)

function(fw_target name)
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_compile_options(${name} PRIVATE -Wall -Wextra -Wshadow -Wno-psabi)
  # Three instruction sets are compiled and chosen at run time: AVX-512, AVX2 + FMA, and the baseline. More of them
  # cost compile time and bring little to these kernels.
  target_compile_definitions(${name} PRIVATE "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX3_DL)")
  if(FW_SANITIZE)
    target_compile_options(${name} PUBLIC -fsanitize=${FW_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g -O1)
    target_link_options(${name} PUBLIC -fsanitize=${FW_SANITIZE})
    if(FW_SANITIZE MATCHES "thread")
      target_compile_definitions(${name} PUBLIC FW_STD_THREADS=1)
    endif()
  endif()
endfunction()
