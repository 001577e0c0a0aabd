# What the wheel has beside its Python files (python/pyproject.toml): the shared library under one name, the C header, from which the structs of the calls
# are read, and Highway's library where the system has it as a shared one only (Debian). All found beside each other: RPATH is $ORIGIN.
set(package fastweight)
set_target_properties(fastweight_shared PROPERTIES NO_SONAME ON VERSION "" SOVERSION "" INSTALL_RPATH "$ORIGIN" BUILD_WITH_INSTALL_RPATH ON)
# The C++ library of the compiler is newer than that of many systems that have the same glibc.
target_link_options(fastweight_shared PRIVATE -static-libstdc++ -static-libgcc -s)
install(FILES $<TARGET_FILE:fastweight_shared> DESTINATION ${package})
install(FILES include/fastweight/fastweight.h DESTINATION ${package}/include/fastweight)
get_target_property(highway_type hwy::hwy TYPE)
get_target_property(highway_file hwy::hwy IMPORTED_LOCATION_NONE)
if(NOT highway_file)
  get_target_property(highway_file hwy::hwy IMPORTED_LOCATION_RELEASE)
endif()
if(highway_type STREQUAL "SHARED_LIBRARY" OR highway_file MATCHES "\\.so")
  file(REAL_PATH "${highway_file}" highway_real)
  install(FILES ${highway_real} DESTINATION ${package} RENAME libhwy.so.1)
endif()
