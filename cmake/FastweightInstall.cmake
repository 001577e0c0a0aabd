# make install: the program with its manual page and completions, the shared library with its header, a CMake package, a pkg-config
# file, the recipes.
include(CMakePackageConfigHelpers)

install(TARGETS fastweight_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS fastweight_shared EXPORT fastweightTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/fastweight/fastweight.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/fastweight)
install(DIRECTORY recipes/ DESTINATION ${CMAKE_INSTALL_DATADIR}/fastweight/recipes FILES_MATCHING PATTERN "*.toml")
install(FILES examples/attention.c DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples)
install(FILES README.md CHANGELOG.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# The program itself writes them, from the table of options that --help reads. Not with sanitizers: such builds are not installed.
if(NOT FW_SANITIZE)
  set(pages)
  function(fw_page folder name) # ARGN: the arguments with which the program prints it
    set(file ${PROJECT_BINARY_DIR}/pages/${folder}/${name})
    add_custom_command(OUTPUT ${file} COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_BINARY_DIR}/pages/${folder}
      COMMAND fastweight_program ${ARGN} > ${file} DEPENDS fastweight_program VERBATIM)
    install(FILES ${file} DESTINATION ${CMAKE_INSTALL_DATADIR}/${folder})
    set(pages ${pages} ${file} PARENT_SCOPE)
  endfunction()
  fw_page(bash-completion/completions fastweight completion bash)
  fw_page(zsh/site-functions _fastweight completion zsh)
  fw_page(fish/vendor_completions.d fastweight.fish completion fish)
  fw_page(man/man1 fastweight.1 man)
  add_custom_target(fastweight_pages ALL DEPENDS ${pages})
endif()

# The library has no dependency that a user must find at compile time, so the targets file is the whole package. The ABI
# is kept from 0.2.0 on (tools/freeze_abi.py).
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fastweight)
install(EXPORT fastweightTargets NAMESPACE fastweight:: FILE fastweightConfig.cmake DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fastweightConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fastweightConfigVersion.cmake DESTINATION ${package_dir})

# Paths relative to the .pc file: it stays right whatever prefix `cmake --install --prefix` is given.
file(RELATIVE_PATH pc_to_prefix /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/fastweight.pc.in ${PROJECT_BINARY_DIR}/fastweight.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fastweight.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
